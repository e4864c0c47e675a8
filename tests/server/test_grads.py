"""One gradient over HTTP: every byte, every header, every form, over a real server on a real store."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tests.server.samples import NAMES, PARAMS, OddJob, array_of, grad_path, reads, same_bits
from tests.server.serving import Server, serving

STORED = [p for p in PARAMS if p.stored]
RUN = "odd"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> OddJob:
    """A closed run of three ranks, all dtypes, all odd numbers and names."""
    made = OddJob(run=tmp_path_factory.mktemp("grads") / RUN, params=PARAMS)
    made.steps(range(1, 7)).close()
    return made


@pytest.fixture(scope="module")
def server(job: OddJob) -> Iterator[Server]:
    with serving(job.run) as running:
        yield running


@pytest.mark.parametrize("param", STORED, ids=lambda p: p.name)
def test_values_bit_for_bit(server: Server, job: OddJob, param: Any) -> None:
    """Every gradient under every name comes as it was recorded: NaN, infinities, minus zero and subnormals too."""
    answer = server.get(grad_path(RUN, 3, param.name))
    found = array_of(answer)
    assert same_bits(found, job.expected(param.name, 3))
    assert unquote(answer.headers["x-gradtap-name"]) == param.name
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-gradtap-source-dtype"] == param.dtype


@pytest.mark.parametrize("param", [p for p in STORED if p.shape], ids=lambda p: p.name)
def test_native_dtype_bit_for_bit(server: Server, job: OddJob, param: Any) -> None:
    """`dtype=native` gives back the engine's own bits, two bytes an element for bfloat16 and float16."""
    answer = server.get(grad_path(RUN, 2, param.name, dtype="native"))
    assert answer.headers["x-gradtap-dtype"] == param.dtype
    assert answer.headers["x-gradtap-rounded"] == "0"
    assert same_bits(array_of(answer), job.captured(param.name, 2))


@pytest.mark.parametrize("param", STORED, ids=lambda p: p.name)
def test_npy_loads(server: Server, job: OddJob, param: Any) -> None:
    """NumPy loads the npy form, and finds the same bits."""
    answer = server.get(grad_path(RUN, 1, param.name, format="npy"))
    assert answer.headers["content-type"] == "application/x-npy"
    assert same_bits(np.load(io.BytesIO(answer.content)), job.expected(param.name, 1))


@pytest.mark.parametrize("name", ["w", "half", "double", "scalar", "none", "größe.β"])
def test_safetensors_loads(server: Server, job: OddJob, name: str) -> None:
    """The safetensors library loads that form, under the parameter's name."""
    answer = server.get(grad_path(RUN, 1, name, format="safetensors"))
    found = safetensors.numpy.load(answer.content)
    assert list(found) == [name]
    assert same_bits(found[name], job.expected(name, 1))


def test_safetensors_holds_bfloat16(server: Server, job: OddJob) -> None:
    """Safetensors carries bfloat16 itself."""
    answer = server.get(grad_path(RUN, 1, "half", format="safetensors", dtype="bf16"))
    length = int.from_bytes(answer.content[:8], "little")
    head = json.loads(answer.content[8 : 8 + length])
    start, stop = head["half"]["data_offsets"]
    body = np.frombuffer(answer.content[8 + length :][start:stop], ml_dtypes.bfloat16).reshape(head["half"]["shape"])
    assert head["half"]["dtype"] == "BF16"
    assert same_bits(body, job.captured("half", 1))


def test_json_form(server: Server, job: OddJob) -> None:
    """JSON has the facts and nested values; what it lacks is null, and counted."""
    body = server.json(grad_path(RUN, 4, "w", slice="0:2, 0:9", format="json"))
    wanted = job.expected("w", 4)[0:2, 0:9]
    assert body["schema"] == "gradtap.grad/1"
    assert (body["name"], body["shape"], body["dtype_captured"]) == ("w", [2, 9], "float32")
    assert body["nonfinite"] == {"nan": 1, "posinf": 1, "neginf": 1}
    flat = [value for row in body["values"] for value in row]
    assert len(flat) == wanted.size
    for found, value in zip(flat, wanted.ravel().tolist(), strict=True):
        assert found is None if not math.isfinite(value) else found == value
        assert found is None or math.copysign(1, found) == math.copysign(1, value)


