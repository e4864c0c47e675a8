"""`run.json`: what a run is and which sessions are in force. Replaced by rename, so it is the one switch of a run."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gradtap.errors import DamagedError, FormatVersionError, NotARunError, nearest
from gradtap.store import files
from gradtap.store.paths import SESSION_NAME, SessionPaths, session_folders
from gradtap.version import FORMAT, __version__

RUN_NAME = "run.json"
OUR_NAMES = frozenset({RUN_NAME, "lock", "sessions"})
"""What a folder may hold that was begun as a run and has no run.json yet."""
_MOST_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """The contents of `run.json`. `run` is a random id that stays; `gradtap` is the version that created the run."""

    format: int
    run: str
    name: str
    tags: Mapping[str, Any] = field(default_factory=dict)
    sessions: tuple[str, ...] = ()
    gradtap: str = __version__


def create_run(run_dir: Path, name: str | None = None) -> RunFile:
    """Make a run of a folder, or adopt the run that is there already (its name then stays).

    `name` defaults to the folder's, without `.gradtap`. Raises `StoreError` where it cannot be written,
    `DamagedError` and `FormatVersionError` as `read_run`.
    """
    files.make_dirs(run_dir)
    path = run_dir / RUN_NAME
    if not path.exists():
        # A run.json that was lost takes no session with it: those that are whole are listed again.
        held = tuple(s for s in session_folders(run_dir) if SessionPaths(run_dir, s).session_json.exists())
        title = name or run_dir.absolute().name.removesuffix(".gradtap") or "run"
        files.create_new(
            path, _encode(RunFile(format=FORMAT, run=uuid.uuid4().hex, name=title, sessions=held)), sync=True
        )
    return read_run(run_dir)


def refuse_foreign_folder(run_dir: Path) -> None:
    """Raise `NotARunError` for a folder that holds other things and no run, or lies within another run."""
    for parent in run_dir.parents:
        if (parent / RUN_NAME).is_file() and (parent / "sessions").is_dir():
            raise NotARunError(f"{run_dir} lies within the run {parent}; give a path outside of it")
    if not run_dir.is_dir() or (run_dir / RUN_NAME).exists():
        return
    others = sorted(p.name for p in run_dir.iterdir() if p.name not in OUR_NAMES and not p.name.startswith("."))
    if others:
        shown = ", ".join(others[:3]) + (" ..." if len(others) > 3 else "")
        raise NotARunError(
            f"{run_dir} holds other things ({shown}) and no run; give a path that does not exist yet, such as "
            f"{run_dir / 'mine.gradtap'}"
        )


def read_run(run_dir: Path) -> RunFile:
    """Read `run.json`.

    Raises `NotARunError` for a folder that is missing or holds no run, saying what is near; `DamagedError` for a
    file that is not what gradtap writes; `FormatVersionError` for a newer format; `StoreError` where it cannot
    be read.
    """
    path = run_dir / RUN_NAME
    try:
        present = path.is_file()
    except OSError as error:
        raise files.store_error("read", path, error) from error
    if not present:
        raise NotARunError(_not_a_run(run_dir))
    data = files.read_object(path)
    _check_format(path, data)
    return RunFile(
        format=FORMAT,
        run=files.field_of(data, "run", str, path),
        name=files.field_of(data, "name", str, path),
        tags=files.field_of(data, "tags", dict, path),
        sessions=_sessions(path, data),
        gradtap=files.field_of(data, "gradtap", str, path),
    )


def add_session(run_dir: Path, session: str) -> RunFile:
    """Put a session in force, as the newest; the run as it is then. On the disk when it returns.

    The caller holds the run's lock. Raises `StoreError` where it cannot be written, else as `read_run`.
    """
    run = read_run(run_dir)
    if session in run.sessions:
        return run
    run = replace(run, sessions=(*run.sessions, session))
    files.write_atomic(run_dir / RUN_NAME, _encode(run), sync=True)
    return run


def _encode(run: RunFile) -> bytes:
    return json.dumps(asdict(run), indent=2).encode() + b"\n"


def _check_format(path: Path, data: dict[str, Any]) -> None:
    found = files.field_of(data, "format", int, path)
    if found > FORMAT:
        wrote = data.get("gradtap")
        wanted = f"gradtap>={wrote}" if isinstance(wrote, str) else "gradtap"
        raise FormatVersionError(
            f"{path.parent} is in format {found}, this gradtap {__version__} reads format {FORMAT}; "
            f"install a newer one: pip install --upgrade '{wanted}'"
        )
    if found < 1:
        raise DamagedError(f"{path}: 'format' is {found}, 1 is the lowest; run `gradtap verify`")


def _sessions(path: Path, data: dict[str, Any]) -> tuple[str, ...]:
    names = files.field_of(data, "sessions", list, path)
    for name in names:
        # A name becomes a part of a path: nothing else may pass.
        if not isinstance(name, str) or not SESSION_NAME.fullmatch(name):
            raise DamagedError(f"{path}: session {name!r} is not a name such as '0000'; run `gradtap verify`")
    if len(set(names)) != len(names):
        raise DamagedError(f"{path}: a session is listed twice in {names}; run `gradtap verify`")
    return tuple(names)


def _not_a_run(run_dir: Path) -> str:
    for parent in run_dir.absolute().parents:
        if (parent / RUN_NAME).is_file() and (parent / "sessions").is_dir():
            return f"{run_dir} is inside of a run; point at {parent}"
    if run_dir.is_file():
        return f"{run_dir} is a file; point at the folder of a run, which holds a {RUN_NAME}"
    if not run_dir.is_dir():
        meant = nearest(run_dir.name, [path.name for path in _runs_below(run_dir.parent)])
        return f"{run_dir} does not exist{meant or '; point at the folder that was given to gradtap.attach'}"
    near = _runs_below(run_dir)
    if near:
        more = f" and {len(near) - _MOST_LISTED} more" if len(near) > _MOST_LISTED else ""
        return f"{run_dir} is not a run, but holds some: {', '.join(map(str, near[:_MOST_LISTED]))}{more}; point at one"
    return f"{run_dir} holds no {RUN_NAME}, so it is not a run; point at the folder that was given to gradtap.attach"


def _runs_below(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if (p / RUN_NAME).is_file())
    except OSError:
        return []
