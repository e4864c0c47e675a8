"""The store that the check serves: the demo's where torch is installed, else one that is made up."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from images import run

STEPS = 4


def make_store(folder: Path, root: Path, log: Path) -> tuple[Path, str]:
    """A store below `folder`, and what it is. Raises `Failed`."""
    if all(importlib.util.find_spec(name) for name in ("torch", "accelerate", "deepspeed")):
        store = folder / "demo.gradtap"
        code = "import sys; from gradtap.cli.app import main; sys.exit(main())"
        words = ["demo", f"--store={store}", f"--steps={STEPS}"]
        run([sys.executable, "-c", code, *words], log, env=os.environ | {"PYTHONPATH": str(root)}, cwd=folder)
        return store, f"{STEPS} steps of `gradtap demo`, which its own check found right"
    from tests.support.synthetic import Job

    Job(run=folder / "synthetic.gradtap").steps(range(1, STEPS + 1)).close()
    return folder / "synthetic.gradtap", f"{STEPS} made-up steps, for there is no torch here to train with"
