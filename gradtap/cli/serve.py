"""`gradtap serve`: the HTTP service on this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from gradtap.cli.extras import needing
from gradtap.cli.output import to_json, write
from gradtap.errors import UsageError, near_names, nearest

LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def serve(
    stores: Annotated[
        list[str] | None,
        typer.Argument(metavar="STORE", help="Folders, each of a run or of several; GRADTAP_SERVER_STORES if none."),
    ] = None,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for a free one.")] = 8000,
    token_file: Annotated[str, typer.Option(metavar="FILE", help="File that holds the token clients must show.")] = "",
    insecure_no_auth: Annotated[
        bool, typer.Option("--insecure-no-auth", help="Let everybody read who reaches the address.")
    ] = False,
    root_path: Annotated[str, typer.Option(metavar="PATH", help="Path under which a proxy shows the service.")] = "",
    hosts: Annotated[
        str, typer.Option(metavar="NAMES", help="Names, with commas between, that clients may call it by; * for any.")
    ] = "",
    log_level: Annotated[str, typer.Option(help="critical, error, warning, info, debug or trace.")] = "warning",
    as_json: Annotated[bool, typer.Option("--json", help="Say that it is ready by one JSON object on stdout.")] = False,
) -> None:
    """Serve runs over HTTP until Ctrl-C.

    JSON, arrays, metrics, API docs. Everything else is a setting: GRADTAP_SERVER_* in the environment, as
    the README lists them.
    """
    if log_level not in LEVELS:
        raise UsageError(
            f"log level is {log_level!r}; allowed are {', '.join(LEVELS)}{nearest(log_level, LEVELS)}"
        ).noting(did_you_mean=near_names(log_level, LEVELS))
    with needing("server", "`gradtap serve`"):
        from gradtap_server.launch import serve as run_server
        from gradtap_server.settings import ServerSettings
    changes: dict[str, Any] = {"hosts": hosts} if hosts else {}
    if token_file:
        # What is said here goes before what the environment says.
        changes |= {"token": None, "token_file": token_file}
    if insecure_no_auth:
        changes["insecure_no_auth"] = True
    settings = replace(ServerSettings.from_environment(), **changes)
    if not stores and not settings.folders:
        raise UsageError("no store to serve; give the folder of a run, or a folder of runs")
    run_server(
        stores or [],
        host=host,
        port=port,
        settings=settings,
        root_path=root_path or None,
        log_level=log_level,
        on_ready=_ready if as_json else None,
    )


def _ready(url: str) -> None:
    write(to_json({"schema": "gradtap.serve/1", "url": url, "pid": os.getpid()}) + "\n")
    sys.stdout.flush()
