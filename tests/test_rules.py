"""The rules of the suite itself, checked: skips, network, pins, the one command."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INSTALL = "pip install -c tests/constraints.txt -e '.[test]'"


MUST_FAIL = {
    "skip": "import pytest\ndef test_a(): pytest.skip('no tool')\n",
    "skip_mark": "import pytest\n@pytest.mark.skip\ndef test_a(): pass\n",
    "importorskip": "import pytest\npytest.importorskip('no_such_module')\ndef test_a(): pass\n",
    "warning": "import warnings\ndef test_a(): warnings.warn('old')\n",
    "marker": "import pytest\n@pytest.mark.no_such_marker\ndef test_a(): pass\n",
    "xpass": "import pytest\n@pytest.mark.xfail\ndef test_a(): pass\n",
    "network": "import socket\ndef test_a(): socket.create_connection(('192.0.2.1', 80), timeout=1)\n",
}
MAY_PASS = {
    "plain": "def test_a(): pass\n",
    "loopback": (
        "import socket\ndef test_a():\n"
        "    with socket.create_server(('127.0.0.1', 0)) as s: socket.create_connection(s.getsockname()).close()\n"
    ),
    "gpu": "import pytest\n@pytest.mark.gpu\ndef test_a(): pass\n",
}


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the tests above that fail under this suite's configuration and conftest."""
    folder = tmp_path_factory.mktemp("rules")
    for name, text in (MUST_FAIL | MAY_PASS).items():
        (folder / f"test_{name}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-rfE"]
    command += ["--continue-on-collection-errors", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    done = subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    found = set(re.findall(r"^(?:FAILED|ERROR) (?:\S*/)?test_(\w+)\.py", done.stdout, re.MULTILINE))
    assert found, done.stdout + done.stderr
    return found


@pytest.mark.parametrize("name", MUST_FAIL)
def test_what_must_fail_fails(failed: set[str], name: str) -> None:
    """A skip, a warning, an unknown marker, an unexpected pass and a connection to elsewhere each fail the suite."""
    assert name in failed


@pytest.mark.parametrize("name", MAY_PASS)
def test_what_may_pass_passes(failed: set[str], name: str) -> None:
    """A plain test, loopback, and a gpu test (skipped or run) pass."""
    assert name not in failed


def test_ci_runs_the_documented_command() -> None:
    """The README's install command for tests is in `.ci/run`, which may be executed."""
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    # pip's --quiet is the only difference.
    assert INSTALL in script.read_text(encoding="utf-8").replace("pip install --quiet", "pip install")
    assert f"{INSTALL} && pytest" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_dependency_is_pinned() -> None:
    """Every package that the project and its test extra name has one version in the constraints, torch too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = ("train", "deepspeed", "server", "test")
    named = [*project["dependencies"], *(line for name in wanted for line in extras[name])]
    names = {re.split(r"[\[<>=!~ ]", line)[0] for line in named} - {"gradtap"}
    lines = (ROOT / "tests" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    assert names - pinned == set()
    assert "torch==2.13.0" in lines
