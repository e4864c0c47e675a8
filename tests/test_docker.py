"""The files of the images say what they promise; `docker/check` proves it on a machine that has the tools."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
FILES = ("server.Dockerfile", "train.Dockerfile")
ENGINES = {"torch", "deepspeed", "accelerate"}


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, each with its text on one line."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def given(name: str, word: str) -> list[str]:
    """The texts of all instructions of one kind."""
    return [rest for each, rest in instructions(name) if each == word]


def copied(name: str) -> Iterator[str]:
    """What a Dockerfile takes from the build context."""
    for rest in given(name, "COPY"):
        words = shlex.split(rest)
        if not any(word.startswith("--from=") for word in words):
            yield from (word for word in words[:-1] if not word.startswith("--"))


def ignored(path: str) -> bool:
    """Whether `.dockerignore` keeps a path out: the last pattern that fits it, or a folder above it, decides."""
    out = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.strip().removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        expression = re.escape(pattern).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        expression = expression.replace(r"\[", "[").replace(r"\]", "]")
        if re.fullmatch(f"(?:{expression})(?:/.*)?", path):
            out = not line.strip().startswith("!")
    return out


def check_of_health() -> list[str]:
    """The command by which the image of the service tells its health."""
    (text,) = given("server.Dockerfile", "HEALTHCHECK")
    command: list[str] = json.loads(text[text.index("[") :])
    return command


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    return found


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(DOCKER / "checking")
    import outside

    return outside


@pytest.mark.parametrize("name", FILES)
def test_base_image_is_an_argument(name: str) -> None:
    """Every stage stands on BASE_IMAGE, which is asked for before the first of them and has a public default."""
    words = [word for word, _ in instructions(name)]
    assert words.index("ARG") < words.index("FROM")
    assert re.fullmatch(r"BASE_IMAGE=[\w./-]+:[\w.-]+", given(name, "ARG")[0])
    stages = [rest.split() for rest in given(name, "FROM")]
    known = {"${BASE_IMAGE}"}
    for base, *alias in stages:
        assert base in known
        known.update(alias[1:])
    assert len(stages) > 1


@pytest.mark.parametrize("name", FILES)
def test_image_is_not_run_by_root(name: str) -> None:
    """The user of the image is a number, which an engine can tell from root without looking into the image."""
    assert given(name, "USER")[-1] == "10001:10001"
    last = [word for word, _ in instructions(name)]
    assert "RUN" not in last[len(last) - last[::-1].index("USER") :]


@pytest.mark.parametrize("name", FILES)
def test_stop_signal_is_one(name: str) -> None:
    """The stop signal is a signal's name."""
    assert hasattr(signal, given(name, "STOPSIGNAL")[0])


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_exists(name: str) -> None:
    """Every file that is copied from the context is in the repository, and not kept out of the context."""
    sources = list(copied(name))
    assert {"pyproject.toml", "README.md", "gradtap", "server"} <= set(sources)
    for source in sources:
        path = ROOT / source
        assert path.exists(), source
        assert not ignored(source), source
        inside = [each.relative_to(ROOT).as_posix() for each in path.rglob("*.py")] if path.is_dir() else []
        assert not [each for each in inside if ignored(each) and "__pycache__" not in each]


def test_context_is_small() -> None:
    """History, tests, runs, caches and virtual environments stay out of a build."""
    for path in (
        ".git/config",
        ".venv/bin/python",
        "tests/test_docker.py",
        "runs/demo.gradtap/run.json",
        "gradtap/read/__pycache__/run.cpython-311.pyc",
        "gradtap.egg-info/PKG-INFO",
        ".env",
    ):
        assert ignored(path), path


def test_server_image_has_no_torch() -> None:
    """The service's image installs the extra `server` alone, which needs no engine, and its build asserts that."""
    steps = " ".join(given("server.Dockerfile", "RUN"))
    assert re.findall(r"\[([a-z,]+)\]", steps) == ["server"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"[\[<>=; ]", each)[0] for each in project["optional-dependencies"]["server"]}
    assert needed
    assert not needed & (ENGINES | {"gradtap"})
    assert 'not found("torch")' in steps
    assert "import gradtap_server.app" in steps


def test_server_command_needs_a_token() -> None:
    """The image's command serves /data on all addresses, and holds no token and no way around one."""
    command = json.loads(given("server.Dockerfile", "CMD")[0])
    assert command[:3] == ["gradtap", "serve", "/data"]
    assert command[command.index("--host") + 1] == "0.0.0.0"
    assert given("server.Dockerfile", "EXPOSE") == [command[command.index("--port") + 1]]
    assert not [rest for rest in given("server.Dockerfile", "ENV") + command if "TOKEN" in rest or "NO_AUTH" in rest]


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_health_check_asks_readyz(status: int, code: int) -> None:
    """The health check asks /readyz of this machine and is 0 for 200 alone."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert run_health_check(server.server_port) == code
        finally:
            server.shutdown()
            thread.join()
        assert asked == ["/readyz"]
        port = server.server_port
    assert run_health_check(port) != 0, "nobody listens there any more"


def run_health_check(port: int) -> int:
    """Exit code of the image's health check, asked of another port."""
    python, *rest = check_of_health()
    assert python == "python"
    words = [word.replace("8000", str(port)) for word in rest]
    assert words != rest
    return subprocess.run([sys.executable, *words], stderr=subprocess.DEVNULL, timeout=60, check=False).returncode


