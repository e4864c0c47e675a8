"""`gradtap doctor`: everything about machine, installation and store that a report of a problem should say."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from gradtap.cli.output import Json, emit, form_of, say, size
from gradtap.errors import GradtapError, problem_of
from gradtap.query.answer import Answer
from gradtap.remote.address import is_address


def doctor(
    store: Annotated[
        str, typer.Argument(metavar="STORE", help="A folder or server to look at too; a file is written and removed.")
    ] = "",
    *,
    as_json: Json = False,
) -> None:
    """Say what machine, installation and store are like.

    Text to paste into a report. Ends with the exit code of what is wrong with STORE, whose gradients it does not read:
    `gradtap verify --deep` does.
    """
    from gradtap.cli.machine import machine_facts

    form = form_of(as_json=as_json, as_jsonl=False, as_csv=False)
    facts = machine_facts()
    if store:
        facts["store"] = _server_facts(store) if is_address(store) else _store_facts(store)
    emit(Answer(query="doctor", facts=facts), form, pictures=[_text(facts)] if form == "table" else ())
    place: Mapping[str, Any] = facts.get("store", {})
    if place.get("error"):
        say(place["error"])
        raise typer.Exit(place["exit_code"])


def _store_facts(store: str) -> dict[str, Any]:
    from gradtap.cli.storage import store_facts

    return store_facts(store)


def _server_facts(store: str) -> dict[str, Any]:
    """The server's own words about itself, its runs, and the seconds that an answer takes."""
    from gradtap.remote.address import address_of
    from gradtap.remote.client import Client
    from gradtap.remote.place import runs_of

    facts: dict[str, Any] = {"store": store, "error": None, "exit_code": 0}
    try:
        with Client.from_environment(address_of(store).base) as client:
            about = client.json("", schema="gradtap.about/1")
            started = time.perf_counter()
            rows = runs_of(client).rows
            return facts | {"server": about, "seconds": time.perf_counter() - started, "runs": list(rows)}
    except GradtapError as error:
        return facts | {"error": str(error), "exit_code": problem_of(error).exit_code}


def _text(facts: Mapping[str, Any]) -> Any:
    from rich.text import Text

    # To be pasted: no line is folded, nothing in it is markup.
    return Text("\n".join(_lines(facts)), no_wrap=True, overflow="ignore")


def _lines(facts: Mapping[str, Any]) -> list[str]:
    memory, free = facts["memory_bytes"], facts["memory_available_bytes"]
    lines = [
        f"gradtap   {facts['gradtap']}, format {facts['format']}",
        f"python    {facts['python']} ({facts['executable']})",
        f"platform  {facts['platform']}",
        f"cpus      {facts['cpus'] or 'unknown'}",
        f"memory    {_size(memory)}, {_size(free)} available",
        f"gpus      {_gpus(facts['gpus'])}",
        "packages",
        *(f"  {name:<18} {version or '-'}" for name, version in facts["packages"].items()),
        "extras",
        *(_extra(name, extra) for name, extra in facts["extras"].items()),
        *_settings(facts["settings"]),
    ]
    return [*lines, *(_store(facts["store"]) if "store" in facts else [])]


def _size(count: int | None) -> str:
    return "unknown" if count is None else size(count)


def _gpus(gpus: list[dict[str, Any]] | None) -> str:
    if gpus is None:
        return "no NVIDIA driver"
    return "; ".join(f"{g['name']} ({g['memory_mib']} MiB, driver {g['driver']})" for g in gpus) or "none"


def _extra(name: str, extra: Mapping[str, Any]) -> str:
    if extra["installed"]:
        return f"  {name:<18} installed: {extra['gives']}"
    return f"  {name:<18} lacks {', '.join(extra['missing'])}: {extra['command']} gives {extra['gives']}"


def _settings(settings: Mapping[str, Any]) -> list[str]:
    lines = [f"  {name}={value}" for name, value in settings["set"].items()] or ["  none set: all have their defaults"]
    return ["settings", *lines, *(f"  WRONG: {error}" for error in settings["errors"])]


def _store(store: Mapping[str, Any]) -> list[str]:
    lines = [f"store     {store['store']}"]
    if store["error"] and "runs" not in store:
        return [*lines, f"  ERROR: {store['error']}"]
    if "server" in store:
        about = store["server"]
        lines.append(f"  gradtap {about['gradtap']}, auth {about['auth']}, {store['seconds']:.3f} s")
    else:
        able = [word for word, on in (("readable", store["readable"]), ("writable", store["writable"])) if on]
        lines += [
            f"  {' and '.join(able) or 'neither readable nor writable'}, on {store['file_system'] or '-'}",
            f"  {size(store['free_bytes'])} free of {size(store['total_bytes'])}",
            f"  {_speed(store['speed'])}",
        ]
    return [*lines, f"  runs: {len(store['runs'])}", *(f"    {_run(row)}" for row in store["runs"])]


def _speed(speed: Mapping[str, Any]) -> str:
    if speed["error"]:
        return f"speed not measured: {speed['error']}"
    write, read = size(speed["write_bytes_per_s"]), size(speed["read_bytes_per_s"])
    return f"writes {write}/s, reads {read}/s, a small sync takes {speed['fsync_seconds'] * 1000:.2f} ms"


def _run(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']}: {row['state']}: {row['error']['detail']}"
    return f"{row['name']}: {row['state']}, {row['steps']['count']} steps"
