"""One store of runs in every state, and one server of it, for all tests that only read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradtap.store.runfile import create_run
from tests.server.serving import Server, serving
from tests.support.synthetic import Job
from tests.support.wounds import flip_body, spot


# Not for the session: the live run is written by threads of this process, and other tests look for such threads.
@pytest.fixture(scope="package")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a live, a closed, an unclosed, a damaged, an empty, a newer and a torn run, and two twins."""
    root = tmp_path_factory.mktemp("zoo") / "all runs"
    live = Job(run=root / "live.gradtap", world=2).steps(range(4))
    live.flush()
    live.wait_published(4)
    Job(run=root / "closed.gradtap").steps(range(6)).close()
    Job(run=root / "unclosed.gradtap", world=2).steps(range(3)).kill()
    Job(run=root / "damaged.gradtap", world=1).steps(range(3)).close()
    flip_body(spot(root / "damaged.gradtap", "mlp.bias", 1))
    create_run(root / "empty.gradtap")
    create_run(root / "newer.gradtap")
    file = root / "newer.gradtap" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99, "gradtap": "9.9"}))
    Job(run=root / "torn.gradtap", world=1).steps([0]).close()
    head = root / "torn.gradtap" / "sessions" / "0000" / "session.json"
    head.write_bytes(head.read_bytes()[:-30])
    for place in ("a", "b"):
        create_run(root / place / "twin.gradtap")
    shutil.copytree(root / "empty.gradtap", root / "c" / "deep" / "copy.gradtap")
    yield root
    live.close()


@pytest.fixture(scope="package")
def server(zoo: Path) -> Iterator[Server]:
    """A server of the zoo, as it is by default."""
    with serving(zoo) as running:
        yield running
