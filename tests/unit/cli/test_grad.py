from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gradtap.cli import files
from gradtap.cli.app import main
from gradtap.cli.files import put
from gradtap.errors import StoreError, UsageError
from tests.support.synthetic import Job


def test_bytes_go_to_stdout(recorded: Job, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Without -o the file goes to stdout, npy by default, and not a word beside it."""
    assert main(["grad", str(recorded.run), "3", "mlp.weight", "--slice", "::2, 1"]) == 0
    out, err = capfdbinary.readouterr()
    assert np.array_equal(np.load(io.BytesIO(out)), recorded.expected("mlp.weight", 3)[::2, 1])
    assert err == b""


def test_the_name_of_the_file_is_the_format(recorded: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its ending, unless --format says otherwise; a range is stacked."""
    words = ["grad", str(recorded.run), "1:6:2", "mlp.bias", "-o"]
    for ending in (".npy", ".json", ".safetensors", ".bin", ".dat"):
        assert main([*words, str(tmp_path / f"g{ending}")]) == 0
    expected = np.stack([recorded.expected("mlp.bias", step) for step in (1, 3, 5)])
    assert np.array_equal(np.load(tmp_path / "g.npy"), expected)
    assert np.array_equal(np.load(tmp_path / "g.dat"), expected)
    assert np.array_equal(np.float32(json.loads((tmp_path / "g.json").read_text())["values"]), expected)
    assert np.array_equal(load_file(tmp_path / "g.safetensors")["mlp.bias"], expected)
    assert (tmp_path / "g.bin").read_bytes() == expected.astype("<f4").tobytes()
    assert main([*words, str(tmp_path / "h.npy"), "--format", "raw"]) == 0
    assert (tmp_path / "h.npy").read_bytes() == (tmp_path / "g.bin").read_bytes()
    assert "wrote" in capsys.readouterr().err


def test_stderr_says_what_the_bytes_do_not(recorded: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags, a factor, a capture that is not whole, values that were rounded: each is told."""
    store = str(recorded.run)
    assert main(["grad", store, "last", "mlp.bias", "-o", str(tmp_path / "a.npy"), "--dtype", "f2"]) == 0
    err = capsys.readouterr().err
    assert "flags: untouched" in err
    assert "factor 0.25: stored value x factor = the gradient as defined; not applied" in err
    assert "29 of 29 values do not fit f2" in err
    assert main(["grad", store, "4", "embed.weight", "-o", str(tmp_path / "b.npy")]) == 4
    assert "no complete capture" in capsys.readouterr().err
    assert main(["grad", store, "4", "mlp.weight", "--partial", "-o", str(tmp_path / "b.npy")]) == 0
    assert "not complete: what is missing is NaN" in capsys.readouterr().err
    assert np.isnan(np.load(tmp_path / "b.npy")).any()
    assert main(["grad", store, "1", "mlp.bias", "--dtype", "bf16", "-o", str(tmp_path / "c.npy")]) == 0
    assert "npy has no bfloat16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["1", "mlp.bias", "--format", "npz"], "did you mean npy"),
        (["1", "mlp.bias", "--dtype", "flaot32"], "did you mean float32"),
        (["1", "mlp.bias", "-o", "{tmp}/there.npy"], "--force"),
        (["1", "mlp.bias", "-o", "{tmp}"], "is a folder"),
        (["1", "mlp.bias", "-o", "{tmp}/absent/x.npy"], "no folder"),
        (["a:b", "mlp.bias", "-o", "{tmp}/x.npy"], "range"),
    ],
)
def test_what_is_refused(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """Unknown values are answered with near ones, and a file that is there is not touched."""
    (tmp_path / "there.npy").write_text("mine")
    assert main(["grad", str(store), *(word.format(tmp=tmp_path) for word in words)]) == 2
    assert said in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["there.npy"]
    assert (tmp_path / "there.npy").read_text() == "mine"


def test_force_writes_over(recorded: Job, tmp_path: Path) -> None:
    """With --force the file is replaced."""
    file = tmp_path / "g.npy"
    file.write_text("old")
    assert main(["grad", str(recorded.run), "1", "mlp.bias", "-o", str(file), "--force"]) == 0
    assert np.array_equal(np.load(file), recorded.expected("mlp.bias", 1))


def test_an_error_leaves_no_file(store: Path, tmp_path: Path) -> None:
    """A parameter that is not there leaves neither a file nor a part of one."""
    assert main(["grad", str(store), "1", "nope", "-o", str(tmp_path / "g.npy")]) == 4
    assert list(tmp_path.iterdir()) == []


def test_binary_does_not_go_to_a_terminal(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Onto a terminal it is refused with what to do; JSON may."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["grad", str(store), "1", "mlp.bias"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "-o FILE" in err and "--format json" in err


def test_an_interrupt_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a write takes the part away with it."""

    def parts() -> object:
        yield b"first"
        assert len(list(tmp_path.iterdir())) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        put(parts(), str(tmp_path / "x"), force=False)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_somebody_made_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Between the check and the end somebody may make the file: it is theirs. Without links the file is still made."""
    file = tmp_path / "x"
    if links:
        file.write_text("theirs")
        with pytest.raises(UsageError, match="meanwhile"):
            put([b"mine"], str(file), force=False)
        assert file.read_text() == "theirs"
    else:

        def refuse(*_: object) -> None:
            raise PermissionError(1, "no links here")

        monkeypatch.setattr(files.os, "link", refuse)
        put([b"mine"], str(file), force=False)
        assert file.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [file]


def test_a_disk_that_is_full_is_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says is passed on with the file's name, and no part stays."""

    def full(part: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_pieces", full)
    with pytest.raises(StoreError, match="No space left"):
        put([b"mine"], str(tmp_path / "x"), force=False)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_ends_it(store: Path) -> None:
    """A pipe that closes early ends with 141 and says nothing."""
    command = [sys.executable, "-m", "gradtap", "grad", str(store), "1:7", "embed.weight", "--format", "raw"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout and child.stderr
    child.stdout.close()
    assert child.stderr.read().splitlines() == [
        b"gradtap: factor 0.25: stored value x factor = the gradient as defined; not applied here"
    ]
    child.stderr.close()
    assert child.wait(60) == 141


def test_watch_ends_by_ctrl_c(tmp_path: Path) -> None:
    """A run that is being written is watched until Ctrl-C, which is 130; each line comes as its step does."""
    job = Job(run=tmp_path / "live.gradtap", world=1, kind="whole").steps([1, 2])
    job.wait_published(2)
    command = [sys.executable, "-m", "gradtap", "watch", str(job.run), "--interval", "0.1", "--jsonl"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout and child.stderr
    try:
        assert [json.loads(child.stdout.readline())["step"] for _ in range(2)] == [1, 2]
        job.step(3)
        assert json.loads(child.stdout.readline())["step"] == 3
        time.sleep(0.3)
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(30) == 130
        assert child.stderr.read() == "interrupted\n"
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stderr.close()
        job.close()


def test_a_pipe_is_written_into(store: Path, tmp_path: Path) -> None:
    """A pipe, as a device, takes the bytes and stays what it is; `--force` does not put a file in its place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for more in ([], ["--force"]):
        with ThreadPoolExecutor(1) as pool:
            body = pool.submit(pipe.read_bytes)
            assert main(["grad", str(store), "1", "mlp.bias", "--format", "npy", "-o", str(pipe), *more]) == 0
            assert np.load(io.BytesIO(body.result(timeout=20))).shape == (29,)
        assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_what_a_link_leads_to_is_written(store: Path, tmp_path: Path) -> None:
    """The link stays a link; its file has the new bytes."""
    (tmp_path / "file.npy").write_bytes(b"old")
    (tmp_path / "link.npy").symlink_to(tmp_path / "file.npy")
    assert main(["grad", str(store), "1", "mlp.bias", "-o", str(tmp_path / "link.npy"), "--force"]) == 0
    assert (tmp_path / "link.npy").is_symlink() and np.load(tmp_path / "file.npy").shape == (29,)
