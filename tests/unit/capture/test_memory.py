"""The memory that is there: the machine's, or what a cgroup leaves, whichever is less."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradtap.capture import staging
from gradtap.capture.memory import available_bytes, local_ranks
from tests.unit.capture.test_staging import _plan

GIB = 2**30


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """A /proc of a machine with 8 GiB available, and no cgroup."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 16 kB\nMemFree: 1 kB\nMemAvailable: {8 * 2**20} kB\n")
    (tmp_path / "groups").mkdir()
    return tmp_path


def _limit(kernel: Path, folder: str, files: dict[str, object]) -> None:
    place = kernel / "groups" / folder
    place.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (place / name).write_text(f"{value}\n")


def _available(kernel: Path) -> int:
    return available_bytes(kernel / "proc", kernel / "groups")


def test_without_a_cgroup_it_is_what_the_kernel_calls_available(kernel: Path) -> None:
    """`MemAvailable`, not the free pages: caches can be dropped."""
    assert _available(kernel) == 8 * GIB


def test_without_meminfo_it_is_the_free_pages(tmp_path: Path) -> None:
    """A kernel that does not say leaves the free pages."""
    assert available_bytes(tmp_path, tmp_path) > 0


def test_a_limit_of_cgroup_2_counts_less_what_is_used(kernel: Path) -> None:
    """Limit minus use, with the file cache that can be dropped; of a group and its ancestors the least."""
    (kernel / "proc" / "self" / "cgroup").write_text("0::/outer/job\n")
    _limit(kernel, "outer", {"memory.max": 3 * GIB, "memory.current": 2 * GIB})
    _limit(kernel, "outer/job", {"memory.max": "max", "memory.current": GIB})
    assert _available(kernel) == GIB
    _limit(kernel, "outer", {"memory.stat": f"anon 5\ninactive_file {GIB}"})
    assert _available(kernel) == 2 * GIB
    _limit(kernel, "outer/job", {"memory.max": 2 * GIB, "memory.current": 3 * GIB})
    assert _available(kernel) == 0


def test_a_limit_of_cgroup_1_counts_too(kernel: Path) -> None:
    """The memory controller's own tree; in a container its root, where the host's path is not there."""
    (kernel / "proc" / "self" / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    _limit(kernel, "memory", {"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": GIB})
    assert _available(kernel) == 3 * GIB
    _limit(kernel, "memory", {"memory.limit_in_bytes": 2**63 - 4096})
    assert _available(kernel) == 8 * GIB, "no limit is a very large number there"


def test_ranks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the launcher says; 1 where it does not, or says nonsense."""
    for text, ranks in (("4", 4), ("0", 1), ("many", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
        assert local_ranks() == ranks
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert local_ranks() == 1


def test_ranks_share_a_quarter_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two captures, at least 64 MiB; at most a rank's share of a quarter; never less than two slabs."""
    plan, chunks = _plan(100)
    slab = 2**20

    def budget(available: int, ranks: int) -> int:
        monkeypatch.setattr(staging, "available_bytes", lambda: available)
        monkeypatch.setattr(staging, "local_ranks", lambda: ranks)
        return staging.Staging(plan, chunks, budget=None, slab_bytes=slab).budget

    assert budget(GIB, 1) == 64 * 2**20
    assert budget(GIB, 8) == 32 * 2**20
    assert budget(0, 8) == 2 * slab
