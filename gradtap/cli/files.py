"""Where the bytes of a verb go: a file that appears whole or not at all, or a stdout that is no terminal."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Annotated

import typer

from gradtap.errors import StoreError, UsageError

Output = Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="Write into a file.")]
Force = Annotated[bool, typer.Option("--force", help="Write over a file that is there.")]

PIECE = 2**18
"""Bytes of one write, so that an interrupt comes through between two."""


def check_output(output: str, *, force: bool, binary: str = "", instead: str = "") -> None:
    """Refuse before any work what could not be written at its end.

    `binary` names what a terminal cannot show, empty for text; `instead` is what to do besides naming a file. Raises
    `UsageError` for a file that is there, unless `force`, and for binary data onto a terminal.
    """
    if output:
        if os.path.isdir(output):
            raise UsageError(f"{output} is a folder; give -o the name of a file")
        if not force and os.path.lexists(output) and not _is_special(Path(output)):
            raise UsageError(f"{output} is there already; give another name, or --force to write over it")
        if not os.path.isdir(os.path.dirname(output) or "."):
            raise UsageError(f"there is no folder {os.path.dirname(output)}; make it first, or give another name")
    elif binary and sys.stdout.isatty():
        raise UsageError(f"{binary} is binary, which spoils a terminal; give -o FILE, or send it into a pipe{instead}")


def put(parts: Iterable[bytes | bytearray | memoryview], output: str, *, force: bool) -> None:
    """Write the parts into `output`, or to stdout where it is empty.

    A file is written under another name beside it and renamed when it is whole; a link stays, and what it leads to is
    written. A device or a pipe is written into as it is. Raises `StoreError` where it cannot be written, `UsageError`
    where somebody else has made the file meanwhile.
    """
    if output:
        _into_file(parts, Path(output), force)
        return
    stream = sys.stdout.buffer
    for part in parts:
        for piece in _pieces(part):
            stream.write(piece)
    stream.flush()


def _is_special(path: Path) -> bool:
    """Whether a device, pipe or socket is there: to be written into, never to be put in the place of."""
    return path.exists() and not path.is_file()


def _into_file(parts: Iterable[bytes | bytearray | memoryview], path: Path, force: bool) -> None:
    if _is_special(path):
        try:
            with path.open("wb", buffering=0) as stream:
                for part in parts:
                    for piece in _pieces(part):
                        _all_of(piece, stream)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
        return
    path = Path(os.path.realpath(path))
    own = path.with_name(f".{path.name[:80]}.{secrets.token_hex(4)}.part")
    try:
        with own.open("xb") as file:
            for part in parts:
                for piece in _pieces(part):
                    file.write(piece)
        if force:
            own.replace(path)
        else:
            _link(own, path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            own.unlink()


def _all_of(piece: memoryview, stream: FileIO) -> None:
    while piece.nbytes:
        # A pipe may take a part of it.
        piece = piece[stream.write(piece) or 0 :]


def _link(own: Path, path: Path) -> None:
    try:
        # Unlike a rename it never takes the place of a file.
        os.link(own, path)
    except FileExistsError as error:
        raise UsageError(f"{path} has been made meanwhile; give another name, or --force to write over it") from error
    except OSError:
        # A file system without links.
        own.rename(path)


def _pieces(part: bytes | bytearray | memoryview) -> Iterable[memoryview]:
    view = memoryview(part)
    if not view.nbytes:
        return
    flat = view.cast("B")
    for at in range(0, flat.nbytes, PIECE):
        yield flat[at : at + PIECE]
