"""Images by buildah in a storage of their own: a base from debootstrap, a build, a container. Needs root."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRIMMED = ("usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt/lists")
"""What the public slim images leave out too."""


class Failed(Exception):
    """A step did not do what it should; the text says which and how."""


def run(words: Sequence[str | Path], log: Path, **more: Any) -> str:
    """What a command prints. Its errors go to `log`, whose end is in the `Failed` of a command that fails."""
    with log.open("ab") as errors:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, check=False, **more
        )
    if done.returncode:
        said = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise Failed(f"{' '.join(map(str, words))}\nended with exit code {done.returncode}:\n{said}")
    printed: bytes = done.stdout
    return printed.decode()


def make_base(archive: Path, suite: str, mirror: str, log: Path) -> None:
    """A bare Debian as a tar file."""
    folder = archive.with_suffix(".tmp")
    shutil.rmtree(folder, ignore_errors=True)
    environment = os.environ | {"PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
    try:
        run(["debootstrap", "--variant=minbase", suite, folder, mirror], log, env=environment)
        for name in TRIMMED:
            shutil.rmtree(folder / name, ignore_errors=True)
        partial = archive.with_suffix(".part")
        run(["tar", "-C", folder, "-cf", partial, "."], log)
        partial.rename(archive)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Storage:
    """A storage of buildah below `work`, away from the machine's own."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.log = work / "buildah.log"
        self._folders = [work / name for name in ("storage", "state", "tmp")]
        self.environment = os.environ | {"TMPDIR": str(work / "tmp"), "BUILDAH_LAYERS": "false"}
        for folder in self._folders:
            folder.mkdir(parents=True, exist_ok=True)

    def words(self, *words: str | Path) -> list[str]:
        """A command line of buildah on this storage."""
        storage, state, _ = self._folders
        return ["buildah", "--storage-driver=vfs", f"--root={storage}", f"--runroot={state}", *map(str, words)]

    def __call__(self, *words: str | Path) -> str:
        """Run buildah; what it prints. Raises `Failed`."""
        return run(self.words(*words), self.log, env=self.environment).strip()

    def import_base(self, archive: Path, name: str) -> None:
        """An image of one layer from a tar file."""
        container = self("from", "scratch")
        self("add", "--quiet", container, archive, "/")
        self("commit", "--quiet", "--rm", container, name)

    def build(self, file: Path, context: Path, name: str, base: str, more: Sequence[str]) -> None:
        """An image from a Dockerfile. In docker's format: the other one has no health check."""
        options = ["--isolation=chroot", "--format=docker", "--network=host", f"--build-arg=BASE_IMAGE={base}", *more]
        self("build", *options, f"--file={file}", f"--tag={name}", context)

    def image(self, name: str) -> dict[str, Any]:
        """What the image says of itself: User, Cmd, Env, Healthcheck, StopSignal, ..."""
        return dict(json.loads(self("inspect", "--type=image", name))["Docker"]["config"])

    def size(self, name: str) -> int:
        """Bytes of an image and what it is based on."""
        mounted = Path(self("mount", container := self("from", name)))
        found = [path.lstat() for path in mounted.rglob("*")]
        # By inode: a hard link takes no room.
        files = {each.st_ino: each.st_size for each in found if stat.S_ISREG(each.st_mode)}
        self("rm", container)
        return sum(files.values())

    def remove(self) -> None:
        """Everything but the log. Raises `Failed` rather than remove what is mounted there."""
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        inside = [point for point in mounts if any(Path(point).is_relative_to(folder) for folder in self._folders)]
        for point in sorted(inside, reverse=True):
            if subprocess.run(["umount", "--lazy", point], check=False).returncode:
                raise Failed(f"{point} is still mounted; unmount it and remove {self.work} by hand")
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
