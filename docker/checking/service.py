"""The service in a container of buildah: started as its image says, found among the processes, stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from images import Failed, Storage

PORT = "8000"
"""What the image listens on."""

BUILDERS_OWN = ("run", "etc/hosts", "etc/hostname", "etc/resolv.conf", "dev", "proc", "sys", "data")
"""Where buildah itself makes mount points."""


class Service:
    """A container of `image` with the folder `data` at /data, read-only, and the token as a secret.

    `port` stands in for the image's where that is taken: chroot isolation shares the machine's network.
    """

    def __init__(self, storage: Storage, image: str, *, data: Path, token: Path, port: str) -> None:
        self.config: dict[str, Any] = storage.image(image)
        self.log = storage.work / "service.log"
        self._storage = storage
        self._port = port
        self._mounts = [f"--volume={data}:/data:ro", f"--volume={token}:/run/secrets/token:ro"]
        self._container = storage("from", image)
        self._process: subprocess.Popen[bytes] | None = None

    def _words(self, command: Sequence[str], *options: str) -> list[str]:
        here = [word.replace(PORT, self._port) for word in command]
        options = ("--isolation=chroot", "--network=host", *self._mounts, *options)
        return self._storage.words("run", *options, self._container, "--", *here)

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        """Exit code and output of a command in the container, as the image's user."""
        done = subprocess.run(
            self._words(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._storage.environment,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout.decode(errors="replace")

    def start(self) -> None:
        """Run the image's command."""
        words = self._words(self.config["Cmd"], "--env=GRADTAP_SERVER_TOKEN_FILE=/run/secrets/token")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._storage.environment
            )

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def said(self) -> str:
        """What it has printed, the builder's remarks on its exit code left out."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if not line.startswith(("subprocess exited", "Error: exit status")))

    def pid(self) -> int:
        """The process of the image's command: the last of the line that buildah starts."""
        assert self._process is not None
        return list(_line_of(self._process.pid))[-1]

    def user(self) -> tuple[int, int]:
        """User and group that it runs as."""
        status = Path(f"/proc/{self.pid()}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return int(fields["Uid"].split()[0]), int(fields["Gid"].split()[0])

    def files(self) -> dict[str, int]:
        """Its own files and when they changed, without what buildah lays there."""
        root = Path(self._storage("mount", self._container))
        own = (path for top in root.iterdir() if top.name not in BUILDERS_OWN for path in (top, *top.rglob("*")))
        names = {str(path.relative_to(root)): path for path in own}
        # A directory's time changes with the mount points in it; a new file in it is seen as itself.
        return {
            name: 0 if path.is_dir() else path.lstat().st_mtime_ns
            for name, path in names.items()
            if name not in BUILDERS_OWN
        }

    def stop(self, timeout: float = 15.0) -> int:
        """Send the image's stop signal; the exit code, negative for a signal. Raises `Failed` if it does not end."""
        assert self._process is not None
        os.kill(self.pid(), getattr(signal, self.config["StopSignal"]))
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Failed(f"it has not ended {timeout:g} s after {self.config['StopSignal']}") from None

    def remove(self) -> None:
        """End it, whatever state it is in."""
        if self._process is not None and self.running:
            for pid in reversed(list(_line_of(self._process.pid))):
                with contextlib.suppress(ProcessLookupError):  # its child's end was its own
                    os.kill(pid, signal.SIGKILL)
            self._process.wait(10)


def _line_of(pid: int) -> Iterator[int]:
    """A process and its descendants, parents first."""
    yield pid
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # ended meanwhile
        if parent == pid:
            yield from _line_of(int(entry.parent.name))


def wait_until(true: Any, what: str, timeout: float) -> float:
    """Seconds until `true()`. Raises `Failed` after `timeout`."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > timeout:
            raise Failed(f"after {timeout:g} s still not: {what}")
        time.sleep(0.1)
    return time.monotonic() - began
