"""Docs are tests: the examples run, the commands run, and no argument, setting, verb or exit code is left out."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
from tests.support.synthetic import Job

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
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


def commands() -> list[str]:
    """The README's `gradtap VERB` lines on a run."""
    return [line.split("#")[0].strip() for line in re.findall(r"^gradtap \w+ +runs.*$", README, re.MULTILINE)]


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_readme_run(place: Path, command: str) -> None:
    """Each verb line works as written, PARAM standing for a parameter, and with --json."""
    words = shlex.split(command.replace("PARAM", "blocks.0.attention.qkv.weight"))[1:]
    for more in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "gradtap", *words, *more],
            cwd=place,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_every_verb_is_in_the_readme() -> None:
    """The command line has no verb that the README does not show, and the README none that there is not."""
    verbs = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    shown = set(re.findall(r"\bgradtap (\w+)(?= +runs/|$)", README, re.MULTILINE))
    assert verbs and verbs == shown


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
    named = {int(code) for code in re.findall(r"(\d+) [a-z]", text[: text.index("\n\n")])}
    errors = {problem.exit_code for problem in PROBLEMS.values()}
    assert named == errors | {0, exits.DAMAGED, exits.INTERRUPTED, exits.OUTPUT_CLOSED}


def test_every_flag_is_in_the_format() -> None:
    """With its name as readers show it."""
    assert all(f"`{name}`" in FORMAT for name in FLAG_NAMES.values())
