from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest

from gradtap.cli.app import main
from tests.support.synthetic import MODEL, Job

STORED = [p.name for p in MODEL if p.stored]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command line prints; nothing on stderr."""
    assert main(list(words)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_norms_as_csv_have_a_column_for_each_step(recorded: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """One row for each parameter, its norms under the numbers of the steps."""
    rows = list(csv.DictReader(io.StringIO(printed(capsys, "norms", str(recorded.run), "--csv", "--steps", "2:6"))))
    assert [row["name"] for row in rows] == STORED
    assert list(rows[0]) == ["name", "2", "3", "5"]
    for row in rows:
        for step in (2, 3, 5):
            assert float(row[str(step)]) == pytest.approx(np.linalg.norm(recorded.expected(row["name"], step)))


def test_norms_as_lines_make_sense_alone(recorded: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """One object for each parameter, with its statistic and steps."""
    text = printed(capsys, "norms", str(recorded.run), "mlp", "--jsonl", "--stat", "absmax")
    rows = [json.loads(line) for line in text.splitlines()]
    assert [(row["name"], row["stat"], row["steps"]) for row in rows] == [
        (name, "absmax", [1, 2, 3, 5, 6]) for name in ("mlp.weight", "mlp.bias")
    ]
    assert rows[1]["values"][0] == pytest.approx(abs(recorded.expected("mlp.bias", 1)).max())


@pytest.mark.parametrize("stat", ["l2", "mean", "zeros"])
def test_norms_are_a_heat_map_for_eyes(recorded: Job, capsys: pytest.CaptureFixture[str], stat: str) -> None:
    """A row of cells for each parameter, between its name and the scale."""
    lines = printed(capsys, "norms", str(recorded.run), "--stat", stat).splitlines()
    assert lines[0].startswith("log10 of ") and lines[0].endswith("steps 1 to 6")
    assert [line.split()[0] for line in lines[1 : len(STORED) + 1]] == STORED


def test_norms_of_no_steps(recorded: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt statistic and a range without steps have their exit codes."""
    assert main(["norms", str(recorded.run), "--stat", "absmx"]) == 2
    assert "did you mean absmax" in capsys.readouterr().err
    assert main(["norms", str(recorded.run), "--steps", "x"]) == 2
    assert main(["norms", str(recorded.run), "--steps", "90:"]) == 4
    assert main(["norms", str(recorded.run), "mpl.weight"]) == 4
    assert "mlp.weight" in capsys.readouterr().err


def test_hist_shows_the_stored_one(recorded: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """By power of two, with what is not finite apart, and where it comes from."""
    out = printed(capsys, "hist", str(recorded.run), "3", "mlp.weight")
    assert "the stored summary" in out and "a row for each power of two" in out and "0 NaN" in out
    body = json.loads(printed(capsys, "hist", str(recorded.run), "3", "mlp.weight", "--json"))
    assert sum(row["count"] for row in body["bins"]) == 29 * 17


def test_hist_counts_anew(recorded: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal bins of a slice are those of NumPy."""
    words = ("3", "mlp.weight", "--slice", "3:9", "--scale", "linear", "--bins", "5")
    rows = list(csv.DictReader(io.StringIO(printed(capsys, "hist", str(recorded.run), *words, "--csv"))))
    counts, _ = np.histogram(recorded.expected("mlp.weight", 3)[3:9], 5)
    assert [int(row["count"]) for row in rows] == counts.tolist()
    assert "values in 5 equal bins" in printed(capsys, "hist", str(recorded.run), *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scale", "lienar"], "did you mean linear"),
        (["--bins", "9"], "linear"),
        (["--scale", "linear", "--bins", "0"], "0"),
    ],
)
def test_hist_refuses(recorded: Job, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    """A misspelt scale, or bins that it does not have, is a usage error that says what there is."""
    assert main(["hist", str(recorded.run), "1", "mlp.bias", *words]) == 2
    assert said in capsys.readouterr().err
