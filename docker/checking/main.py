"""docker/check: build the image of the service on a bare Debian, run it, ask it, stop it, and leave nothing behind.

Needs no container engine: debootstrap makes the base, buildah builds and runs with chroot isolation, in a storage of
its own. With --train it also builds the training image and serves what that has recorded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import outside

ROOT = Path(__file__).resolve().parents[2]


def options(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="docker/check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "store",
        nargs="?",
        type=Path,
        help="run to serve (default: one made by `gradtap demo`, or made up without torch)",
    )
    parser.add_argument(
        "--base", metavar="TAR", type=Path, help="root file system to build on, instead of debootstrap's"
    )
    parser.add_argument("--suite", default="bookworm", help="of the base (default %(default)s)")
    parser.add_argument(
        "--mirror",
        default=os.environ.get("DOCKER_CHECK_MIRROR"),
        help="Debian mirror (default DOCKER_CHECK_MIRROR, then what this machine uses for the suite)",
    )
    parser.add_argument("--pip-conf", type=Path, help="pip.conf for the build (default: made from `pip config list`)")
    parser.add_argument(
        "--work",
        default=os.environ.get("DOCKER_CHECK_WORK"),
        help="folder that keeps the base for the next time (default DOCKER_CHECK_WORK, then a temporary one)",
    )
    parser.add_argument(
        "--train", action="store_true", help="build the training image too, train in it, serve its store"
    )
    parser.add_argument(
        "--volume", action="append", default=[], help="for `buildah build`: HERE:THERE:ro, such as a folder of wheels"
    )
    return parser.parse_args(words)


def clear(work: Path) -> None:
    """Remove the folder of this run; not where a storage could not be removed, for something is mounted in it."""
    if not any((work / name).exists() for name in ("storage", "state", "tmp")):
        shutil.rmtree(work)


def stop(number: int, _: FrameType | None) -> None:
    """End as by an exception, so that everything is undone."""
    raise SystemExit(128 + number)


def main(words: list[str] | None = None) -> int:
    """Run the check; the exit code: 0 all held, 1 something did not, 2 something is missing on this machine."""
    wanted = options(words)
    lacking = outside.missing()
    if lacking:
        sys.stderr.write("docker/check cannot run here:\n" + "".join(f"- {each}\n" for each in lacking))
        return 2
    sys.path[1:1] = [str(ROOT), str(ROOT / "server")]
    # Not before: these need what was just looked for.
    from images import Failed
    from steps import check, say

    signal.signal(signal.SIGTERM, stop)
    began = time.monotonic()
    with ExitStack() as undo:
        kept = Path(wanted.work).resolve() if wanted.work else None
        if kept is not None:
            kept.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="gradtap-check-", dir=kept))
        undo.callback(clear, work)
        try:
            check(ROOT, work, kept, wanted, undo)
        except Failed as error:
            say(f"\ndocker/check failed: {error}")
            return 1
        except KeyboardInterrupt:
            return 130
    say(f"\ndocker/check: all held  [{time.monotonic() - began:.1f} s]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