@pytest.mark.parametrize("form", ["raw", "npy", "safetensors", "json"])
def test_accept_is_obeyed(server: Server, form: str) -> None:
    """The form that `Accept` names is the one that `format=` names."""
    named = server.get(grad_path(RUN, 1, "conv", format=form))
    media = named.headers["content-type"]
    asked = server.get(grad_path(RUN, 1, "conv"), headers={"Accept": f"text/html, {media};q=0.5, image/*"})
    assert asked.content == named.content
    assert asked.headers["content-type"] == media
    assert asked.headers["etag"] == named.headers["etag"]
    assert "Accept" in asked.headers["vary"]


def test_nothing_acceptable_is_406(server: Server) -> None:
    """Where no form fits, the problem lists those that there are."""
    for answer in (
        server.get(grad_path(RUN, 1, "w"), headers={"Accept": "text/html"}),
        server.get(grad_path(RUN, 1, "w", format="png")),
    ):
        assert answer.status_code == 406
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["cache-control"] == "no-store"
        assert set(answer.json()["supported"]) == {"raw", "npy", "json", "safetensors"}


def test_headers_say_all(server: Server, job: OddJob) -> None:
    """The headers name run, step, attempt, dtype, shape, completeness, flags and what was rounded."""
    answer = server.get(grad_path(RUN, "last", "double", slice="1:, ::2", dtype="f4"))
    headers = {name.removeprefix("x-gradtap-"): value for name, value in answer.headers.items() if "x-gradtap-" in name}
    assert headers.pop("run") == server.json(f"/api/v1/runs/{RUN}")["run"]
    wanted = job.expected("double", 6)[1:, ::2]
    rounded = np.count_nonzero(wanted.astype(np.float32).astype(np.float64) != wanted)
    assert headers == {
        "shape": "5,3",
        "dtype": "float32",
        "byteorder": "little",
        "name": "double",
        "step": "6",
        "attempt": "1",
        "factor": "1.0",
        "source-dtype": "float64",
        "flags": "nonfinite",
        "complete": "true",
        "rounded": str(rounded),
    }
    assert same_bits(array_of(answer), wanted.astype(np.float32))


def test_server_timing(server: Server) -> None:
    """Every answer tells how long its look-up took, and a GET how long reading and encoding did, in milliseconds."""
    for method, names in ((server.get, ["lookup", "read", "encode"]), (server.head, ["lookup"])):
        parts = method(grad_path(RUN, 1, "w")).headers["server-timing"].split(", ")
        assert [part.partition(";")[0] for part in parts] == names
        assert all(float(part.partition("dur=")[2]) >= 0 for part in parts)


@pytest.mark.parametrize("form", ["raw", "npy", "safetensors", "json"])
@pytest.mark.parametrize("name", ["w", "scalar", "none", "half"])
def test_head_is_get_without_reading(server: Server, form: str, name: str) -> None:
    """HEAD has GET's headers, but for what only the values tell, and reads no chunk; only JSON's length is unknown."""
    before = reads(server, RUN)
    head = server.head(grad_path(RUN, 2, name, format=form, dtype="native"))
    assert (head.status_code, head.content) == (200, b"")
    assert reads(server, RUN) == before
    get = server.get(grad_path(RUN, 2, name, format=form, dtype="native"))
    differ = {"x-gradtap-rounded", "server-timing", "x-request-id", "date"} | (
        {"content-length", "transfer-encoding"} if form == "json" else set()
    )
    assert {n: v for n, v in head.headers.items() if n not in differ} == {
        n: v for n, v in get.headers.items() if n not in differ
    }
    assert ("content-length" in head.headers) == (form != "json")
    assert int(get.headers["content-length"]) == len(get.content)


def test_unchanged_reads_nothing(server: Server) -> None:
    """A client that names the tag, in a list, weakly or by `*`, gets 304 with the same tag, and no chunk is read."""
    first = server.get(grad_path(RUN, 5, "w", slice="3:9"))
    before = reads(server, RUN)
    tag = first.headers["etag"]
    for named in (tag, f'"x", W/{tag}', "*"):
        for method in (server.get, server.head):
            again = method(grad_path(RUN, 5, "w", slice="3:9"), headers={"If-None-Match": named})
            assert (again.status_code, again.content) == (304, b"")
            for name in ("etag", "cache-control", "content-location", "vary"):
                assert again.headers[name] == first.headers[name]
    assert reads(server, RUN) == before
    assert server.get(grad_path(RUN, 5, "w", slice="3:9"), headers={"If-None-Match": '"x"'}).status_code == 200
    assert reads(server, RUN) > before


