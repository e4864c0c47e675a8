"""Writes the golden store of this version: `python -m tests.golden.make`. Once for each release, never again.

Two sessions with an attempt, a dropped capture, a selection, an unclosed end, several dtypes, cut parameters, tags.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from gradtap.version import __version__
from tests.support.synthetic import SMALL, Job, spec

HERE = Path(__file__).parent
PARAMS = (
    spec("embed.weight", 11, 7, aliases=("head.weight",)),
    spec("scale"),
    spec("half.weight", 3, 2, 2, dtype="bfloat16"),
    spec("frozen.bias", 4, status="frozen"),
    spec("double.bias", 5, dtype="float64"),
)


def first(run: Path) -> Job:
    """The closed session: steps 1 to 6, step 3 dropped, step 5 a selection."""
    job = Job(run=run, params=PARAMS, world=2, seed=1, k=3, settings=SMALL)
    for step in range(1, 7):
        select = ("embed.weight", "scale") if step == 5 else None
        job.step(step, dropped=(1,) if step == 3 else (), select=select)
        job.recorders[0].tags(step, {"loss": step / 8})
    job.close()
    return job


def second(run: Path) -> Job:
    """The unclosed session: steps 6 and 7, on three ranks."""
    job = Job(run=run, params=PARAMS, world=3, seed=2, settings=SMALL)
    job.steps((6, 7))
    job.kill()
    return job


def main() -> None:
    """Write `<version>.tar.gz` beside this file; an existing one is kept."""
    target = HERE / f"{__version__}.tar.gz"
    if target.exists():
        raise SystemExit(f"{target} exists; stores of a release are not written again")
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run.gradtap"
        first(run)
        second(run)
        with tarfile.open(target, "w:gz") as archive:
            archive.add(run, "run.gradtap")


if __name__ == "__main__":
    main()
