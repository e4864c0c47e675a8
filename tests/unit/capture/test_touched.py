"""First touch of each parameter, and how micro-batches are counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradtap.capture.patches import PatchSet
from gradtap.capture.touched import TouchTracker


class Made:
    """Three parameters and a tracker; `backward(i, j)` reaches the parameters i and j."""

    def __init__(self) -> None:
        self.params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        self.tracker = TouchTracker(self.params)
        self.patches = PatchSet()
        self.tracker.install(self.patches)
        self.events: list[str] = []
        self.tracker.on_begin = lambda: self.events.append("begin")
        self.tracker.on_end = lambda: self.events.append("end")

    def backward(self, *indices: int) -> None:
        sum((self.params[index] * 2).sum() for index in indices).backward()


@pytest.fixture(params=["announced", "by autograd"])
def made(request: pytest.FixtureRequest) -> Made:
    """The same expectations for a backward that is announced and for one that is not."""
    made = Made()
    if request.param == "announced":
        plain = made.backward

        def announced(*indices: int) -> None:
            made.tracker.begin()
            plain(*indices)
            made.tracker.end()

        made.backward = announced  # type: ignore[method-assign]
    return made


def test_first_touch_is_the_first_micro_batch_that_reached_it(made: Made) -> None:
    """A parameter keeps the number of its first micro-batch; one that none reached has -1."""
    made.backward(0)
    made.backward(0, 1)
    assert made.tracker.touched.tolist() == [0, 1, -1]
    assert made.tracker.micro_seen == 2


def test_reset_begins_a_new_window(made: Made) -> None:
    """After `reset` nothing is touched and counting starts at 0, but what was ever reached is remembered."""
    made.backward(0)
    assert made.tracker.open
    made.tracker.reset()
    assert not made.tracker.open
    made.backward(2)
    assert made.tracker.touched.tolist() == [-1, -1, 0]
    assert made.tracker.ever.tolist() == [True, False, False]


def test_begin_and_end_are_told_once_for_each_backward(made: Made) -> None:
    """Each backward is told as one beginning and one end, however many parameters it reaches."""
    made.backward(0, 1, 2)
    made.backward(1, 2)
    assert made.events == ["begin", "end"] * 2


def test_only_announced_backwards_count_as_announced() -> None:
    """A direct backward is counted as seen, not as announced."""
    made = Made()
    made.backward(0)
    assert (made.tracker.micro_seen, made.tracker.announced) == (1, 0)


def test_a_backward_that_fails_does_not_stop_the_count() -> None:
    """After an exception inside a backward the next backward is counted again."""
    made = Made()

    def explode(_: torch.Tensor) -> None:
        raise RuntimeError("in backward")

    handle = made.params[1].register_post_accumulate_grad_hook(explode)
    with pytest.raises(RuntimeError, match="in backward"):
        made.backward(1)
    handle.remove()
    before = made.tracker.micro_seen
    made.backward(0)
    made.backward(0)
    assert made.tracker.micro_seen == before + 2


def test_frozen_parameters_get_no_hook() -> None:
    """A parameter that asks for no gradient is not hooked."""
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    patches = PatchSet()
    TouchTracker([frozen]).install(patches)
    assert len(patches) == 0


@pytest.mark.parametrize("outer_first", [True, False])
def test_a_backward_within_a_backward_is_no_micro_batch(outer_first: bool) -> None:
    """Reentrant checkpointing runs backwards inside one: all parameters were first reached by that one."""
    from torch.utils.checkpoint import checkpoint

    made = Made()
    below, inside, above = made.params

    def loss() -> torch.Tensor:
        x = below * 2
        for _ in range(2):
            x = checkpoint(lambda y: y * inside, x, use_reentrant=True)
        return (x * above if outer_first else x).sum()

    for micro in (1, 2):
        loss().backward()
        assert made.tracker.micro_seen == micro
    assert made.tracker.touched.tolist() == [0, 0, 0 if outer_first else -1]
    made.tracker.reset()
    made.backward(2)
    loss().backward()
    assert made.tracker.touched.tolist() == [1, 1, 0] and made.tracker.micro_seen == 2


def test_a_backward_that_fails_half_way_does_not_disturb_later_ones() -> None:
    """A micro-batch whose backward raised is not counted, and the next one is."""
    made = Made()
    handle = made.params[0].register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.backward(0)
    handle.remove()
    for _ in range(2):
        made.backward(0, 1)
    assert made.tracker.micro_seen == 2 and made.tracker.touched.tolist()[:2] == [0, 0]
