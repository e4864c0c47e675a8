"""`gradtap run`: scripts that know nothing of gradtap, started as their users start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import gradtap
from tests.support.launch import ROOT, free_port

SCRIPTS = Path(__file__).parent.parent / "support" / "unedited"
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-addr", "127.0.0.1"],
    "accelerate": [
        *(str(BIN / "accelerate"), "launch", "--use_deepspeed", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
    ],
    "deepspeed": [str(BIN / "deepspeed"), "--no_local_rank", "--num_gpus", "2"],
}
SCRIPTED = {
    "hf-trainer": ("python", "trainer.py", []),
    "lightning": ("python", "fit.py", []),
    "ddp": ("torchrun", "loop.py", []),
    "zero2": ("accelerate", "loop.py", ["zero2"]),
    "zero2 by deepspeed": ("deepspeed", "loop.py", ["zero2"]),
}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    store: Path
    kept: Path


def run(folder: Path, command: list[str], *, options: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Done:
    """`gradtap run OPTIONS -- COMMAND`, ended."""
    words = [sys.executable, "-m", "gradtap", "run", "--store", "made.gradtap", *options, "--", *command]
    done = subprocess.run(words, cwd=folder, env=environment(env), capture_output=True, text=True, timeout=120)
    return Done(done.returncode, done.stdout, done.stderr, folder / "made.gradtap", folder / "kept.npz")


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    """Of a user's shell, on the loopback interface."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        # Asked of by the deepspeed launcher, which counts GPUs otherwise.
        "DS_ACCELERATOR": "cpu",
        **(more or {}),
    }


def scripted(folder: Path, launcher: str, script: str, more: list[str], **kwargs: tuple[str, ...]) -> Done:
    """A script of the folder, under a launcher."""
    words = list(LAUNCHERS[launcher])
    if launcher == "torchrun":
        words += ["--master-port", str(free_port())]
    if launcher == "accelerate":
        words += ["--main_process_port", str(free_port())]
    if launcher == "deepspeed":
        words += ["--master_port", str(free_port())]
    return run(folder, [*words, str(SCRIPTS / script), str(folder / "kept.npz"), *more], **kwargs)


@pytest.mark.parametrize("case", SCRIPTED)
def test_an_unedited_script_is_recorded(tmp_path: Path, case: str) -> None:
    """Every step's stored gradients are bit for bit those that the script itself saw, before clipping."""
    done = scripted(tmp_path, *SCRIPTED[case])
    assert done.code == 0, done.err
    stored, kept = gradtap.open(done.store), np.load(done.kept)
    assert list(stored.steps) == [1, 2, 3]
    assert {f"{step}/{param.name}" for step in stored.steps for param in stored.params if param.stored} == set(kept)
    for key in kept:
        step, _, name = key.partition("/")
        np.testing.assert_array_equal(stored.grad(name, int(step)).values, kept[key])
    assert all(stored.ledger.row(step)["flags"] == () for step in stored.steps)
    assert all(stored.ledger.row(step)["clip_coef"] < 1 for step in stored.steps)
    ranks = list((done.store / "sessions/0000/journal").iterdir())
    assert len(ranks) == (1 if SCRIPTED[case][0] == "python" else 2)


def test_several_models_have_a_store_each(tmp_path: Path) -> None:
    """By the class of the model; neither's gradients nor clipping get into the other's. The output is the script's."""
    done = scripted(tmp_path, "python", "gan.py", [], options=("--every", "2,3", "--select", "*", "--select", "!*bias"))
    assert done.code == 0 and done.out == "trained\n", done.err
    kept = np.load(done.kept)
    assert sorted(path.name for path in done.store.iterdir()) == ["Discriminator", "Generator"]
    for name in ("Discriminator", "Generator"):
        stored = gradtap.open(done.store / name)
        assert list(stored.steps) == [2, 3]
        for step in stored.steps:
            np.testing.assert_array_equal(stored.grad("weight", step).values, kept[f"{name}/{step}/weight"])
            row = stored.ledger.row(step)
            assert row["micro_seen"] == 1 and row["flags"] == () and row["clip_coef"] < 1
            with pytest.raises(LookupError):
                stored.grad("bias", step)


