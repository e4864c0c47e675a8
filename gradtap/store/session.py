"""One session: made by rank 0 under the run's lock, waited for by the other ranks, marked closed at the end.

The order on disk is group, journal folder, session.json, and run.json once all ranks have seen it: a session that is
listed is whole.
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gradtap.config import Settings
from gradtap.encode.checksum import crc32c
from gradtap.errors import DamagedError, FormatVersionError, OtherModelError, RendezvousError, StoreError
from gradtap.plan.serial import canonical_json, first_difference, plan_from_json, plan_to_json
from gradtap.store.files import field_of, make_dirs, write_atomic
from gradtap.store.growth import write_group
from gradtap.store.paths import SessionPaths, session_folders
from gradtap.store.row_specs import RowLayout
from gradtap.store.runfile import read_run
from gradtap.types import EngineFacts, SessionPlan
from gradtap.version import FORMAT, __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHead:
    """What session.json says."""

    session: str
    nonce: str
    created: float
    closed: float | None
    engine: Mapping[str, Any]
    plan: SessionPlan
    codec: str
    summary: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]

    @property
    def layout(self) -> RowLayout:
        """What shapes the session's row arrays."""
        return RowLayout(
            plan=self.plan,
            groups=int(self.engine["groups"]),
            summary=self.summary,
            max_time=int(self.settings["max_time"]),
        )


def plan_checksum(plan: SessionPlan) -> int:
    """crc32c of the plan's canonical JSON: equal where ranks planned the same."""
    return crc32c(canonical_json(plan_to_json(plan)))


def create_session(
    run_dir: Path,
    *,
    plan: SessionPlan,
    engine: EngineFacts,
    nonce: str,
    codec: str,
    summary: str,
    settings: Settings,
) -> SessionPaths:
    """Make the next session of a run. The caller holds the run's lock.

    Raises `OtherModelError` where the run holds another model, `StoreError` where it cannot be written; what was
    begun is removed, what was there before is not touched.
    """
    _refuse_other_model(run_dir, plan)
    paths = _next_folder(run_dir)
    try:
        head = SessionHead(
            session=paths.name,
            nonce=nonce,
            created=time.time(),
            closed=None,
            engine={
                "name": engine.name,
                "world": engine.world,
                "groups": engine.groups,
                "settings": dict(engine.settings),
            },
            plan=plan,
            codec=codec,
            summary=summary,
            settings=asdict(settings),
            versions=_versions(),
        )
        write_group(paths, head.layout, codec, captures=settings.capacity, rows=settings.capacity, replace=False)
        for folder in ("journal", "tags"):
            make_dirs(paths.root / folder)
        write_head(paths, head)
    except BaseException:
        shutil.rmtree(paths.root, ignore_errors=True)
        raise
    return paths


def write_head(paths: SessionPaths, head: SessionHead) -> None:
    """Write session.json by rename."""
    fields = {
        "format": FORMAT,
        "session": head.session,
        "nonce": head.nonce,
        "created": head.created,
        "closed": head.closed,
        "engine": dict(head.engine),
        "codec": head.codec,
        "summary": head.summary,
        "settings": dict(head.settings),
        "versions": dict(head.versions),
        "plan": plan_to_json(head.plan),
    }
    write_atomic(paths.session_json, json.dumps(fields).encode(), sync=True)


