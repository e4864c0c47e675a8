"""What the check asks the service, and that the answers are those of the local reader, bit for bit."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from images import Failed
from service import wait_until

import gradtap


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body of an answer that must be 200."""
        expect(self.status == 200, f"an answer of 200, not {self.status}: {self.body[:300]!r}")
        return json.loads(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Asks over loopback, with a token unless told otherwise."""

    port: int
    token: str

    def get(self, path: str, *, method: str = "GET", token: str | None = None, **headers: str) -> Reply:
        """One request. `token=""` shows none. Raises `OSError` where nobody listens."""
        shown = self.token if token is None else token
        if shown:
            headers["Authorization"] = f"Bearer {shown}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
            reply = connection.getresponse()
            named = {name.lower(): text for name, text in reply.getheaders()}
            return Reply(status=reply.status, headers=named, body=reply.read())
        finally:
            connection.close()

    def ready(self) -> bool:
        """Whether /readyz says so."""
        try:
            return self.get("/readyz", token="").status == 200
        except OSError:
            return False


def expect(holds: bool, what: str) -> None:
    """Raise `Failed` unless it holds."""
    if not holds:
        raise Failed(f"expected {what}")


def refuses_strangers(client: Client) -> str:
    """Without the token, and with a wrong one, there is a problem of 401 and nothing else."""
    for token in ("", "wrong"):
        reply = client.get("/api/v1/runs", token=token)
        expect(reply.status == 401, f"401 for token {token!r}, not {reply.status}")
        expect(reply.headers["content-type"].startswith("application/problem+json"), "a problem document with 401")
        expect(json.loads(reply.body)["status"] == 401, "the status in the problem document")
    return "401 without the token, 401 with a wrong one"


def lists_nothing(client: Client) -> str:
    """A volume without runs is served as such."""
    runs = client.get("/api/v1/runs").json()["runs"]
    expect(runs == [], f"no runs, not {runs}")
    return "no runs yet, and ready all the same"


def lists_the_run(client: Client, store: Path) -> tuple[str, str]:
    """The path of the run, and what was found, once the service has seen that it is there."""
    run = gradtap.open(store)
    found: list[dict[str, Any]] = []

    def listed() -> bool:
        found[:] = [each for each in client.get("/api/v1/runs").json()["runs"] if each["run"] == run.id]
        return bool(found)

    wait_until(listed, f"run {run.id} in the list", 30)
    expect(len(found) == 1, f"run {run.id} once in the list")
    return f"/api/v1/runs/{quote(found[0]['name'], safe='')}", f"{found[0]['name']}, {len(run.steps)} steps"


def lists_params(client: Client, base: str, store: Path) -> str:
    """Names and shapes as the local reader has them."""
    here = [(each.name, list(each.shape)) for each in gradtap.open(store).params]
    there = client.get(f"{base}/params?limit=1000").json()["parameters"]
    expect([(each["name"], each["shape"]) for each in there] == here, f"the {len(here)} parameters, in order")
    return f"{len(here)} parameters, names and shapes as read locally"


def serves_bits(client: Client, base: str, store: Path) -> str:
    """A slice and a whole gradient of the largest parameter at the last step."""
    run = gradtap.open(store)
    param = max((each for each in run.params if each.stored), key=lambda each: each.numel)
    step = run.steps[-1]
    url = f"{base}/steps/{step}/grads/{quote(param.name, safe='')}"
    text = ",".join(["1:-1", "::3", *["..."] * (len(param.shape) > 2)][: max(1, len(param.shape))])
    part = run.grad(param.name, step, slice=text).values
    reply = client.get(f"{url}?slice={quote(text, safe='')}&format=raw")
    expect(reply.status == 200, f"the slice, not {reply.status}: {reply.body[:300]!r}")
    expect(reply.body == part.astype(part.dtype.newbyteorder("<")).tobytes(), "the slice bit for bit")
    expect(reply.headers["etag"].startswith('"'), "a strong ETag")
    again = client.get(f"{url}?slice={quote(text, safe='')}&format=raw", If_None_Match=reply.headers["etag"])
    expect(again.status == 304, f"304 for the same ETag, not {again.status}")
    whole = run.grad(param.name, step).values
    loaded = np.load(io.BytesIO(client.get(f"{url}?format=npy").body), allow_pickle=False)
    expect(loaded.shape == whole.shape and loaded.tobytes() == whole.tobytes(), "the whole gradient as .npy")
    digest = hashlib.sha256(reply.body).hexdigest()[:16]
    return f"{param.name}[{text}] of step {step}: {len(reply.body)} bytes, sha256 {digest}, as read locally; .npy too"
