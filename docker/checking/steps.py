"""The steps of the check, one after the other; each says what it found and how long it took."""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import outside
from images import Failed, Storage, make_base
from questions import Client, expect, lists_nothing, lists_params, lists_the_run, refuses_strangers, serves_bits
from service import PORT, Service, wait_until
from stores import make_store

BASE, SERVER, TRAIN = (f"localhost/gradtap-check-{name}:latest" for name in ("base", "server", "train"))


def say(text: str) -> None:
    """A line of the report, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Step:
    """A step of the check: its name when it begins, its result and seconds when it has ended."""

    def __init__(self, name: str) -> None:
        self.name, self.result = name, "done"

    def __enter__(self) -> Step:
        say(f"== {self.name}")
        self._began = time.monotonic()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        said = self.result if kind is None else "FAILED"
        say(f"   {said}  [{time.monotonic() - self._began:.1f} s]")


def build(root: Path, storage: Storage, wanted: argparse.Namespace, kind: str, name: str) -> None:
    """One of the two images."""
    with Step(f"build docker/{kind}.Dockerfile") as step:
        text, certificate, left_out = outside.pip_file(outside.pip_settings())
        if wanted.pip_conf is not None:
            text, left_out = wanted.pip_conf.read_text(), []
        if left_out:
            say(
                f"   folders of this machine that a build does not see: {' '.join(left_out)} (see --pip-conf, --volume)"
            )
        (storage.work / "pip.conf").write_text(text)
        more = [f"--secret=id=pip,src={storage.work / 'pip.conf'}", *(f"--volume={each}" for each in wanted.volume)]
        if certificate is not None:
            more.append(f"--secret=id=ca,src={certificate}")
        storage.build(root / "docker" / f"{kind}.Dockerfile", root, name, BASE, more)
        base, whole = storage.size(BASE), storage.size(name)
        step.result = f"{whole / 1e6:.0f} MB, {base / 1e6:.0f} MB of it the base"


def free_port(wanted: int) -> int:
    """`wanted` if nobody listens there, else another."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise Failed("no port is free")


def train(root: Path, storage: Storage, wanted: argparse.Namespace) -> Path:
    """The store that the training image has recorded."""
    build(root, storage, wanted, "train", TRAIN)
    with Step("train in it, as its own user") as step:
        config = storage.image(TRAIN)
        folder = storage.work / "trained"
        folder.mkdir()
        user, _, group = config["User"].partition(":")
        os.chown(folder, int(user), int(group))
        container = storage("from", TRAIN)
        storage(
            "run", "--isolation=chroot", "--network=host", f"--volume={folder}:/data", container, "--", *config["Cmd"]
        )
        storage("rm", container)
        step.result = f"{' '.join(config['Cmd'])}: its own check held"
    return folder / "demo.gradtap"


def find_store(root: Path, storage: Storage, wanted: argparse.Namespace) -> Path:
    """The store to serve. Raises `Failed`."""
    if wanted.train:
        return train(root, storage, wanted)
    if wanted.store is not None:
        return Path(wanted.store).resolve()
    with Step("make a store") as step:
        store, step.result = make_store(storage.work, root, storage.log)
    return store


def put(store: Path, data: Path) -> None:
    """The store in the folder that is served, its files shared where they can be."""

    def share(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    shutil.copytree(store, data / store.name, copy_function=share)


def ask(service: Service, client: Client, store: Path, data: Path) -> None:
    """Everything that is asked of the running service."""
    with Step("wait for /readyz") as step:
        waited = wait_until(lambda: client.ready() or not service.running, "ready", 60)
        if not service.running:
            raise Failed("the service ended")
        step.result = f"ready after {waited:.1f} s"
    with Step("who it runs as") as step:
        user, group = service.user()
        expect(
            f"{user}:{group}" == service.config["User"] and user != 0,
            f"the image's user, {service.config['User']}, and not root: {user}:{group}",
        )
        step.result = f"user {user}, group {group}"
    with Step("the image's health check, in the container") as step:
        code, said = service.run(service.config["Healthcheck"]["Test"][1:])
        expect(code == 0, f"exit code 0, not {code}: {said}")
        step.result = "healthy"
    with Step("ask without the token") as step:
        step.result = refuses_strangers(client)
    with Step("GET /api/v1/runs, of an empty volume") as step:
        step.result = lists_nothing(client)
    with Step("GET /api/v1/runs, once a store is in the volume") as step:
        put(store, data)
        base, step.result = lists_the_run(client, store)
    with Step(f"GET {base}/params") as step:
        step.result = lists_params(client, base, store)
    with Step(f"GET {base}/steps/.../grads/...") as step:
        step.result = serves_bits(client, base, store)


def end(service: Service, before: dict[str, int]) -> None:
    """Stop it as a container engine does."""
    signal_name = service.config["StopSignal"]
    with Step(f"stop it with {signal_name}") as step:
        code = service.stop()
        expect(code == 0, f"exit code 0, not {code}")
        expect(len(service.said.splitlines()) == 1, "the line of its start and no other")
        step.result = f"exit code 0; all it ever said: {service.said}"
    with Step("the health check of a service that is gone") as step:
        code, _ = service.run(service.config["Healthcheck"]["Test"][1:])
        expect(code != 0, "another exit code than 0")
        step.result = "unhealthy"
    with Step("what it wrote to its own file system") as step:
        after = service.files()
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        expect(not changed, f"nothing, not {changed[:10]}")
        step.result = "nothing: it runs on a read-only root"


def check(root: Path, work: Path, kept: Path | None, wanted: argparse.Namespace, undo: ExitStack) -> None:
    """All steps in order. Raises `Failed`."""
    storage = Storage(work)
    undo.callback(storage.remove)
    archive = wanted.base or (kept or work) / f"base-{wanted.suite}.tar"
    with Step(f"a bare Debian {wanted.suite}" if wanted.base is None else f"the base {archive}") as step:
        if archive.exists():
            step.result = f"{archive} is there"
        else:
            mirror = wanted.mirror or outside.debian_mirror(wanted.suite)
            make_base(archive, wanted.suite, mirror, storage.log)
            step.result = f"debootstrap, minbase, from {mirror}"
        storage.import_base(archive, BASE)
    store = find_store(root, storage, wanted)
    build(root, storage, wanted, "server", SERVER)
    token = storage.work / "token"
    token.write_text(secrets.token_hex(16))
    data = storage.work / "data"
    data.mkdir()
    # Whatever the umask of whoever runs this: the service is somebody else.
    data.chmod(0o755)
    token.chmod(0o444)
    port = free_port(int(PORT))
    service = Service(storage, SERVER, data=data, token=token, port=str(port))
    undo.callback(service.remove)
    with Step("start it without a token") as step:
        code, said = service.run(service.config["Cmd"])
        expect(code not in (0, None) and "token" in said.lower(), f"a refusal that names the token, not {code}: {said}")
        step.result = f"refused: {said.strip().splitlines()[0]}"
    before = service.files()
    with Step(f"run it on port {port}: {' '.join(service.config['Cmd'])}"):
        service.start()
    try:
        ask(service, Client(port=port, token=token.read_text()), store, data)
        end(service, before)
    except Exception:
        say(f"   the service has said:\n{service.said}")
        raise
