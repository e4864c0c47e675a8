"""Docs are tests: the examples run, the commands run, and no argument, setting, verb or exit code is left out."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import typer
import zarr

import gradtap
from gradtap.cli import exits
from gradtap.cli.app import app
from gradtap.config import Settings
from gradtap.errors import PROBLEMS
from gradtap.flags import FLAG_NAMES
from gradtap.plan.rules import parse_rule
from gradtap_server.settings import ServerSettings
from tests.support.hf_training import make_model
from tests.support.synthetic import Job

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PARAM = "blocks.0.attention.qkv.weight"
FORMAT = (ROOT / "gradtap" / "FORMAT.md").read_text(encoding="utf-8")


def example(text: str, name: str) -> str:
    """The Python block under `<!-- example: name -->`."""
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found, f"no example {name}"
    return found[1]


class Block(torch.nn.Module):
    """Holds the parameter names that the examples use."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.ModuleDict({"qkv": torch.nn.Linear(8, 24)})
        self.up = torch.nn.Linear(24, 4)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return sum(block.up(block.attention["qkv"](batch)).square().mean() for block in self.blocks)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the README's training example has run."""
    from accelerate import Accelerator

    folder = tmp_path_factory.mktemp("readme")
    model = Model()
    data = torch.utils.data.DataLoader(torch.randn(40, 8), batch_size=4)
    names: dict[str, Any] = {
        "accelerator": Accelerator(cpu=True, gradient_accumulation_steps=2),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loader": data,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(example(README, "attach"), names)
        names["tap"].close()
    return folder


def test_the_training_example_records_its_steps(place: Path) -> None:
    """Ten micro-batches, two for each step: five steps are in the store."""
    assert list(gradtap.open(place / "runs/mine.gradtap").steps) == [1, 2, 3, 4, 5]


def test_the_query_example_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of it works on that run, and the slice is the slice."""
    monkeypatch.chdir(place)
    names: dict[str, Any] = {}
    exec(example(README, "query"), names)
    whole = names["run"].grad("blocks.0.attention.qkv.weight", 3)
    assert np.array_equal(np.asarray(names["g"]), np.asarray(whole)[0:8, ::2])


def test_the_zarr_example_gives_the_same_numbers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain zarr reads what gradtap reads."""
    monkeypatch.chdir(place)
    names: dict[str, Any] = {}
    exec(example(README, "zarr"), names)
    found = names["group"]["blocks.0.attention.qkv.weight"][names["k"]]
    assert np.array_equal(found, np.asarray(gradtap.open("runs/mine.gradtap").grad("blocks.0.attention.qkv.weight", 3)))


def test_the_format_examples_run(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole parameters, and cut ones joined by the recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.gradtap").symlink_to(place / "runs/mine.gradtap")
    names: dict[str, Any] = {}
    exec(example(FORMAT, "whole"), names)
    assert names["gradient"].shape == (4,)
    exec(example(FORMAT, "pieces"), names)
    job = Job(run=tmp_path / "cut.gradtap", world=3).steps([1, 2])
    job.close()
    group = zarr.open_group(str(job.paths.zarr), mode="r")
    assert group.attrs["pieces"], "nothing was cut"
    for param in job.params:
        if param.stored:
            assert np.array_equal(names["gradient"](group, param.name, 1), job.expected(param.name, 2))


def lines(name: str) -> list[str]:
    """The lines of the block under `<!-- commands: name -->`, without comments."""
    found = re.search(rf"<!-- commands?: {name} -->\n```\n(.*?)```", README, re.DOTALL)
    assert found, f"no commands {name}"
    return [line.split("  #")[0].strip() for line in found[1].splitlines()]


def ran(command: str, place: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A line of the README in a shell, PARAM standing for a parameter and `gradtap` for this checkout's."""
    script = f'gradtap() {{ "{sys.executable}" -m gradtap "$@"; }}\n' + command.replace("PARAM", PARAM)
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "NO_COLOR": "1", **more}
    return subprocess.run(
        ["bash", "-c", script], cwd=place, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("command", lines("look"))
def test_commands_of_the_readme_run(place: Path, command: str) -> None:
    """Each verb line works as written, and with --json where it does not write a file or print what a server sends."""
    plain = re.search(r" -o |^gradtap get ", command)
    for more in ("",) if plain else ("", " --json"):
        (place / "g.npy").unlink(missing_ok=True)
        done = ran(command + more, place)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() or " -o " in command
        assert not more or json.loads(done.stdout.splitlines()[0])["schema"].startswith("gradtap.")


def test_files_of_the_commands_have_the_gradients(place: Path) -> None:
    """What `gradtap grad` wrote is what Python reads, one step and a stack."""
    one, stack = (next(c for c in lines("look") if f"-o {name}" in c) for name in ("g.npy", "steps.npy"))
    for command in (one, stack):
        assert ran(command + " --force", place).returncode == 0
    run = gradtap.open(place / "runs/mine.gradtap")
    assert np.array_equal(np.load(place / "g.npy"), run.grad(PARAM, 3).values)
    assert np.array_equal(np.load(place / "steps.npy"), run.grad(PARAM, steps=[1, 2, 3]).values)


@contextlib.contextmanager
def serving(place: Path, command: str, **more: str) -> Iterator[str]:
    """The README's `gradtap serve` line, on a free port; gives the address that it says."""
    words = [sys.executable, "-m", *shlex.split(command), "--port", "0"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", **more}
    with subprocess.Popen(words, cwd=place, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = process.stderr.readline()
            port = re.search(r"http://[^ /]+:(\d+)", said)
            assert port, said + process.stderr.read()
            yield f"http://127.0.0.1:{port[1]}"
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=20)


def test_requests_of_the_readme_are_answered(place: Path) -> None:
    """Each curl line, and the verb line on an address, against the line that serves; the files are the gradients."""
    (command,) = lines("serve")
    with serving(place, command) as url:
        for line in lines("curl"):
            done = ran(line.replace("http://127.0.0.1:8000", url), place)
            assert done.returncode == 0 and "/problems/" not in done.stdout, line + done.stdout + done.stderr
            assert done.stdout.strip() or " -so " in line
            assert " -sI " not in line or done.stdout.startswith("HTTP/1.1 200 ")
            if re.match(r"curl -s ", line):
                assert json.loads(done.stdout)["schema"].startswith("gradtap.")
    run = gradtap.open(place / "runs/mine.gradtap")
    stack = safetensors.numpy.load_file(place / "steps.safetensors")[PARAM]
    assert np.array_equal(np.load(place / "g.npy"), run.grad(PARAM, 3).values)
    assert np.array_equal(stack, run.grad(PARAM, steps=[1, 2, 3]).values)


def test_tokens_of_the_readme_are_asked_for(place: Path) -> None:
    """With the token, the request and the verb are answered; without, they are refused."""
    export, command, request, verb = lines("token")
    token = ran(export + "; echo $GRADTAP_SERVER_TOKEN", place).stdout.strip()
    assert len(token) == 64
    with serving(place, command, GRADTAP_SERVER_TOKEN=token) as url:
        for line in (request, verb):
            at = line.replace("http://127.0.0.1:8000", url)
            assert "mine" in ran(at, place, GRADTAP_SERVER_TOKEN=token).stdout
            without = ran(at, place, GRADTAP_SERVER_TOKEN="")
            assert "mine" not in without.stdout
            assert "unauthenticated" in without.stdout or without.returncode == 6


@pytest.mark.parametrize("name", ["demo", "test", "install server"])
def test_install_lines_name_what_there_is(name: str) -> None:
    """The constraints and the extras of each `pip install` line are there; what follows it is a command of theirs."""
    (line,) = lines(name)
    install, _, then = line.partition(" && ")
    (extras,) = re.findall(r"-c tests/constraints.txt -e '\.\[(.*)\]'$", install)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known) and (ROOT / "tests/constraints.txt").is_file()
    assert then in ("gradtap demo", "pytest", "")


def test_the_compose_lines_are_those_that_are_tested(place: Path) -> None:
    """The file is there, and the request is the one that is made of the service with a token."""
    export, compose, request = lines("compose")
    assert (ROOT / shlex.split(compose)[3]).is_file() and shlex.split(compose)[4:] == ["up", "--build"]
    assert (export, request.replace("curl -H", "curl -s -H")) == (lines("token")[0], lines("token")[2])


def test_every_verb_is_in_the_readme() -> None:
    """The command line has no verb that the README does not show, and the README none that there is not."""
    verbs = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    shown = {c.split()[1] for name in ("look", "serve", "run") for c in lines(name)} | {"demo"}
    assert verbs and verbs == shown and "gradtap demo" in README


def test_the_line_that_records_an_unedited_script_does(tmp_path: Path) -> None:
    """With a script of the name that it says, which knows nothing of gradtap."""
    script = (
        "import accelerate, torch\naccelerator = accelerate.Accelerator(cpu=True)\nmodel = torch.nn.Linear(2, 1)\n"
        "model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "for _ in range(2):\n    accelerator.backward(model(torch.ones(1, 2)).sum())\n    optimizer.step()\n"
    )
    (tmp_path / "train.py").write_text(script)
    (command,) = lines("run")
    done = ran(command, tmp_path, PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert done.returncode == 0, done.stderr
    assert list(gradtap.open(tmp_path / "runs/train.gradtap").steps) == [1, 2]


def test_the_examples_of_the_trainers_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF Trainer and Lightning, as the README writes them."""
    import pytorch_lightning
    import transformers

    monkeypatch.chdir(tmp_path)
    args = transformers.TrainingArguments(
        output_dir="out", use_cpu=True, max_steps=2, report_to=[], disable_tqdm=True, dataloader_pin_memory=False
    )
    dataset = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])}] * 16
    names: dict[str, Any] = {"model": make_model(), "args": args, "dataset": dataset, "Trainer": transformers.Trainer}
    exec(example(README, "hf"), names)
    assert list(gradtap.open("runs/hf.gradtap").steps) == [1, 2]

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, rows: torch.Tensor) -> torch.Tensor:
            return self.layer(rows).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = functools.partial(pytorch_lightning.Trainer, accelerator="cpu", enable_model_summary=False, **quiet)
    loader = torch.utils.data.DataLoader(torch.ones(3, 2))  # type: ignore[arg-type,var-annotated]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="pytorch_lightning")
        exec(example(README, "lightning"), {"Trainer": trainer, "module": Module(), "loader": loader})
    assert list(gradtap.open("runs/lightning.gradtap").steps) == [1, 2, 3]


def test_every_setting_of_the_service_is_in_the_readme() -> None:
    """Each variable with its default, as the table says it."""
    assert all(f"`GRADTAP_SERVER_{field.name.upper()}`" in README for field in fields(ServerSettings))
    defaults = ServerSettings()
    for name in ("response_bytes", "read_bytes", "chunks", "json_elements", "cells", "page", "page_max"):
        row = next(line for line in README.splitlines() if f"`GRADTAP_SERVER_{name.upper()}`" in line)
        assert str(getattr(defaults, name)) in row


def test_every_argument_and_setting_is_in_the_readme() -> None:
    """attach's arguments in its table or its text, every setting in the table of settings."""
    taken = set(inspect.signature(gradtap.attach).parameters) - {"target", "store", "budget", "keep", "micro"}
    assert taken and all(f"| `{name}` |" in README for name in taken)
    settings = [f"GRADTAP_{field.name.upper()}" for field in fields(Settings)]
    assert all(f"`{name}`" in README for name in settings)


def test_rules_of_the_readme_parse() -> None:
    """What the table says `every` takes is taken."""
    row = next(line for line in README.splitlines() if line.startswith("| `every` |"))
    given = re.findall(r"`([^`]+)`", row)[2:]
    assert len(given) == 4
    for text in given:
        parse_rule(eval(text))


def test_exit_codes_of_the_readme_are_those_of_the_command_line() -> None:
    """All of them and no other: those of errors, 0, and the command line's own."""
    text = README[README.index("Exit codes:") :]
    named = {int(code) for code in re.findall(r"(\d+)\s[a-z]", text[: text.index("\n\n")])}
    errors = {problem.exit_code for problem in PROBLEMS.values()}
    assert named == errors | {0, exits.DAMAGED, exits.INTERRUPTED, exits.OUTPUT_CLOSED}


def test_every_flag_is_in_the_format() -> None:
    """With its name as readers show it."""
    assert all(f"`{name}`" in FORMAT for name in FLAG_NAMES.values())