def test_compose_builds_both_images() -> None:
    """Training and service are built from the two Dockerfiles, with a base image that can be chosen."""
    services = compose()["services"]
    for service, name in (("train", FILES[1]), ("serve", FILES[0])):
        build = services[service]["build"]
        assert (DOCKER / build["context"]).resolve() == ROOT
        assert (DOCKER / build["context"] / build["dockerfile"]).resolve() == DOCKER / name
        default = given(name, "ARG")[0].removeprefix("BASE_IMAGE=")
        assert re.fullmatch(rf"\${{\w+:-{re.escape(default)}}}", build["args"]["BASE_IMAGE"])


def test_compose_shares_one_volume() -> None:
    """Both services have the one volume at /data, the service read-only; neither waits for the other."""
    services, volumes = compose()["services"], compose()["volumes"]
    assert list(volumes) == ["runs"]
    assert services["train"]["volumes"] == ["runs:/data"]
    assert services["serve"]["volumes"] == [{"type": "volume", "source": "runs", "target": "/data", "read_only": True}]
    assert not [each for each in services.values() if "depends_on" in each]


def test_compose_serves_safely() -> None:
    """The service has a read-only root, no capabilities, this machine's loopback alone, and its token from outside."""
    serve = compose()["services"]["serve"]
    assert serve["read_only"] is True
    assert serve["cap_drop"] == ["ALL"]
    assert serve["security_opt"] == ["no-new-privileges:true"]
    assert serve["ports"] == ["127.0.0.1:8000:8000"]
    assert serve["environment"] == ["GRADTAP_SERVER_TOKEN"]
    assert "user" not in serve


def test_compose_asks_for_the_same_health() -> None:
    """The health check of the compose file is the image's, word for word and second for second."""
    stated = compose()["services"]["serve"]["healthcheck"]
    assert stated["test"] == ["CMD", *check_of_health()]
    (text,) = given("server.Dockerfile", "HEALTHCHECK")
    options = dict(re.findall(r"--([a-z-]+)=(\w+)", text))
    assert {name.replace("-", "_"): value for name, value in options.items()} == {
        name: str(value) for name, value in stated.items() if name != "test"
    }


def test_no_index_is_named() -> None:
    """Nothing in the images' files names an index of packages; the one address is Debian's public mirror."""
    ours = [path for part in ("*", "checking/*.py") for path in DOCKER.glob(part) if path.is_file()]
    assert len(ours) > 8
    for path in [ROOT / ".dockerignore", *ours]:
        hosts = set(re.findall(r"https?://([\w.-]+)", path.read_text(encoding="utf-8")))
        assert hosts <= {"127.0.0.1", "deb.debian.org"}, path


@pytest.mark.parametrize(
    "text",
    [
        "deb http://other.example/debian sid main\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian/ bookworm main\n",
        "# deb http://old.example/debian bookworm main\ndeb-src http://src.example/debian bookworm main\n"
        "deb http://mirror.example/debian bookworm main\n",
    ],
)
def test_mirror_from_one_line_sources(outside: Any, tmp_path: Path, text: str) -> None:
    """The mirror is the one that apt's list names for the suite."""
    (tmp_path / "sources.list").write_text(text)
    assert outside.debian_mirror("bookworm", tmp_path) == "http://mirror.example/debian"


def test_mirror_from_stanzas(outside: Any, tmp_path: Path) -> None:
    """A disabled stanza and one for security updates are passed over."""
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "debian.sources").write_text(
        "Types: deb\nURIs: http://off.example/debian\nSuites: bookworm\nEnabled: no\n\n"
        "Types: deb\nURIs: http://security.example/debian\nSuites: bookworm-security\n\n"
        "Types: deb deb-src\n# a remark: of its own\n"
        "URIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n"
    )
    assert outside.debian_mirror("bookworm", tmp_path) == "http://mirror.example/debian"


def test_mirror_default_is_public(outside: Any, tmp_path: Path) -> None:
    """Where apt has no source for the suite, the public mirror is taken."""
    assert outside.debian_mirror("bookworm", tmp_path) == outside.PUBLIC_MIRROR


def test_pip_settings_for_a_build(outside: Any) -> None:
    """A build gets the index and its certificate, not the folders of this machine, which are named as left out."""
    text, certificate, left_out = outside.pip_file(
        {
            "cert": "/etc/ca.pem",
            "extra-index-url": "file:///wheels https://index.example/simple",
            "find-links": "/wheels",
        }
    )
    assert text.splitlines() == ["[global]", "cert = /run/secrets/ca", "extra-index-url = https://index.example/simple"]
    assert certificate == Path("/etc/ca.pem")
    assert left_out == ["file:///wheels", "/wheels"]


def test_check_says_what_is_missing(tmp_path: Path) -> None:
    """Without buildah the check does nothing but say how to get it, with an exit code of its own."""
    done = subprocess.run(
        [sys.executable, DOCKER / "checking" / "main.py", "--work", tmp_path / "work"],
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "apt-get install buildah" in done.stderr
    assert not (tmp_path / "work").exists()
