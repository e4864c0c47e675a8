"""The one object that programs get of an error."""

from __future__ import annotations

from gradtap.errors import PROBLEM_SCHEMA, ParamNotFoundError, problem_body


def test_an_error_is_one_object() -> None:
    """Type, title, status, detail and exit code come from the table, facts stand beside them and replace none."""
    error = ParamNotFoundError("no w").noting(did_you_mean=["v"], status=200, type="x")
    assert problem_body(error) == {
        "did_you_mean": ["v"],
        "schema": PROBLEM_SCHEMA,
        "type": "/problems/parameter-not-found",
        "title": "parameter not found",
        "status": 404,
        "detail": "no w",
        "exit_code": 4,
    }


def test_words_for_somebody_else() -> None:
    """Detail and facts may be worded anew, and further keys beside or in place of the others."""
    body = problem_body(ParamNotFoundError("no w").noting(a=1), detail="none", facts={"b": 2}, status=500, instance="i")
    assert (body["detail"], body["b"], body["status"], body["instance"]) == ("none", 2, 500, "i")
    assert "a" not in body


def test_any_other_exception_has_one_too() -> None:
    """An error that is none of gradtap's is the table's last."""
    assert problem_body(RuntimeError("x"))["type"] == "/problems/error"
