from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gradtap.cli import machine, storage
from gradtap.cli.app import main
from gradtap.cli.extras import EXTRAS
from gradtap.version import __version__

ROOT = Path(__file__).parents[3]


def report(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """The object that `doctor` prints."""
    assert main(["doctor", *words, "--json"]) == code
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert body["schema"] == "gradtap.doctor/1"
    return body


def test_it_knows_the_installation(capsys: pytest.CaptureFixture[str]) -> None:
    """Versions of gradtap and of what it stands on, processor, memory, extras; text to paste says the same."""
    body = report(capsys)
    assert body["gradtap"] == __version__
    assert body["packages"]["zarr"] and body["packages"]["numpy"] and body["cpus"] >= 1
    assert set(body["extras"]) == set(EXTRAS)
    assert "store" not in body
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert body["packages"]["zarr"] in out and "extras" in out and "settings" in out


def test_a_missing_extra_has_its_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not installed is named with the command that installs it and what that gives."""
    known = machine._version
    monkeypatch.setattr(machine, "_version", lambda name: None if name == "uvicorn" else known(name))
    extra = report(capsys)["extras"]["server"]
    assert (extra["installed"], extra["missing"]) == (False, ["uvicorn"])
    assert extra["command"] == "pip install 'gradtap[server]'"
    assert main(["doctor"]) == 0
    assert "pip install 'gradtap[server]' gives" in capsys.readouterr().out


def test_extras_are_those_of_the_package() -> None:
    """The packages that are looked for are those that the extra installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def names(extra: str) -> set[str]:
        found = set()
        for line in project[extra]:
            name = line.split(">=")[0]
            found |= names(name[8:-1]) if name.startswith("gradtap[") else {name}
        return found

    for name, extra in EXTRAS.items():
        assert set(extra.packages) == names(name)


def test_settings_that_do_not_parse_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is set is shown, what is wrong is said, and no token is printed anywhere."""
    monkeypatch.setenv("GRADTAP_CAPACITY", "77")
    monkeypatch.setenv("GRADTAP_SERVER_PAGE", "x")
    monkeypatch.setenv("GRADTAP_SERVER_TOKEN", "sesame\tseed")
    monkeypatch.setenv("GRADTAP_TOKEN", "sesame")
    settings = report(capsys)["settings"]
    assert settings["set"]["GRADTAP_CAPACITY"] == "77"
    assert len(settings["errors"]) == 2
    assert "GRADTAP_CAPACITY" in settings["errors"][0] and "GRADTAP_SERVER_PAGE" in settings["errors"][1]
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "WRONG" in out and "sesame" not in out + json.dumps(settings)


def test_it_looks_at_a_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Space, file system, speed, runs; and nothing is left behind."""
    before = sorted(store.parent.rglob("*"))
    found = report(capsys, str(store))["store"]
    assert sorted(store.parent.rglob("*")) == before
    assert found["readable"] and found["writable"] and found["free_bytes"] > 0 and found["file_system"]
    assert found["speed"]["error"] is None
    assert min(found["speed"][name] for name in ("write_bytes_per_s", "read_bytes_per_s", "fsync_seconds")) > 0
    assert [(row["name"], row["steps"]["count"]) for row in found["runs"]] == [("demo", 5)]
    assert main(["doctor", str(store)]) == 0
    assert "demo: closed, 5 steps" in capsys.readouterr().out


def test_a_store_that_is_not_there_is_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report is still whole, and ends with what is wrong."""
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "absent", tmp_path / "file"):
        body = report(capsys, str(path), code=3)
        assert str(path) in body["store"]["error"]
        assert main(["doctor", str(path)]) == 3
        out, err = capsys.readouterr()
        assert "ERROR" in out and str(path) in err


def test_nobody_at_an_address_is_three(capsys: pytest.CaptureFixture[str]) -> None:
    """So for a server."""
    assert "cannot reach" in report(capsys, "http://127.0.0.1:1", code=3)["store"]["error"]


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed that cannot be measured is said to be so, with the reason."""

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(storage.tempfile, "TemporaryFile", refuse)
    assert "Permission denied" in storage.speed(tmp_path)["error"]


def test_file_systems_are_those_of_the_mounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The deepest mount counts, its later cover before it, and names with blanks are decoded."""
    lines = (
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        f"2 1 0:1 / {tmp_path}/a\\040b rw shared:1 - nfs4 host:/x rw\n"
        f"3 1 0:2 / {tmp_path}/a\\040b rw - ceph host rw\n"
    )
    monkeypatch.setattr(storage.Path, "read_text", lambda *_, **__: lines)
    assert storage.file_system(tmp_path / "a b" / "run") == "ceph"
    assert storage.file_system(tmp_path / "a bc") == "ext4"


def test_gpus_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One for each line of the driver's tool; without the tool, or where it fails, nothing is claimed."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 570.1, 143771'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert machine._gpus() == [{"name": "NVIDIA H200", "driver": "570.1", "memory_mib": "143771"}]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert machine._gpus() is None
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine._gpus() is None
