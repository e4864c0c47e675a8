"""The place contract: what a folder and a server must answer alike, and the command line on both of them.

Inherit `PlaceContract` for another kind of place, and give `address`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gradtap
from gradtap.cli.app import main
from gradtap.cli.places import asking
from gradtap.errors import GradtapError, problem_of
from gradtap.query.local import LocalPlace
from gradtap.remote.place import RemotePlace
from tests.server.samples import NAMES, PARAMS, OddJob, same_bits
from tests.server.serving import Server, serving

if TYPE_CHECKING:
    from gradtap.query.place import Place

FORMATS = ("raw", "npy", "json", "safetensors")
FIRST = range(1, 7)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> OddJob:
    """A run of two sessions: steps 1 to 6, killed, then 5 to 9, step 8 dropped by one rank; odd values and names."""
    path = tmp_path_factory.mktemp("place") / "runs" / "odd run.gradtap"
    OddJob(run=path, params=PARAMS, world=2, seed=1).steps(FIRST).kill()
    made = OddJob(run=path, params=PARAMS, world=3, seed=2)
    made.step(5)
    made.step(6, ended={"clip_coef": math.nan})
    made.step(7)
    made.recorders[0].tags(7, {"loss": 0.5, "phase": "warm"})
    made.step(8, dropped=[1])
    made.step(9, untouched=["w"], flags=8, factor=0.25, ended={"clip_coef": 0.3}, micro_seen=1)
    made.close()
    return made


@pytest.fixture(scope="module")
def server(job: OddJob) -> Iterator[Server]:
    """A server of the run, with pages so small that every list has several."""
    with serving(job.run.parent, page=3, page_max=4) as running:
        yield running


@pytest.fixture(scope="module")
def local(job: OddJob) -> Iterator[LocalPlace]:
    """The run in its folder: what every other place is compared with."""
    with gradtap.open(job.run) as run:
        yield LocalPlace(run=run, label=str(job.run))


QUERIES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("info", (), {}),
    ("params", (), {}),
    ("params", ("layers/*",), {"step": "first"}),
    ("params", ("!w",), {"step": "7"}),
    ("steps", (), {}),
    ("steps", ("2:9:2",), {}),
    ("steps", ("7",), {"tags": True}),
    ("steps", ("90:",), {}),
    ("step", ("last",), {}),
    ("step", ("5",), {"attempt": 1}),
    ("step", ("7",), {"match": "w"}),
    ("norms", (), {}),
    ("norms", ("head",), {"steps": "3:8:2", "stat": "absmax"}),
    ("norms", ("double",), {"stat": "nan"}),
    ("audit", (), {}),
    ("hist", ("w", "9"), {}),
    ("hist", ("conv", "first"), {"scale": "linear", "bins": 7}),
    ("hist", ("x/hist", "5"), {"slice": "1:4", "attempt": 1}),
]
GRADS: list[tuple[str, str, dict[str, Any]]] = [
    ("w", "9", {}),
    ("head", "first", {"slice": "3:30:4, ::-1"}),
    ("scalar", "last", {}),
    ("double", "5", {"attempt": 1}),
    ("half", "5", {"slice": "..., 0"}),
    ("conv", "1:8:2", {"slice": "1, :, 0"}),
    ("w", "9:10", {}),
    ("w", "8", {"partial": True}),
    ("w", "7", {"partial": True}),
    ("none", "1", {}),
    ("0", "2", {}),
    ("w", "3", {"slice": "5:5"}),
    ("w", "9", {"as_consumed": True}),
    ("double", "7:10:2", {"as_consumed": True, "slice": "1:"}),
    ("half", "2", {"as_consumed": True}),
    *((name, "7", {}) for name in NAMES),
]
REFUSED: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("grad", ("w", "8"), {}),
    ("grad", ("w", "77"), {}),
    ("grad", ("w", "5"), {"attempt": 9}),
    ("grad", ("w", "latest"), {}),
    ("grad", ("w", ""), {}),
    ("grad", ("w", "1/2"), {}),
    ("grad", ("w", "40:50"), {}),
    ("grad", ("w", "1:2:0"), {}),
    ("grad", ("ww", "1"), {}),
    ("grad", ("..", "1"), {}),
    ("grad", ("", "1"), {}),
    ("grad", ("frozen", "1"), {}),
    ("grad", ("w", "1"), {"slice": "99"}),
    ("grad", ("w", "1"), {"slice": "a"}),
    ("grad", ("w", "6"), {"as_consumed": True}),
    ("params", ("nothing like it",), {}),
    ("params", (), {"step": "8"}),
    ("steps", ("a:b",), {}),
    ("step", ("8",), {}),
    ("norms", (), {"stat": "l3"}),
    ("norms", ("frozen",), {}),
    ("hist", ("w", "1"), {"scale": "log"}),
    ("hist", ("w", "1"), {"bins": 3}),
    ("hist", ("w", "1"), {"scale": "linear", "bins": 0}),
    ("payload", ("w", "1"), {"format": "npz"}),
    ("payload", ("w", "1"), {"dtype": "float31"}),
]


class PlaceContract:
    """Facts that hold for a run wherever it is asked. Its answers are those of the folder."""

    def address(self, job: OddJob, server: Server) -> tuple[str, str | None]:
        """STORE and --run for this kind of place."""
        raise NotImplementedError

    @pytest.fixture
    def where(self, job: OddJob, server: Server) -> tuple[str, str | None]:
        """STORE and --run."""
        return self.address(job, server)

    @pytest.fixture
    def place(self, where: tuple[str, str | None]) -> Iterator[Place]:
        """The run, as a verb would ask it."""
        with asking(*where) as place:
            yield place

    @pytest.mark.parametrize(("name", "words", "options"), QUERIES)
    def test_answers_are_those_of_the_folder(
        self, place: Place, local: LocalPlace, name: str, words: tuple[str, ...], options: dict[str, Any]
    ) -> None:
        """Every query gives the same object: schema, facts, rows, and the same counts of what is not finite."""
        body = getattr(place, name)(*words, **options).body()
        assert body == getattr(local, name)(*words, **options).body()
        assert body["run"] == local.run.id
        json.dumps(body, allow_nan=False)

    @pytest.mark.parametrize(("param", "step", "options"), GRADS)
    def test_gradients_are_those_of_the_folder(
        self, place: Place, local: LocalPlace, param: str, step: str, options: dict[str, Any]
    ) -> None:
        """Values to the bit, NaN and minus zero too, in an array that can be written to; and all facts."""
        found, expected = place.grad(param, step, **options), local.grad(param, step, **options)
        assert same_bits(found.values, expected.values)
        assert found.values.flags.writeable
        assert found.values.dtype == expected.values.dtype and found.values.dtype.isnative
        for fact in ("name", "steps", "attempts", "dtype_captured", "complete", "flags", "factor", "consumed"):
            assert getattr(found, fact) == getattr(expected, fact), fact

    @pytest.mark.parametrize("dtype", ["stored", "native", "bf16", "f2", "float64"])
    @pytest.mark.parametrize("format", FORMATS)
    def test_files_are_those_of_the_folder(self, place: Place, local: LocalPlace, format: str, dtype: str) -> None:
        """Every format in every dtype is the same bytes, with the same dtype, count of rounded values and facts."""
        for param, step, consumed in (("half", "5", False), ("w", "1:4", False), ("scalar", "9", True)):
            found = place.payload(param, step, format=format, dtype=dtype, as_consumed=consumed)
            expected = local.payload(param, step, format=format, dtype=dtype, as_consumed=consumed)
            assert bytes(found) == bytes(expected)
            assert found.nbytes == expected.nbytes
            assert (found.media_type, found.dtype, found.rounded) == (
                expected.media_type,
                expected.dtype,
                expected.rounded,
            )
            own, other = asdict(found.head), asdict(expected.head)
            assert {name: own[name] for name in own if name != "slice"} == {
                name: other[name] for name in other if name != "slice"
            }

    @pytest.mark.parametrize(("name", "words", "options"), REFUSED)
    def test_refusals_are_those_of_the_folder(
        self, place: Place, local: LocalPlace, name: str, words: tuple[str, ...], options: dict[str, Any]
    ) -> None:
        """What cannot be answered raises the same error with the same exit code and facts."""
        with pytest.raises(GradtapError) as expected:
            getattr(local, name)(*words, **options)
        with pytest.raises(GradtapError) as found:
            getattr(place, name)(*words, **options)
        assert problem_of(found.value).exit_code == problem_of(expected.value).exit_code
        assert (
            "did_you_mean" not in expected.value.facts
            or found.value.facts["did_you_mean"] == (expected.value.facts["did_you_mean"])
        )
        assert str(found.value)

    def test_sessions_that_do_not_read_would_be_told(self, place: Place) -> None:
        """A sound run has nothing to say before its answers, and a name to be called by."""
        assert place.notices() == []
        assert place.label

    def test_the_command_line_says_the_same(
        self, where: tuple[str, str | None], local: LocalPlace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Each verb with --json prints the body of the query's answer."""
        store, run = where
        named = ["--run", run] if run else []
        for words, answer in (
            (["info"], local.info()),
            (["ls"], local.params()),
            (["steps", "--steps", "2:9"], local.steps("2:9", tags=True)),
            (["norms", "--stat", "absmax"], local.norms(stat="absmax")),
            (["hist", "9", "w"], local.hist("w", "9")),
        ):
            assert main([words[0], store, *words[1:], *named, "--json"]) == 0
            assert json.loads(capsys.readouterr().out) == answer.body()

    def test_the_command_line_finds_the_same(
        self, where: tuple[str, str | None], local: LocalPlace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """`audit` has the findings, in words and as JSON, and ends with 1."""
        store, run = where
        words = ["audit", store, *(["--run", run] if run else [])]
        assert main([*words, "--json"]) == 1
        body = json.loads(capsys.readouterr().out)
        assert body == local.audit().body()
        assert "ragged-window" in [row["code"] for row in body["findings"]]
        assert main(words) == 1
        assert "ragged-window" in capsys.readouterr().out

    def test_as_consumed_on_the_command_line(
        self, where: tuple[str, str | None], job: OddJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """`grad` and `show` give what the optimizer took, and say the coefficient."""
        (store, run), file = where, tmp_path / "g.npy"
        named = ["--as-consumed", *(["--run", run] if run else [])]
        assert main(["grad", store, "9", "w", "-o", str(file), *named]) == 0
        with np.errstate(all="ignore"):
            assert same_bits(np.load(file), job.expected("w", 9) * np.float32(0.3))
        assert "as consumed: stored value x 0.3" in capsys.readouterr().err
        assert main(["show", store, "9", "w", "--json", *named]) == 0
        assert json.loads(capsys.readouterr().out)["consumed"] == 0.3

    def test_the_command_line_writes_the_same(
        self, where: tuple[str, str | None], local: LocalPlace, tmp_path: Path
    ) -> None:
        """`grad -o` writes the bytes of the format that the file's name asks for."""
        store, run = where
        named = ["--run", run] if run else []
        for ending, format in ((".npy", "npy"), (".safetensors", "safetensors"), (".bin", "raw")):
            file = tmp_path / f"g{ending}"
            assert main(["grad", store, "1:5:2", "w", "--slice", "::3", "-o", str(file), *named]) == 0
            assert file.read_bytes() == bytes(local.payload("w", "1:5:2", slice="::3", format=format))
        assert same_bits(np.load(tmp_path / "g.npy"), local.grad("w", "1:5:2", slice="::3").values)

    def test_show_is_the_same(
        self, where: tuple[str, str | None], job: OddJob, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """`show` counts the very values, and has the tags of the step."""
        store, run = where
        assert main(["show", store, "7", "w", *(["--run", run] if run else []), "--json"]) == 0
        body = json.loads(capsys.readouterr().out)
        expected = job.expected("w", 7)
        assert body["tags"] == {"loss": 0.5, "phase": "warm"}
        assert body["summary"]["nan"] == int(np.isnan(expected).sum()) > 0
        assert body["summary"]["inf"] == int(np.isinf(expected).sum()) > 0


class TestLocalPlace(PlaceContract):
    """The run's own folder."""

    def address(self, job: OddJob, server: Server) -> tuple[str, str | None]:
        """The folder."""
        return str(job.run), None


class TestLocalFolderOfRuns(PlaceContract):
    """The folder that the run is in."""

    def address(self, job: OddJob, server: Server) -> tuple[str, str | None]:
        """The folder above, and the run's name there."""
        return str(job.run.parent), "odd-run"


class TestRemotePlace(PlaceContract):
    """The run on a server."""

    def address(self, job: OddJob, server: Server) -> tuple[str, str | None]:
        """The server's address alone: there is one run."""
        return server.url, None

    def test_it_is_remote(self, place: Place) -> None:
        """What is compared here did go over HTTP."""
        assert isinstance(place, RemotePlace)


class TestRemoteRunAddress(PlaceContract):
    """The run's own address on a server."""

    def address(self, job: OddJob, server: Server) -> tuple[str, str | None]:
        """As the API lists it."""
        return f"{server.url}/api/v1/runs/odd-run/", "odd-run"


def test_values_are_those_that_were_recorded(job: OddJob, local: LocalPlace) -> None:
    """The folder itself, which all others are compared with, gives what the engine had."""
    assert same_bits(local.grad("w", "9").values, job.expected("w", 9))
    norms = local.norms("scalar").rows[0]["values"]
    assert math.isclose(norms[-1], abs(float(job.expected("scalar", 9))), rel_tol=1e-6)


def test_a_session_that_does_not_read_is_told(tmp_path: Path) -> None:
    """Before any answer, in a folder and on a server: its steps are missing in all of them."""
    for step in (1, 2):
        OddJob(run=tmp_path / "run.gradtap", params=PARAMS).steps([step]).close()
    (tmp_path / "run.gradtap/sessions/0000/session.json").write_text("{")
    with serving(tmp_path) as running:
        for store in (str(tmp_path / "run.gradtap"), running.url):
            with asking(store) as place:
                (said,) = place.notices()
                assert said.startswith("DAMAGED: session 0000 does not read")
                assert [row["step"] for row in place.steps().rows] == [2]
