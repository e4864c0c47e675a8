"""Looks for files that do not belong, temporary ones that a killed job left, and user tags that do not read."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from gradtap.errors import GradtapError
from gradtap.read.report import Findings
from gradtap.read.session import Session
from gradtap.read.tags import damaged_tags, tag_files
from gradtap.store.lock import LOCK_NAME
from gradtap.store.runfile import RUN_NAME

CHUNK_FILE = re.compile(r"c(\.\d+)*")
RANK_FILE = re.compile(r"r\d{5,}(\.micro)?")
MOST_TAG_NOTES = 5
STRANGER = "readers ignore it; delete it if it is not wanted"


def check_run_folder(run: Path, found: Findings, *, live: bool) -> None:
    """The run's own folder, without what lies in its sessions."""
    ours = {RUN_NAME, LOCK_NAME, "sessions"}
    _note_strangers((file for file in _listed(run) if file.name not in ours), found, live=live)
    _note_strangers((file for file in _listed(run / "sessions") if not file.is_dir()), found, live=live)


def check_session_files(session: Session, arrays: Collection[str], found: Findings, *, live: bool) -> None:
    """The session's folder; `arrays` are the paths of all arrays in its group."""
    root = session.paths.root
    ours = {"session.json", "schedule.log", "gradients.zarr", "journal", "tags"}
    _note_strangers((file for file in _listed(root) if file.name not in ours), found, live=live)
    for folder in (root / "journal", root / "tags"):
        _note_strangers((file for file in _listed(folder) if not RANK_FILE.fullmatch(file.name)), found, live=live)
    _check_tags(session, found)
    group = session.paths.zarr
    _note_strangers((file for file in sorted(group.rglob("*")) if not _known(file, group, arrays)), found, live=live)


def _known(file: Path, group: Path, arrays: Collection[str]) -> bool:
    if file.is_dir() or file.name == "zarr.json":
        return True
    folder = file.parent.relative_to(group).as_posix()
    return folder in arrays and CHUNK_FILE.fullmatch(file.name) is not None


def _note_strangers(files: Iterable[Path], found: Findings, *, live: bool) -> None:
    for file in files:
        if not (file.name.startswith(".") and file.name.endswith(".tmp")):
            what = "gradtap did not make it"
            found.note(file, f"a folder; {what}" if file.is_dir() else f"a file; {what}", STRANGER)
        elif not live:
            found.note(file, "a temporary file that a killed job left", "it may be deleted")


def _check_tags(session: Session, found: Findings) -> None:
    for file in tag_files(session.paths):
        try:
            bad = list(damaged_tags(file))
        except GradtapError as error:
            bad = [str(error)]
        for what in bad[:MOST_TAG_NOTES]:
            found.note(file, what, "the tags of its step are not served; gradients and ledger are not concerned")
        if len(bad) > MOST_TAG_NOTES:
            found.note(file, f"{len(bad) - MOST_TAG_NOTES} more lines do not read", "as above")


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