def test_the_exit_code_of_a_recorded_script_is_passed_on(tmp_path: Path) -> None:
    """A script that trains and then fails: its code, and a readable run."""
    done = scripted(tmp_path, "python", "loop.py", ["crash"])
    assert done.code == 3 and done.out == "trained\n"
    assert list(gradtap.open(done.store).steps) == [1, 2, 3]


def test_nothing_attached_is_exit_code_10_with_the_reason(tmp_path: Path) -> None:
    """A command without training, a script that imports Accelerate only, and a model that is never called."""
    done = run(tmp_path, [sys.executable, "-c", "print('worked')"])
    assert (done.code, done.out) == (10, "worked\n") and "no Python process of the command imported" in done.err
    done = run(tmp_path, [sys.executable, "-c", "import accelerate"])
    assert done.code == 10 and "no process trained through Accelerate" in done.err
    code = "import torch, accelerate; m = torch.nn.Linear(1, 1); o = torch.optim.SGD(m.parameters(), lr=1)"
    done = run(tmp_path, [sys.executable, "-c", f"{code}; accelerate.Accelerator(cpu=True).prepare(m, o)"])
    assert done.code == 10 and "prepared Linear, which then was not called in training mode" in done.err
    assert not done.store.exists()


def test_a_refusal_is_exit_code_10_with_its_words(tmp_path: Path) -> None:
    """What gradtap cannot record ends the script at its first step, and is said at the end."""
    code = (
        "import torch, accelerate; a = accelerate.Accelerator(cpu=True)\n"
        "m = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])\n"
        "x, y, o = a.prepare(*m, torch.optim.SGD(m.parameters(), lr=1)); x(torch.ones(1, 1))"
    )
    done = run(tmp_path, [sys.executable, "-c", code])
    assert done.code == 10 and "an optimizer (SGD) trains 2 prepared models (Linear, Linear)" in done.err


def test_a_failing_command_keeps_its_code(tmp_path: Path) -> None:
    """Also where nothing was recorded, which is said beside it; a command that is not there is a usage error."""
    done = run(tmp_path, [sys.executable, "-c", "raise SystemExit(7)"])
    assert done.code == 7 and "nothing was recorded" in done.err
    assert run(tmp_path, ["no-such-program"]).code == 2
    assert run(tmp_path, []).code == 2
    assert run(tmp_path, ["true"], options=("--codec", "lossy")).code == 2


def test_a_signal_goes_to_the_command(tmp_path: Path) -> None:
    """SIGTERM to `gradtap run` ends the command, and 128 + 15 is the code."""
    code = "import sys, time; print('up', flush=True); time.sleep(60)"
    words = [sys.executable, "-m", "gradtap", "run", "--store", "made.gradtap", "--", sys.executable, "-c", code]
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
        begun = time.monotonic()
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(timeout=30) == 128 + signal.SIGTERM
    assert time.monotonic() - begun < 20


def test_the_users_own_sitecustomize_runs(tmp_path: Path) -> None:
    """It is found as without gradtap, under its own name, and its failure is shown as Python shows it."""
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "server")])
    code = "import sys, sitecustomize; print(sitecustomize.__file__, any('runner/site' in p for p in sys.path))"
    command = [sys.executable, "-c", code]
    # `gradtap` itself is a Python process too, and greets first.
    done = run(tmp_path, command, env={"PYTHONPATH": path})
    assert done.out == f"mine\nmine\n{tmp_path / 'sitecustomize.py'} False\n"
    (tmp_path / "sitecustomize.py").write_text("1 / 0\n")
    done = run(tmp_path, [sys.executable, "-c", "print('on')"], env={"PYTHONPATH": path})
    assert done.out == "on\n" and done.err.count("ZeroDivisionError") == 2


def test_an_unrelated_process_stays_light(tmp_path: Path) -> None:
    """No torch, no NumPy and nothing of gradtap is imported where no training framework is."""
    code = "import sys; print([n for n in ('torch', 'numpy', 'gradtap', 'json', 'typing') if n in sys.modules])"
    with_hook = run(tmp_path, [sys.executable, "-c", code]).out
    without = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True).stdout
    assert with_hook == without and "torch" not in without
