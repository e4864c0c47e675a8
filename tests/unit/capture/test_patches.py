"""Patches and hooks: counted, undone in any situation, harmless when someone patches over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradtap.capture.patches import PatchSet, check_free, claim, release
from gradtap.errors import AttachError


class Engine:
    def step(self, amount: int = 1) -> int:
        return amount


def _doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: 2 * original(*args, **kwargs)


def test_a_patch_is_on_the_instance_and_leaves_no_trace() -> None:
    """One instance changes, its class and others do not, and afterwards its `__dict__` is as it was."""
    engine, other = Engine(), Engine()
    patches = PatchSet()
    patches.wrap(engine, "step", _doubled)
    assert (engine.step(3), other.step(3), len(patches)) == (6, 3, 1)
    assert patches.remove() == ()
    assert vars(engine) == {} and engine.step(3) == 3 and len(patches) == 0


def test_an_attribute_that_was_there_is_put_back() -> None:
    """An instance attribute that someone had set before is the very same object again after `remove`."""
    engine = Engine()
    mine = vars(engine)["step"] = lambda: 7
    patches = PatchSet()
    patches.wrap(engine, "step", _doubled)
    assert engine.step() == 14
    patches.remove()
    assert vars(engine)["step"] is mine


def test_a_patch_over_ours_stays_and_ours_becomes_inert(caplog: pytest.LogCaptureFixture) -> None:
    """When another patch holds ours, `remove` warns of it, leaves the other in place, and ours does nothing."""
    engine = Engine()
    patches = PatchSet()
    patches.wrap(engine, "step", _doubled)
    ours = engine.step
    vars(engine)["step"] = lambda amount: 100 + ours(amount)
    assert engine.step(1) == 102
    assert patches.remove() == ("Engine.step",)
    assert engine.step(1) == 101
    assert [r.levelname for r in caplog.records] == ["WARNING"] and "patched over Engine.step" in caplog.text
    assert patches.remove() == () and len(caplog.records) == 1


def test_two_patches_of_one_method_come_off_in_order() -> None:
    """Patching the same method twice and removing gives the original back."""
    engine = Engine()
    patches = PatchSet()
    patches.wrap(engine, "step", _doubled)
    patches.wrap(engine, "step", _doubled)
    assert engine.step(1) == 4
    assert patches.remove() == ()
    assert vars(engine) == {}


def test_hooks_are_removed() -> None:
    """A torch hook kept by the set is gone from its parameter after `remove`, which may be called again."""
    param = torch.nn.Parameter(torch.ones(2))
    patches = PatchSet()
    patches.hook(param.register_post_accumulate_grad_hook(lambda _: None))
    assert len(patches) == len(param._post_accumulate_grad_hooks) == 1
    patches.remove()
    patches.remove()
    assert len(param._post_accumulate_grad_hooks) == 0


def test_a_target_is_claimed_once() -> None:
    """A second claim is refused in words until the first is released."""
    engine = Engine()
    claim(engine)
    with pytest.raises(AttachError, match="attached to this Engine already"):
        check_free(engine)
    release(engine)
    check_free(engine)
