"""`serve`: a process that listens, says where, refuses what is unsafe, and ends when told to."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from gradtap.errors import NotARunError, StoreError, UsageError, problem_of
from gradtap_server.launch import serve
from gradtap_server.settings import ServerSettings
from tests.server.serving import serving
from tests.support.synthetic import SMALL, Job, spec

CODE = """
import sys
from gradtap_server.launch import serve
serve(sys.argv[1:], port=0)
sys.stderr.write("ended quietly\\n")
"""


@contextlib.contextmanager
def launched(*stores: Path, code: str = CODE, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves, and its address once it has said it."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, stores)], stderr=subprocess.PIPE, text=True, env=env
    )
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said.startswith("gradtap serves on http://"), said + process.stderr.read()
        yield process, said.split()[3]
    finally:
        process.kill()
        process.communicate()


def get(url: str) -> httpx2.Response:
    """GET, past any proxy of the environment."""
    return httpx2.get(url, trust_env=False, timeout=20)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_quietly(zoo: Path, number: signal.Signals) -> None:
    """The printed address answers, on a free port; Ctrl-C and SIGTERM end it within two seconds without a word."""
    with launched(zoo) as (process, url):
        # A client that stays connected must not keep the server.
        with httpx2.Client(trust_env=False) as client:
            assert client.get(f"{url}/api/v1/runs").json()["total"] == 10
            start = time.monotonic()
            process.send_signal(number)
            _, rest = process.communicate(timeout=20)
        assert time.monotonic() - start < 2
        assert (process.returncode, rest) == (0, "ended quietly\n")


def test_a_signal_does_not_wait_for_a_slow_answer(zoo: Path) -> None:
    """An answer under way does not keep the process from ending within two seconds."""
    code = CODE.replace(
        "serve(",
        "import time\nfrom gradtap.read.request import GradRequest\n"
        "def slow(self, *a):\n    sys.stderr.write('reading\\n'); sys.stderr.flush()\n    time.sleep(60)\n"
        "GradRequest.read = slow\nserve(",
        1,
    )
    with launched(zoo, code=code) as (process, url), socket.create_connection(_address(url)) as raw:
        raw.sendall(b"GET /api/v1/runs/closed/steps/1/grads/mlp.bias HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert process.stderr is not None
        assert process.stderr.readline() == "reading\n"
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(20)
        assert time.monotonic() - start < 3


def test_a_signal_cuts_a_download_quietly(tmp_path: Path) -> None:
    """A client that takes nothing of a large answer keeps nobody: the process ends in time, with nothing to say."""
    large = replace(SMALL, chunk_bytes=2**20, shard_bytes=2**24)
    Job(run=tmp_path / "large", params=(spec("w", 2048, 2048),), world=1, settings=large).steps([1]).close()
    with launched(tmp_path) as (process, url), socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(_address(url))
        raw.sendall(b"GET /api/v1/runs/large/steps/1/grads/w HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert raw.recv(64).startswith(b"HTTP/1.1 200")
        time.sleep(0.3)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=20)
        assert time.monotonic() - start < 2
        assert (process.returncode, rest) == (0, "ended quietly\n")


@pytest.mark.parametrize("token", [" t0", "t0 ", "\tt0\n"])
def test_blanks_around_a_token_do_not_count(zoo: Path, token: str) -> None:
    """A token that was set with blanks around it lets in who shows it without them."""
    settings = ServerSettings.from_environment({"GRADTAP_SERVER_TOKEN": token})
    with serving(zoo, token=settings.token) as server:
        assert server.get("/api/v1", headers={"Authorization": "Bearer t0"}).status_code == 200


def test_the_token_comes_from_the_environment(zoo: Path) -> None:
    """With a token in the environment the process asks for it."""
    with launched(zoo, GRADTAP_SERVER_TOKEN="t0") as (_, url):
        assert get(f"{url}/api/v1").status_code == 401
        assert get(f"{url}/healthz").status_code == 200


def test_a_proxy_s_path_is_announced(zoo: Path) -> None:
    """The announced address has the proxy's path, and answers."""
    with launched(zoo, code=CODE.replace("port=0", "port=0, root_path='/g/'")) as (_, url):
        assert url.endswith("/g")
        assert get(f"{url}/api/v1").json()["links"]["runs"] == "/g/api/v1/runs"


def test_uvicorn_runs_the_factory(zoo: Path) -> None:
    """`uvicorn --factory gradtap_server.app:create_app` serves the stores of the environment, on loopback only."""
    code = (
        "import uvicorn, sys, socket\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "sys.stderr.write(f'gradtap serves on http://127.0.0.1:{s.getsockname()[1]}\\n'); sys.stderr.flush()\n"
        "c = uvicorn.Config('gradtap_server.app:create_app', factory=True, log_level='error')\n"
        "uvicorn.Server(c).run([s])\n"
    )
    with launched(code=code, GRADTAP_SERVER_STORES=str(zoo)) as (_, url):
        assert get(f"{url}/readyz").json()["runs"] == 10


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_an_open_door_is_refused(zoo: Path, host: str) -> None:
    """An address beyond this machine needs a token, or a word that everybody is meant; the error names the cure."""
    with pytest.raises(UsageError, match=r"GRADTAP_SERVER_TOKEN\b.*--host 127\.0\.0\.1"):
        serve([zoo], host=host, port=0, settings=ServerSettings())


def test_a_taken_address_is_named(zoo: Path) -> None:
    """A port in use is a usage error that names it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"127\.0\.0\.1:{port}: it is in use"):
            serve([zoo], port=port, settings=ServerSettings())


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [("127.0.0.1", 70000, "0 \\(a free one\\) to 65535"), ("no.such.host.invalid", 0, "cannot listen on no.such")],
)
def test_what_is_no_address_is_named(zoo: Path, host: str, port: int, said: str) -> None:
    """A port that there is not and a name that is nobody's are usage errors."""
    with pytest.raises(UsageError, match=said):
        serve([zoo], host=host, port=port, settings=ServerSettings(token="t"))


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    """Who types a store that is not there, or none, is told at once."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotARunError, match="is not there"):
        serve([tmp_path / "nowhere"], port=0, settings=ServerSettings())
    with pytest.raises(NotARunError, match="is a file"):
        serve([tmp_path / "file"], port=0, settings=ServerSettings())
    with pytest.raises((UsageError, StoreError), match="no store to serve"):
        serve([], port=0, settings=ServerSettings())


def test_a_closed_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store below a folder that may not be looked into is an error that names it, not a bare one of the system."""
    real = os.stat

    def refusing(path: object, **options: object) -> os.stat_result:
        if "closed" in str(path):
            raise PermissionError(13, "Permission denied")
        return real(path, **options)  # type: ignore[arg-type, call-overload, no-any-return]

    monkeypatch.setattr(os, "stat", refusing)
    with pytest.raises(StoreError, match="cannot look into .*closed/runs: Permission denied") as caught:
        serve([tmp_path / "closed" / "runs"], port=0, settings=ServerSettings())
    assert problem_of(caught.value).exit_code == 3


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)
