"""`gradtap get`: one request to the HTTP API, without a server where STORE is a folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from gradtap.cli.arguments import Store
from gradtap.cli.extras import needing
from gradtap.cli.files import Force, Output, check_output, put
from gradtap.cli.output import say, write
from gradtap.errors import GradtapError, UsageError
from gradtap.remote.address import API, is_address

TEXTS = ("application/json", "application/problem+json", "text/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Got:
    """An answer of the API: status, headers as they came, body."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def media(self) -> str:
        """The media type, without parameters."""
        named = {name.lower(): value for name, value in self.headers}
        return named.get("content-type", "").partition(";")[0].strip()


def get(
    store: Store,
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Path and query: below /api/v1, or from the root if it begins with /.")
    ],
    *,
    head: Annotated[bool, typer.Option("--head", help="Ask for the headers alone, and print them.")] = False,
    headers: Annotated[bool, typer.Option("--headers", help="Print the headers too, on stderr.")] = False,
    output: Output = "",
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="A problem, where there is one, as the API has it.")] = False,
) -> None:
    """Make one request to the HTTP API and print the answer.

    Ends with the exit code of the problem, which goes to stderr, where there is one.
    """
    check_output(output, force=force)
    where = path if path.startswith("/") else f"{API}/{path}"
    method = "HEAD" if head else "GET"
    ask = _over_network if is_address(store) else _in_process
    got = ask(store, method, where)
    if headers and not head:
        say("\n".join([f"status {got.status}", *(f"{name}: {value}" for name, value in got.headers)]))
    if not 200 <= got.status < 300:
        # The answer to HEAD has no body to say why.
        raise _problem(ask(store, "GET", where) if head else got, store)
    if head:
        write("".join(f"{name}: {value}\n" for name, value in got.headers))
        return
    text = got.media.startswith(TEXTS)
    check_output(output, force=force, binary="" if text else got.media or "the answer")
    put([got.body, *([b"\n"] if text and not output and not got.body.endswith(b"\n") else [])], output, force=force)


def _over_network(store: str, method: str, path: str) -> Got:
    from gradtap.remote.address import address_of
    from gradtap.remote.client import Client

    with Client.from_environment(address_of(store).base) as client:
        found = client.request(method, path)
    return Got(status=found.status, headers=tuple(found.headers.multi_items()), body=bytes(found.body))


def _in_process(store: str, method: str, path: str) -> Got:
    """The application itself, asked in this process: as a server would answer that runs with this environment."""
    import asyncio

    import httpx2

    with needing("server", "`gradtap get` on a folder"):
        from gradtap_server.app import create_app
        from gradtap_server.settings import ServerSettings
    # Who can run this can read the folder: a token would protect nothing.
    settings = replace(ServerSettings.from_environment(), token=None, token_file=None, root_path="", hosts="")
    app = create_app([store], settings)

    async def ask() -> Got:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None) as client:
            found = await client.request(method, path)
            return Got(status=found.status_code, headers=tuple(found.headers.multi_items()), body=found.content)

    try:
        app.state.gradtap.catalog.check()
        return asyncio.run(ask())
    except httpx2.InvalidURL as error:
        raise UsageError(f"{path[:200]!r} is no path: {error}") from error
    finally:
        app.state.gradtap.catalog.close()


def _problem(got: Got, url: str) -> GradtapError:
    from gradtap.remote.problems import error_of

    return error_of(got.status, got.body, url)
