"""Parameter names: the author's own, whatever wraps the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gradtap.capture.names import dtype_name, named_params
from tests.support.tiny_model import TinyModel

NAMES = [
    "scale", "embed.weight", "frozen.weight", "frozen.bias", "conv.weight", "conv.bias", "module.weight", "module.bias",
    "side.weight", "out.weight", "out.bias",
]  # fmt: skip


def _names(model: nn.Module) -> list[str]:
    return [entry.name for entry in named_params(model)]


def test_order_and_objects_are_those_of_torch() -> None:
    """Without wrappers the names and their order are those of `named_parameters`, and the objects are the same."""
    model = TinyModel()
    expected = dict(model.named_parameters())
    assert _names(model) == list(expected) == NAMES
    assert all(entry.param is expected[entry.name] for entry in named_params(model))


# Loading torch's compiler warns about a part of torch itself.
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["data-parallel", "compile"])
def test_a_wrapper_leaves_no_prefix(wrap: object) -> None:
    """The component of a known wrapper is left out, once or nested, and a user's child called `module` stays."""
    assert callable(wrap)
    assert _names(wrap(TinyModel())) == NAMES
    assert _names(nn.DataParallel(wrap(TinyModel()))) == NAMES


def test_a_checkpoint_wrapper_inside_the_model_leaves_no_component() -> None:
    """Activation checkpointing around one layer does not change that layer's names."""
    model = TinyModel()
    model.out = checkpoint_wrapper(model.out)
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    assert _names(model) == NAMES


def test_only_the_wrapper_itself_is_left_out() -> None:
    """Children that merely carry a wrapper's attribute name keep it: `module`, `_orig_mod`, `back_module`."""
    inner = nn.ModuleDict({"module": nn.Linear(2, 2, bias=False), "back_module": nn.Linear(2, 2, bias=False)})
    outer = nn.Sequential()
    outer.add_module("_orig_mod", inner)
    assert _names(outer) == ["_orig_mod.module.weight", "_orig_mod.back_module.weight"]


def test_tied_parameters_appear_once_with_their_aliases() -> None:
    """A parameter with two names is listed under the first, and the other is its alias."""
    by_name = {entry.name: entry for entry in named_params(TinyModel())}
    assert by_name["embed.weight"].aliases == ("head.weight",)
    assert by_name["out.weight"].aliases == ()


def test_a_module_used_twice_gives_aliases() -> None:
    """A whole module that is held under two names gives each of its parameters an alias."""
    layer = nn.Linear(2, 2)
    model = nn.ModuleList([layer, layer])
    assert [(entry.name, entry.aliases) for entry in named_params(model)] == [
        ("0.weight", ("1.weight",)),
        ("0.bias", ("1.bias",)),
    ]


def test_dtype_names_are_those_of_the_store() -> None:
    """Torch's dtypes are told by the names that `ParamSpec` uses."""
    assert [dtype_name(dtype) for dtype in (torch.bfloat16, torch.float64)] == ["bfloat16", "float64"]
