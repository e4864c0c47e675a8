"""The parent of `gradtap demo`: trains in child processes, has the result checked by another, then says what there is.

No torch here: the processes that need it are children.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from gradtap.cli.output import to_json
from gradtap.config import Settings
from gradtap.demo.options import Options
from gradtap.demo.processes import run_group, tail, warnings_said
from gradtap.demo.report import build_report, session_names, show_report
from gradtap.errors import LockedError, MissingExtraError
from gradtap.store.files import make_dirs
from gradtap.store.lock import is_alive, read_lock
from gradtap.store.runfile import refuse_foreign_folder

TRAIN = "gradtap.demo.train"
CHECK = "gradtap.demo.check"
NEEDS = {
    "deepspeed": ("torch", "accelerate", "deepspeed"),
    "ddp": ("torch", "accelerate"),
    "torch": ("torch", "accelerate"),
}


def run_demo(options: Options) -> int:
    """Train, check and report. Returns 0 where the check held, 1 where it did not.

    Raises `MissingExtraError` (exit code 8) where a package is not installed, `CaptureError` (10) where training
    failed or nothing was captured, and what `refuse_store` and opening the store raise.
    """
    need(options.engine)
    refuse_store(Path(options.store))
    with tempfile.TemporaryDirectory(prefix="gradtap-demo-") as folder:
        work = Path(folder)
        options.save(work / "options.json")
        before = session_names(options.store)
        with _progress() as bar:
            began = time.monotonic()
            watch = Watcher(work / "events.jsonl", bar, options.steps)
            run_group(TRAIN, work, world=options.world, poll=watch.poll)
            watch.poll()
            watch.facts["warnings"] = warnings_said(work, options.world)
            trained = time.monotonic() - began
            checked = bar.add_task("checking against plain torch", total=None)
            result = run_check(work)
            bar.update(checked, total=1, completed=1)
        report = build_report(options, before, watch.facts, result, train_seconds=trained)
    if options.json:
        sys.stdout.write(to_json(report) + "\n")
    else:
        show_report(report)
    return 0 if report["check"]["held"] else 1


def need(engine: str) -> None:
    """Raise `MissingExtraError`, with the install command, for a package that the engine needs and nobody installed."""
    missing = [name for name in NEEDS[engine] if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"the demo with engine {engine} needs {', '.join(missing)}, not installed here: pip install 'gradtap[demo]'"
        )


def refuse_store(store: Path) -> None:
    """Say before any process is started that a store cannot be written.

    Raises `StoreError` for a path that cannot be a folder, `NotARunError` for a folder of other things, and
    `LockedError` for a run that another job writes.
    """
    refuse_foreign_folder(store)
    make_dirs(store)
    holder = read_lock(store)
    if holder is not None and is_alive(holder, Settings().lock_stale, may_write=False):
        raise LockedError(
            f"{store} is being written by {holder.describe()}; wait until it has ended, or give another folder with "
            "--store"
        )


def run_check(work: Path, module: str = CHECK) -> dict[str, Any]:
    """The result that the checking process printed; one that does not hold, with its words, where it failed."""
    with (work / "check.err").open("wb") as log:
        command = [sys.executable, "-m", module, str(work)]
        # One thread: on a busy machine several would spend their time waiting for each other.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, check=False
        )
    if done.returncode == 0:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result
    said = tail(work / "check.err")
    return {"held": False, "steps": [], "problem": f"the check ended with exit code {done.returncode}:\n{said}"}


class Watcher:
    """Follows the events that rank 0 appends, and moves the bar. `facts` holds what the events said last."""

    def __init__(self, path: Path, bar: Progress, steps: int) -> None:
        self._path = path
        self._bar = bar
        self._read = 0
        self._task: TaskID = bar.add_task("starting (imports)", total=steps)
        self.facts: dict[str, Any] = {"step": 0}

    def poll(self) -> None:
        """Take in the whole lines that have arrived since."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        self.facts |= event
        if kind == "step":
            self.facts.setdefault("first_loss", event["loss"])
            label = f"training, loss {event['loss']:.3f}"
            self._bar.update(self._task, completed=event["step"], description=label)
        elif kind == "attached":
            self._bar.update(self._task, description="training")


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))
