from __future__ import annotations

import csv
import io
import json
import math

import numpy as np
import pytest

from gradtap.cli.output import emit, form_of, moment, number, shape_text, size, to_json
from gradtap.errors import UsageError
from gradtap.query.answer import Answer

ANSWER = Answer(
    query="ls",
    facts={"step": 3},
    rows=[{"name": "a", "shape": [2, 3], "norm": 1.5}, {"name": "b,c", "shape": [], "norm": None}],
    rows_name="parameters",
)


def test_json_is_one_object_with_a_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints a single object that names its schema and holds facts and rows."""
    emit(ANSWER, "json")
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "gradtap.ls/1"
    assert body["step"] == 3
    assert [row["name"] for row in body["parameters"]] == ["a", "b,c"]


def test_jsonl_is_one_object_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """`--jsonl` prints each row on its own line."""
    emit(ANSWER, "jsonl")
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == ["a", "b,c"]


def test_csv_has_a_header_and_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    """`--csv` prints a header, quotes commas, writes shapes as 2x3 and nothing for a missing value."""
    emit(ANSWER, "csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows == [
        {"name": "a", "shape": "2x3", "norm": "1.5"},
        {"name": "b,c", "shape": "", "norm": ""},
    ]


def test_csv_may_have_rows_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """A verb whose table differs from its rows gives the table for `--csv`, and for nothing else."""
    emit(ANSWER, "csv", table=[{"other": 1}])
    emit(ANSWER, "jsonl", table=[{"other": 1}])
    assert capsys.readouterr().out.startswith('other\n1\n{"name": "a"')


def test_csv_without_rows_lists_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    """An answer of single values becomes field,value lines."""
    emit(Answer(query="info", facts={"state": "live", "steps": {"count": 2}}), "csv")
    assert list(csv.reader(io.StringIO(capsys.readouterr().out))) == [
        ["field", "value"],
        ["state", "live"],
        ["steps", '{"count": 2}'],
    ]


def test_rows_that_happen_to_be_none_stay_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty list of rows is an empty list, not the facts."""
    empty = Answer(query="steps", facts={"store": "x"}, rows_name="steps")
    emit(empty, "json")
    emit(empty, "jsonl")
    assert capsys.readouterr().out == '{"schema": "gradtap.steps/1", "store": "x", "steps": []}\n'


def test_table_prints_the_pictures_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Eyes get the pictures, and stdout holds nothing else."""
    emit(ANSWER, "table", pictures=["drawn"])
    assert capsys.readouterr() == ("drawn\n", "")


def test_nonfinite_values_become_null_and_are_counted() -> None:
    """JSON has no NaN: it becomes null, and its count stays, so that a failure never reads as absence."""
    body = json.loads(to_json({"a": math.nan, "b": [np.float64(np.inf), -math.inf, 1.0], "c": np.int64(3)}))
    assert body == {"a": None, "b": [None, None, 1.0], "c": 3, "nonfinite": {"nan": 1, "posinf": 1, "neginf": 1}}


def test_two_forms_are_refused() -> None:
    """Two forms at once are a usage error that names both."""
    with pytest.raises(UsageError, match="--json and --csv exclude each other"):
        form_of(as_json=True, as_jsonl=False, as_csv=True)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_sizes_are_in_powers_of_1024(count: int, text: str) -> None:
    """Bytes are shown in binary units."""
    assert size(count) == text


def test_texts_of_what_is_not_there() -> None:
    """A scalar, a missing number and a missing time each have a word."""
    assert (shape_text(()), number(None), moment(math.nan), moment(None)) == ("scalar", "-", "-", "-")