def read_head(paths: SessionPaths) -> SessionHead:
    """Read session.json.

    Raises `StoreError` where it is missing or unreadable, `FormatVersionError` for a newer format, `DamagedError`
    where it is not what gradtap writes.
    """
    try:
        text = paths.session_json.read_bytes()
    except OSError as error:
        raise StoreError(
            error.errno, f"cannot read {paths.session_json}: {error.strerror}; run `gradtap verify {paths.run}`"
        ) from error
    try:
        fields = json.loads(text)
        _check_format(paths, fields)
        return SessionHead(
            session=field_of(fields, "session", str, paths.session_json),
            nonce=field_of(fields, "nonce", str, paths.session_json),
            created=field_of(fields, "created", float, paths.session_json),
            closed=None if fields["closed"] is None else field_of(fields, "closed", float, paths.session_json),
            engine=field_of(fields, "engine", dict, paths.session_json),
            plan=_plan(paths, fields["plan"]),
            codec=field_of(fields, "codec", str, paths.session_json),
            summary=field_of(fields, "summary", str, paths.session_json),
            settings=field_of(fields, "settings", dict, paths.session_json),
            versions=field_of(fields, "versions", dict, paths.session_json),
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise DamagedError(
            f"{paths.session_json} is not a session file ({type(error).__name__}: {error}); "
            f"run `gradtap verify {paths.run}`"
        ) from error


def _plan(paths: SessionPaths, fields: Any) -> SessionPlan:
    try:
        return plan_from_json(fields)
    except DamagedError as error:
        raise DamagedError(f"{paths.session_json}: {error}; run `gradtap verify {paths.run}`") from error


def _check_format(paths: SessionPaths, fields: Any) -> None:
    # Before anything else is looked at: a newer format may mean something else by every field.
    found = fields["format"]
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(f"format is {found!r}")
    if found > FORMAT:
        wrote = fields.get("versions", {}).get("gradtap")
        wanted = f"gradtap>={wrote}" if isinstance(wrote, str) else "gradtap"
        raise FormatVersionError(
            f"{paths.session_json} is in format {found}, this gradtap {__version__} reads format {FORMAT}; "
            f"install a newer one: pip install --upgrade '{wanted}'"
        )


def wait_session(run_dir: Path, nonce: str, *, plan: SessionPlan, timeout: float) -> SessionPaths:
    """The session that rank 0 made under `nonce`, once it is seen in this rank's view of the store.

    Raises `RendezvousError` after `timeout` seconds, or where this rank planned another layout.
    """
    deadline = time.monotonic() + timeout
    while True:
        for name in reversed(session_folders(run_dir)):
            paths = SessionPaths(run_dir, name)
            if paths.session_json.exists() and (head := read_head(paths)).nonce == nonce:
                _refuse_other_plan(head, plan)
                return paths
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"this rank does not see the session that rank 0 made in {run_dir} after {timeout:g} s; the store "
                "must be one folder that all ranks share: give a path on a shared file system"
            )
        time.sleep(0.05)


def _refuse_other_plan(head: SessionHead, plan: SessionPlan) -> None:
    if plan_checksum(head.plan) != plan_checksum(plan):
        where = first_difference(head.plan, plan) or "the layout of arrays"
        raise RendezvousError(
            f"this rank planned another layout than rank 0 ({where}); attach must see the same model, engine and "
            "GRADTAP_* settings on every rank"
        )


def _refuse_other_model(run_dir: Path, plan: SessionPlan) -> None:
    sessions = read_run(run_dir).sessions
    if not sessions:
        return
    held = read_head(SessionPaths(run_dir, sessions[-1])).plan
    where = first_difference(held, plan)
    if where is not None:
        raise OtherModelError(
            f"{run_dir} holds gradients of another model ({where}); nothing in it was changed: "
            "give attach the path of a new store"
        )


def _next_folder(run_dir: Path) -> SessionPaths:
    taken = session_folders(run_dir)
    number = int(taken[-1]) + 1 if taken else 0
    while True:
        paths = SessionPaths(run_dir, f"{number:04d}")
        make_dirs(paths.root.parent)
        try:
            paths.root.mkdir()
            return paths
        except FileExistsError:
            number += 1
        except OSError as error:
            raise StoreError(error.errno, f"cannot make {paths.root}: {error.strerror}") from error


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("gradtap", "numpy", "zarr", "numcodecs", "torch", "accelerate", "deepspeed"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