def test_tags_tell_answers_apart(server: Server) -> None:
    """Equal bytes have equal tags however they were asked for; another slice, step, form, dtype or name has another."""

    def tag(*words: Any, **query: Any) -> str:
        return str(server.head(grad_path(RUN, *words, **query)).headers["etag"])

    same = [
        tag(1, "w", slice="0:5"),
        tag("first", "w", slice="0:5, :"),
        tag(1, "head", slice="[-37:5]"),
        tag(1, "0", slice="0:5,...", format="raw", dtype="stored"),
        tag(1, "w", slice="0:5", attempt=1),
        tag(1, "w", slice="0:5", dtype="float32"),
    ]
    assert len(set(same)) == 1
    others = [
        tag(2, "w", slice="0:5"),
        tag(1, "w", slice="0:6"),
        tag(1, "w"),
        tag(1, "conv"),
        tag(1, "w", slice="0:5", format="npy"),
        tag(1, "w", slice="0:5", dtype="f2"),
        tag(1, "w", slice="0:5", dtype="f8"),
        tag(1, "w", slice="0:5", format="npy", dtype="bf16"),
    ]
    assert len({*same, *others}) == len(others) + 1


@pytest.mark.parametrize("step", ["last", "6"])
def test_content_location_is_lasting(server: Server, step: str) -> None:
    """An address without an attempt must be asked anew, and names the one that never need be, with the same bytes."""
    answer = server.get(
        grad_path(RUN, step, "layers/0/w", slice="1::2", dtype="f8"), headers={"Accept": "application/x-npy"}
    )
    assert answer.headers["cache-control"] == "no-cache"
    location = answer.headers["content-location"]
    run = answer.headers["x-gradtap-run"]
    assert location == grad_path(run, 6, "layers/0/w", slice="1::2", format="npy", dtype="f8", attempt=1)
    lasting = server.get(location)
    assert lasting.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert "content-location" not in lasting.headers
    assert (lasting.content, lasting.headers["etag"]) == (answer.content, answer.headers["etag"])


def test_only_what_names_one_capture_is_immutable(server: Server) -> None:
    """With an attempt, but by the run's name, which another run may get, by a word or an index, it is `no-cache`."""
    run = server.get(grad_path(RUN, 1, "w")).headers["x-gradtap-run"]
    for words in ((RUN, 1), (run, "first"), (RUN, "last"), (run, "01"), (run, 1)):
        answer = server.head(grad_path(*words, "0" if words == (run, 1) else "w", attempt=1))
        assert answer.headers["cache-control"] == "no-cache"
        location = answer.headers["content-location"]
        assert location.startswith(f"/api/v1/runs/{run}/steps/{answer.headers['x-gradtap-step']}/")
        assert server.head(location).headers["cache-control"].endswith("immutable")


def test_private_with_a_token(job: OddJob) -> None:
    """Where a token is needed, caches between may keep nothing."""
    with serving(job.run, token="secret") as guarded:
        headers = {"Authorization": "Bearer secret"}
        answer = guarded.get(grad_path(RUN, 1, "w"), headers=headers)
        assert answer.headers["cache-control"] == "no-cache, private"
        lasting = guarded.get(answer.headers["content-location"], headers=headers)
        assert lasting.headers["cache-control"] == "private, max-age=31536000, immutable"
        assert guarded.get(grad_path(RUN, 1, "w")).status_code == 401


def test_download_names_a_file(server: Server) -> None:
    """With `download` a browser saves the answer, under a name that any file system takes."""
    plain = server.get(grad_path(RUN, 2, "w", format="npy", download=1))
    assert plain.headers["content-disposition"] == 'attachment; filename="w.step2.npy"'
    odd = server.get(grad_path(RUN, 2, "layers/0/w", download="true"))
    assert odd.headers["content-disposition"] == 'attachment; filename="layers_0_w.step2.bin"'
    greek = server.get(grad_path(RUN, 2, "größe.β", download=1, format="safetensors"))
    assert (
        greek.headers["content-disposition"] == "attachment; filename*=utf-8''gr%C3%B6%C3%9Fe.%CE%B2.step2.safetensors"
    )
    assert "content-disposition" not in server.get(grad_path(RUN, 2, "w")).headers


