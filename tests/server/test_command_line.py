"""The verbs on runs in every state, in their folder and on a server: the same words, the same exit codes."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from gradtap.cli.app import main
from gradtap.cli.news import following
from gradtap.cli.places import asking
from tests.server.serving import Server, serving
from tests.support.synthetic import Job

STATES = ("live", "closed", "unclosed", "damaged", "empty", "newer", "torn")
CODES: dict[str, dict[str, int]] = {
    "info": {"newer": 3, "torn": 5},
    "ls": {"newer": 3, "torn": 5},
    "steps": {"newer": 3, "torn": 5},
    "norms": {"newer": 3, "torn": 5, "empty": 0},
    "show last mlp.bias": {"newer": 3, "torn": 5, "empty": 4},
    "hist last mlp.bias": {"newer": 3, "torn": 5, "empty": 4},
    "grad last mlp.bias --format json": {"newer": 3, "torn": 5, "empty": 4},
    "grad 1 mlp.bias --format json": {"newer": 3, "torn": 5, "empty": 4, "damaged": 5},
    "show 1 mlp.bias": {"newer": 3, "torn": 5, "empty": 4, "damaged": 5},
}
"""Exit codes that are not 0, by verb and state of the run."""


def ends(capsys: pytest.CaptureFixture[str], words: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    capsys.readouterr()
    code = main(words)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("verb", list(CODES))
@pytest.mark.parametrize("state", STATES)
def test_every_state_has_its_exit_code_in_both_places(
    zoo: Path, server: Server, capsys: pytest.CaptureFixture[str], state: str, verb: str
) -> None:
    """A folder and a server end a verb alike; what failed is a problem object, and stdout is empty then."""
    name, *rest = verb.split()
    wanted = CODES[verb].get(state, 0)
    bodies = []
    for store, run in ((str(zoo / f"{state}.gradtap"), None), (str(zoo), state), (server.url, state)):
        words = [name, store, *rest, *(["-r", run] if run else []), "--json"]
        code, out, err = ends(capsys, words)
        assert code == wanted, err
        if wanted:
            body = json.loads(err.splitlines()[-1])
            assert (body["exit_code"], body["schema"], out) == (wanted, "gradtap.problem/1", "")
        else:
            bodies.append(json.loads(out))
    assert all(body == bodies[0] for body in bodies)


OF_THE_FILES = {
    "verify --deep": {"damaged": 5, "torn": 5, "newer": 3},
    "watch --last 2 --jsonl": {"newer": 3, "torn": 5},
    "doctor": {"newer": 3, "torn": 5},
    "get runs/{}": {"newer": 3, "torn": 5},
    "get runs/{}/steps/1/grads/mlp.bias": {"newer": 3, "torn": 5, "damaged": 5, "empty": 4},
}
"""As `CODES`, of verbs whose answers differ by place, or are of files alone."""


@pytest.mark.parametrize("verb", list(OF_THE_FILES))
@pytest.mark.parametrize("state", STATES)
def test_every_state_has_its_exit_code_for_the_other_verbs(
    zoo: Path, server: Server, capfd: pytest.CaptureFixture[str], tmp_path: Path, state: str, verb: str
) -> None:
    """What cannot be read is an error of its kind for them too, by folder and, where they take one, by address."""
    name, *rest = verb.format(state).split()
    if name == "watch" and state in ("live", "empty"):
        # It would wait for more.
        return
    folder = str(zoo / f"{state}.gradtap")
    stores = [folder] if name in ("verify", "watch", "doctor") else [folder, server.url]
    if "grads" in verb:
        rest += ["-o", str(tmp_path / "grad"), "--force"]
    for store in stores:
        code = main([name, store, *rest])
        out, err = capfd.readouterr()
        assert code == OF_THE_FILES[verb].get(state, 0), out + err
        assert code in (0, 5) or err


def test_states_are_told_apart(zoo: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """`info` names the state of each run that opens, from either place."""
    for state in ("live", "closed", "unclosed", "empty"):
        for words in ([str(zoo), "-r", state], [f"{server.url}/api/v1/runs/{state}"]):
            code, out, _ = ends(capsys, ["info", *words, "--json"])
            assert code == 0
            assert json.loads(out)["state"] == state


def test_a_folder_of_runs_wants_a_choice(zoo: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Several runs and none chosen is exit code 2 with names; a misspelt one 4 with the nearest, in both places."""
    for store in (str(zoo), server.url):
        code, _, err = ends(capsys, ["info", store, "--json"])
        assert code == 2
        assert {"live", "closed", "newer"} <= set(json.loads(err)["runs"])
        code, _, err = ends(capsys, ["info", store, "--run", "clsed", "--json"])
        assert code == 4
        assert json.loads(err)["did_you_mean"][0] == "closed"


