"""The verbs on a store that a recorder wrote, compared with what was put in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradtap.cli.app import main
from tests.support.synthetic import MODEL, Job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A closed run of six steps on three ranks, of which one rank dropped step 4."""
    made = Job(run=tmp_path_factory.mktemp("cli") / "real.gradtap")
    made.steps([1, 2, 3])
    made.step(4, dropped=[1])
    made.steps([5, 6])
    made.close()
    yield made


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The JSON object that a command line prints."""
    code = main([*words, "--json"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    body: dict[str, Any] = json.loads(out)
    return body


def test_info(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """`info` sees the closed state, the ranks, the steps and the gap that a rank left."""
    body = answer(capsys, "info", str(job.run))
    assert (body["state"], body["engine"], body["world"]) == ("closed", "synthetic", 3)
    assert body["steps"] == {"first": 1, "last": 6, "count": 5, "gaps": [4]}
    assert body["parameters"]["stored"] == sum(p.stored for p in MODEL)
    assert (body["parameters"]["frozen"], body["parameters"]["unoptimized"]) == (1, 1)
    assert body["raw_bytes"] == 5 * 4 * sum(p.numel for p in MODEL if p.stored)
    assert body["stored_bytes"] > 0


def test_ls(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """`ls` has the model's order and the norms of the gradients that were put in."""
    body = answer(capsys, "ls", str(job.run), "--step", "3")
    assert [row["name"] for row in body["parameters"]] == [p.name for p in MODEL]
    for row, param in zip(body["parameters"], MODEL, strict=True):
        assert (row["arrays"] > 0) == param.stored
        if param.stored:
            assert row["norm"] == pytest.approx(np.linalg.norm(job.expected(param.name, 3)), rel=1e-6)
    assert max(row["arrays"] for row in body["parameters"]) > 1


def test_steps(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """`steps` lists all six, the dropped one as not complete, and the norm over all parameters."""
    rows = answer(capsys, "steps", str(job.run))["steps"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["complete"] for row in rows] == [True, True, True, False, True, True]
    squares = [np.sum(job.expected(p.name, 2).astype(float) ** 2) for p in MODEL if p.stored]
    assert rows[1]["norm"] == pytest.approx(np.sqrt(sum(squares)), rel=1e-6)


def test_show(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """`show` prints the very values that were put in, of a slice too, and of an alias."""
    expected = job.expected("embed.weight", 5)
    body = answer(capsys, "show", str(job.run), "5", "embed.weight", "--slice", "3:5, ::2", "--head", "100")
    assert np.array_equal(np.float32(body["values"]), expected[3:5, ::2].ravel())
    assert body["summary"]["count"] == 14
    alias = answer(capsys, "show", str(job.run), "last", "head.weight")
    assert np.array_equal(np.float32(alias["values"]), job.expected("embed.weight", 6).ravel()[:8])


@pytest.mark.parametrize("words", [["info"], ["ls"], ["steps"], ["show", "1", "norm.scale"], ["verify"]])
def test_forms_for_eyes_and_tables(job: Job, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """Each verb also prints its other forms without a word on stderr."""
    for form in ([], ["--csv"], ["--jsonl"]):
        assert main([words[0], str(job.run), *words[1:], *form]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert out or (words == ["verify"] and form)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["show", "4", "embed.weight"], 4),
        (["show", "99", "embed.weight"], 4),
        (["show", "1", "embed.wieght"], 4),
        (["show", "1", "frozen.bias"], 4),
        (["show", "1", "embed.weight", "--slice", "99"], 2),
        (["show", "1", "embed.weight", "--slice", "a:b"], 2),
        (["ls", "--step", "99"], 4),
    ],
)
def test_what_is_not_there(job: Job, capsys: pytest.CaptureFixture[str], words: list[str], code: int) -> None:
    """Steps, parameters and slices that are not there have their exit codes and a message."""
    assert main([words[0], str(job.run), *words[1:]]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gradtap: ")


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without a run, and no folder at all, end with 3 for every verb."""
    for path in (tmp_path, tmp_path / "absent"):
        for words in (["info"], ["ls"], ["steps"], ["show", "1", "w"], ["verify"]):
            assert main([words[0], str(path), *words[1:], "--json"]) == 3
            assert json.loads(capsys.readouterr().err)["exit_code"] == 3


def test_damage_is_five(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped byte in a chunk ends `verify --deep` and the read that meets it with 5."""
    job = Job(run=tmp_path / "damaged.gradtap", kind="whole", world=1).steps([1, 2])
    job.close()
    shard = next(path for path in (job.paths.zarr / "mlp.weight").iterdir() if path.name.startswith("c."))
    body = bytearray(shard.read_bytes())
    index = np.frombuffer(bytes(body[:16]), "<u8")
    body[int(index[0]) + 20] ^= 0xFF
    shard.write_bytes(body)
    assert main(["show", str(job.run), "1", "mlp.weight"]) == 5
    assert "c." in capsys.readouterr().err
    assert main(["verify", str(job.run), "--deep"]) == 5
    out = capsys.readouterr().out
    assert "mlp.weight" in out
    assert "cure" in out
