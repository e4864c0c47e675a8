"""What the check takes from this machine: tools, the Debian mirror and pip's settings. Nothing is built or run here."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

PUBLIC_MIRROR = "http://deb.debian.org/debian"

PIP_KEYS = ("index-url", "extra-index-url", "find-links", "trusted-host", "proxy", "cert", "timeout", "retries")
"""The settings of pip that say how an index is reached."""

CERTIFICATE = "/run/secrets/ca"
"""Where the Dockerfiles mount the secret `ca`."""


def missing() -> list[str]:
    """What the check needs and this machine lacks, each with how to get it."""
    wants = []
    for tool in ("buildah", "debootstrap"):
        if shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None:
            wants.append(f"{tool} is not installed: apt-get install {tool}")
    if os.geteuid() != 0:
        wants.append("debootstrap and a build without a container engine need root: sudo docker/check")
    if any(importlib.util.find_spec(name) is None for name in ("numpy", "zarr", "numcodecs", "google_crc32c")):
        wants.append(f"{sys.executable} lacks what gradtap reads with: pip install -e ., or name another with PYTHON")
    return wants


def debian_mirror(suite: str, etc: Path = Path("/etc/apt")) -> str:
    """The mirror that this machine takes `suite` from, else the public one."""
    for address, suites in _sources(etc):
        if suite in suites and urlsplit(address).scheme in ("http", "https"):
            return address
    return PUBLIC_MIRROR


def _sources(etc: Path) -> Iterator[tuple[str, list[str]]]:
    """Address and suites of each source of apt, in either of its two forms."""
    parts = etc / "sources.list.d"
    for path in [etc / "sources.list", *sorted(parts.glob("*.list"))]:
        for line in path.read_text().splitlines() if path.is_file() else []:
            words = line.split("#")[0].replace("[", " [ ").replace("]", " ] ").split()
            if "[" in words and "]" in words:
                words = words[: words.index("[")] + words[words.index("]") + 1 :]
            if len(words) > 3 and words[0] == "deb":
                yield words[1].rstrip("/"), words[2:3]
    for path in sorted(parts.glob("*.sources")):
        for stanza in path.read_text().split("\n\n"):
            lines = (line.split(":", 1) for line in stanza.splitlines() if ":" in line and line[0] not in "# \t")
            fields = {name.strip().lower(): text.split() for name, text in lines}
            if "deb" in fields.get("types", ()) and fields.get("enabled") != ["no"]:
                for address in fields.get("uris", ()):
                    yield address.rstrip("/"), fields.get("suites", [])


def pip_settings() -> dict[str, str]:
    """How this machine's pip reaches an index; the environment wins over the files. Empty where there is no pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, str] = {}
    for line in sorted(done.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        key = name.removeprefix(":env:.").removeprefix("global.")
        if key in PIP_KEYS:
            found[key] = str(ast.literal_eval(value))
    return found


def pip_file(settings: Mapping[str, str]) -> tuple[str, Path | None, list[str]]:
    """Settings as the text of a pip.conf for a build, the certificate that goes with it, and what is left out.

    A folder of this machine does not exist in a build; to use one, give a pip.conf and `--volume` yourself.
    """
    lines, certificate, left_out = ["[global]"], None, []
    for key, value in settings.items():
        if key == "cert":
            certificate, kept = Path(value), [CERTIFICATE]
        else:
            kept = [word for word in value.split() if not word.startswith(("/", "file:"))]
            left_out += [word for word in value.split() if word not in kept]
        if kept:
            lines.append(f"{key} = {' '.join(kept)}")
    return "\n".join(lines) + "\n", certificate, left_out
