"""Whatever is asked, the answer is whole: an array, or a problem that names what is wrong; never a failure."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.server.serving import Server, serving
from tests.support.synthetic import Job, spec

RUN = "plain"
WORDS = [
    *[
        "",
        "0",
        "-1",
        "1",
        "9" * 19,
        "-" + "9" * 19,
        "9" * 30,
        "1e3",
        "0x10",
        "\u0661",
        "first",
        "last",
        "1:2",
        ":",
        "::",
        "::-1",
    ],
    *[
        "::0",
        "...",
        "0,0,0,0",
        "9" * 19 + ":",
        "-" + "9" * 19 + "::" + "9" * 19,
        "nan",
        "inf",
        "true",
        "w",
        "/",
        "..",
        ".",
    ],
    *["../../etc/passwd", "%2e%2e", "\\", "C:", "\x00", "a\nb", "é", "\U0001f600", "*", "[", "!w", "a" * 3000],
]
NAMES = ["slice", "format", "dtype", "attempt", "partial", "download", "steps", "bins", "scale", "match", "stat", "odd"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    job = Job(run=tmp_path_factory.mktemp("hostile") / RUN, params=(spec("w", 6, 5), spec("s"))).steps([1, 2])
    job.close()
    with serving(job.run) as running:
        yield running


word = st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
queries = st.dictionaries(st.sampled_from(NAMES), word, max_size=3)
routes = st.sampled_from(["steps/{}/grads/{}", "grads/{1}", "norms", "steps/{}/grads/{}/hist"])


@given(routes, word | st.just("1"), word | st.just("w"), queries, st.booleans())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("steps/{}/grads/{}", "9" * 19, "w", {}, False)
@example("steps/{}/grads/{}", "1", "w", {"attempt": "9" * 30}, False)
@example("grads/{1}", "", "w", {"steps": "0:" + "9" * 19}, False)
@example("grads/{1}", "", "w", {"steps": "0:9:" + "9" * 19}, False)
@example("norms", "", "", {"steps": "-" + "9" * 19 + ":"}, False)
def test_no_question_is_a_failure(
    server: Server, route: str, step: str, name: str, query: dict[str, str], head: bool
) -> None:
    """No address makes the service fail: the status is below 500, an error is a problem, and no path is in it."""
    path = route.format(quote(step, safe=""), quote(name, safe=""))
    text = "&".join(f"{key}={quote(value, safe='')}" for key, value in query.items())
    address = f"/api/v1/runs/{RUN}/{path}?{text}"
    answer = (server.head if head else server.get)(address)
    assert answer.status_code < 500, (address, answer.text)
    if answer.status_code >= 400 and not head:
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["type"].startswith("/problems/")
    elif answer.status_code == 200 and not head:
        assert int(answer.headers["content-length"]) == len(answer.content)