def test_a_token_is_asked_for(zoo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the token of a server a verb ends with 6 and names the variable; with it, it works."""
    with serving(zoo, token="sesame") as running:
        words = ["info", running.url, "-r", "closed"]
        monkeypatch.delenv("GRADTAP_TOKEN", raising=False)
        code, _, err = ends(capsys, words)
        assert code == 6
        assert "GRADTAP_TOKEN" in err
        monkeypatch.setenv("GRADTAP_TOKEN", "open")
        code, _, err = ends(capsys, [*words, "--json"])
        assert (code, json.loads(err)["status"]) == (6, 401)
        monkeypatch.setenv("GRADTAP_TOKEN", "sesame")
        assert ends(capsys, words)[0] == 0


def test_a_limit_is_seven_with_a_slice_that_fits(zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Too much is exit code 7, and what is suggested works when it is tried."""
    with serving(zoo, response_bytes=1000) as running:
        words = ["grad", running.url, "-r", "closed", "1", "mlp.weight", "--format", "json"]
        code, out, err = ends(capsys, ["grad", running.url, "-r", "closed", "1", "embed.weight", "--json"])
        assert (code, out) == (7, "")
        fitting = json.loads(err)["suggested_slice"]
        assert (
            ends(capsys, ["grad", running.url, "-r", "closed", "1", "embed.weight", "--json", "--slice", fitting])[0]
            == 0
        )
        assert ends(capsys, words)[0] == 7


def test_nobody_there_is_three(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that is not there ends every verb with 3 and says what to check."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    for words in (["info"], ["ls"], ["steps"], ["norms"], ["watch"], ["get", "runs"], ["grad", "1", "w", "-o", "x"]):
        code, out, err = ends(capsys, [words[0], address, *words[1:]])
        assert (code, out) == (3, "")
        assert "cannot reach" in err


def test_verify_is_for_the_files(server: Server, zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A check of a server is refused with where to run it; in a folder of runs it takes --run."""
    code, _, err = ends(capsys, ["verify", server.url, "-r", "closed"])
    assert code == 2
    assert "on the machine that has the folder" in err
    assert ends(capsys, ["verify", str(zoo), "-r", "closed"])[0] == 0
    assert ends(capsys, ["verify", str(zoo), "-r", "damaged", "--deep"])[0] == 5


@pytest.mark.parametrize("words", [["runs"], ["/healthz"], ["runs/closed/steps?steps=1:3"], ["runs/closed/norms"]])
def test_get_prints_what_a_server_answers(
    zoo: Path, server: Server, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """One request, in this process or over the network: the same body."""
    found = []
    for store in (str(zoo), server.url):
        code, out, err = ends(capsys, ["get", store, *words])
        assert (code, err) == (0, "")
        found.append(json.loads(out))
    assert found[0] == found[1]


def test_get_ends_with_the_problems_code(zoo: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """The problem's exit code, by GET and by HEAD, from either place; nothing on stdout."""
    for store in (str(zoo), server.url):
        for path, wanted in (("runs/nope", 4), ("runs/newer", 3), ("runs/closed/steps/1/grads/mlp.bias?slice=z", 2)):
            for more in ([], ["--head"]):
                code, out, err = ends(capsys, ["get", store, path, *more])
                assert (code, out) == (wanted, ""), err
        assert ends(capsys, ["get", store, "runs/damaged/steps/1/grads/mlp.bias"])[0] == 5


def test_get_writes_bytes_and_shows_headers(
    zoo: Path, server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """--head prints the headers, --headers adds them on stderr, -o keeps the body."""
    for at, store in enumerate((str(zoo), server.url)):
        path = "runs/closed/steps/1/grads/mlp.bias"
        code, out, _ = ends(capsys, ["get", store, path, "--head"])
        assert code == 0
        assert "x-gradtap-shape: 29\n" in out.lower()
        file = tmp_path / f"{at}.bin"
        code, out, err = ends(capsys, ["get", store, path, "--headers", "-o", str(file)])
        assert (code, out) == (0, "")
        assert "status 200" in err and "x-gradtap-dtype: float32" in err.lower()
        assert file.stat().st_size == 29 * 4
    assert (tmp_path / "0.bin").read_bytes() == (tmp_path / "1.bin").read_bytes()


def test_get_needs_no_token_for_a_folder(
    zoo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may read the folder needs no token, whatever the environment says of a server."""
    monkeypatch.setenv("GRADTAP_SERVER_TOKEN", "sesame")
    assert ends(capsys, ["get", str(zoo), "runs"])[0] == 0
    assert ends(capsys, ["get", str(zoo / "absent"), "runs"])[0] == 3


def test_a_server_is_watched_by_looking_again(tmp_path: Path) -> None:
    """Steps that come while the server runs are news there too, and the end of the run is."""
    job = Job(run=tmp_path / "r.gradtap", world=1, kind="whole").steps([1])
    job.wait_published(1)

    def sleep(_: float) -> None:
        if not job_ended:
            job_ended.append(True)
            job.step(2)
            job.close()

    job_ended: list[bool] = []
    with serving(tmp_path) as running, asking(running.url) as place:
        news = list(following(place, 1, last=9, sleep=sleep))
    assert [row["step"] for each in news for row in each.rows] == [1, 2]
    assert [each.state for each in news][-1] == "closed"


def test_a_session_that_does_not_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before any answer, from either place: its steps are missing in what follows."""
    path = tmp_path / "half.gradtap"
    Job(run=path, world=1, kind="whole").steps([1, 2]).kill()
    Job(run=path, world=1, kind="whole").steps([3]).close()
    head = path / "sessions" / "0001" / "session.json"
    head.write_bytes(head.read_bytes()[:-30])
    with serving(tmp_path) as running:
        for store in (str(path), running.url):
            for words in (["ls"], ["show", "1", "mlp.bias"], ["info"]):
                code, out, err = ends(capsys, [words[0], store, *words[1:]])
                assert code == 0 and out
                assert "DAMAGED: session 0001 does not read" in err


def test_doctor_looks_at_a_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """What the server says of itself, and its runs."""
    code, out, _ = ends(capsys, ["doctor", server.url, "--json"])
    store = json.loads(out)["store"]
    assert (code, store["server"]["auth"], store["error"]) == (0, "none", None)
    assert "closed" in [row["name"] for row in store["runs"]]
