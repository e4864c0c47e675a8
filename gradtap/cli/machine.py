"""What this machine and this installation are: facts for `gradtap doctor`, each found without importing a package."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any

from gradtap.cli.extras import EXTRAS, install
from gradtap.environment import PREFIX, SERVER_PREFIX, TOKEN
from gradtap.errors import UsageError
from gradtap.version import FORMAT, __version__

PACKAGES = (
    *("numpy", "zarr", "numcodecs", "google-crc32c", "typer", "rich", "httpx2", "ml_dtypes"),
    *("torch", "accelerate", "deepspeed", "transformers", "pytorch-lightning"),
    *("fastapi", "fastapi-offline", "starlette", "uvicorn", "anyio", "pydantic", "orjson", "prometheus-client"),
)
"""Distributions that decide how gradtap behaves."""

SECRET = ("TOKEN",)
"""Ends of the names of variables whose values nobody may paste."""


def machine_facts() -> dict[str, Any]:
    """Versions, processor, memory in bytes, GPUs, extras, settings. Raises nothing: what is not known is None."""
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "gradtap": __version__,
        "format": FORMAT,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpus": _cpus(),
        "memory_bytes": _memory(),
        "memory_available_bytes": _available(),
        "gpus": _gpus(),
        "packages": versions,
        "extras": {name: _extra(name, versions) for name in EXTRAS},
        "settings": settings_facts(os.environ),
    }


def settings_facts(environment: Any) -> dict[str, Any]:
    """The variables of gradtap that are set, and `errors`: what does not parse or is no setting."""
    from gradtap.config import Settings

    found = {name: environment[name] for name in sorted(environment) if name.startswith(PREFIX)}
    errors = []
    checks: list[Any] = [Settings.from_environment]
    if any(name.startswith(SERVER_PREFIX) for name in found):
        with contextlib.suppress(ModuleNotFoundError):
            from gradtap_server.settings import ServerSettings

            checks.append(ServerSettings.from_environment)
    for check in checks:
        try:
            check(environment)
        except (UsageError, OSError) as error:
            errors.append(_hidden(str(error), found))
    shown = {name: "(set, not shown)" if _secret(name) else value for name, value in found.items()}
    return {"set": shown, "errors": errors}


def _secret(name: str) -> bool:
    return name == TOKEN or name.endswith(SECRET)


def _hidden(text: str, found: dict[str, str]) -> str:
    for name, value in found.items():
        if _secret(name) and value:
            text = text.replace(value, "(not shown)")
    return text


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _extra(name: str, versions: dict[str, str | None]) -> dict[str, Any]:
    extra = EXTRAS[name]
    missing = [package for package in extra.packages if versions[package] is None]
    return {"installed": not missing, "missing": missing, "gives": extra.gives, "command": install(name)}


def _cpus() -> int | None:
    # What this process may use, which in a container is less than the machine has.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _available() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _gpus() -> list[dict[str, Any]] | None:
    """Each GPU by name, driver and memory in MiB; an empty list where the driver sees none, None without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        fields = "name,driver_version,memory.total"
        done = subprocess.run(
            [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]
    return [{"name": name, "driver": driver, "memory_mib": memory} for name, driver, memory in rows]
