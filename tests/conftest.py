"""Rules that hold for every test: no network but loopback, no skip that hides a missing tool."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Generator
from typing import Any

import pytest

# Two cores are shared by several processes in the tests of engines; accelerate warns where nobody chose.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "socket.connect":
        return
    sock, address = arguments
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return
    host = address[0]
    if host == "localhost" or host == socket.gethostname() or ipaddress.ip_address(host).is_loopback:
        return
    raise RuntimeError(f"a test tried to reach {host}; only loopback is allowed")


sys.addaudithook(_refuse_network)


def _may_skip(item: pytest.Item) -> bool:
    # The marker itself: `item.keywords` would also take a test whose name has the word in it.
    return item.get_closest_marker("gpu") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is no CUDA device."""
    marked = [item for item in items if _may_skip(item)]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Turn every other skip into a failure: a tool that is missing must not read as a pass."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not _may_skip(item):
        report.outcome = "failed"
        report.longrepr = f"skipped, and only gpu tests may be: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """The same for a whole module that skips itself, as `importorskip` does."""
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} skipped itself, and only gpu tests may be: {report.longrepr}"
    return report