def test_slash_may_stand_plain(server: Server, job: OddJob) -> None:
    """A slash in a name need not be encoded."""
    answer = server.get(f"/api/v1/runs/{RUN}/steps/1/grads/layers/0/w")
    assert same_bits(array_of(answer), job.expected("layers/0/w", 1))


def test_name_before_index(server: Server, job: OddJob) -> None:
    """A number is the index of a parameter, unless a parameter has that very name."""
    assert same_bits(array_of(server.get(grad_path(RUN, 1, "0"))), job.expected("w", 1))
    assert same_bits(array_of(server.get(grad_path(RUN, 1, "2"))), job.expected("2", 1))
    assert server.get(grad_path(RUN, 1, "999")).status_code == 404


def test_name_that_ends_like_a_route(server: Server, job: OddJob) -> None:
    """A parameter whose name ends in /hist is had with the slash encoded; with a plain slash it is the histogram's."""
    answer = server.get(grad_path(RUN, 1, "x/hist", format="npy"))
    assert same_bits(np.load(io.BytesIO(answer.content)), job.expected("x/hist", 1))
    assert server.json(grad_path(RUN, 1, "x/hist") + "/hist")["name"] == "x/hist"
    assert server.json(f"/api/v1/runs/{RUN}/steps/1/grads/w/hist")["schema"] == "gradtap.hist/1"
    assert server.get(grad_path(RUN, 1, "x/hist", attempt="x")).json()["type"] == "/problems/usage"


PROBLEMS = [
    (("last", "w"), {"slice": "40"}, 400, "bad-slice", {"shape": [37, 13], "axis": 0, "index": 40}),
    (("last", "w"), {"slice": "0,0,0"}, 400, "bad-slice", {"shape": [37, 13]}),
    (("last", "w"), {"slice": "0:x"}, 400, "bad-slice", {"slice": "0:x"}),
    (("last", "w"), {"slice": "::0"}, 400, "bad-slice", {}),
    (("last", "halff"), {}, 404, "parameter-not-found", {"did_you_mean": ["half"]}),
    (("last", "frozen"), {}, 404, "parameter-not-found", {}),
    ((99, "w"), {}, 404, "step-not-found", {}),
    ((0, "w"), {}, 404, "step-not-found", {}),
    (("1:3", "w"), {}, 400, "usage", {}),
    (("lastt", "w"), {}, 400, "usage", {}),
    ((1, "w"), {"attempt": 2}, 404, "step-not-found", {}),
    ((1, "w"), {"attempt": 0}, 400, "usage", {}),
    ((1, "w"), {"attempt": "x"}, 400, "usage", {}),
    ((1, "w"), {"dtype": "int8"}, 400, "usage", {}),
    ((1, "w"), {"slise": "0"}, 400, "usage", {"did_you_mean": ["slice"]}),
    ((1, "w"), {"steps": "0:1"}, 400, "usage", {}),
    ((1, "w"), {"partial": "maybe"}, 400, "usage", {}),
]


@pytest.mark.parametrize(("words", "query", "status", "slug", "facts"), PROBLEMS)
def test_problems(
    server: Server, words: tuple[Any, str], query: dict[str, Any], status: int, slug: str, facts: dict[str, Any]
) -> None:
    """Each wrong question is answered with its own problem and what may help, by GET and HEAD; nothing is read."""
    before = reads(server, RUN)
    path = grad_path(RUN, *words, **query)
    answer = server.get(path)
    body = answer.json()
    assert (answer.status_code, body["status"], body["type"]) == (status, status, f"/problems/{slug}")
    assert {name: body[name] for name in facts} == facts
    assert answer.headers["cache-control"] == "no-store"
    assert "etag" not in answer.headers
    assert server.head(path).status_code == status
    assert reads(server, RUN) == before


def test_unknown_step_gives_the_nearest(server: Server) -> None:
    """A step that is not there is answered with the ones around it."""
    assert server.json(grad_path(RUN, 99, "w"), status=404)["nearest"][-1] == 6


def test_twice_is_refused(server: Server) -> None:
    """A parameter of the address that is given twice is no matter of luck."""
    assert server.json(grad_path(RUN, 1, "w") + "?slice=0&slice=1", status=400)["type"] == "/problems/usage"


def test_names_are_all_odd() -> None:
    """The names above have what gives addresses trouble."""
    assert all(any(sign in name for name in NAMES) for sign in "/ %?#&+:")
    assert any(not name.isascii() for name in NAMES) and any(name.isdigit() for name in NAMES)
