"""Where each DeepSpeed engine keeps its gradients, on engine-shaped fakes: what a CPU cannot build or provoke."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradtap.capture.scale import clip_coefficient
from gradtap.capture.zero0_buffers import Bf16Buffers, WholeBuffers
from gradtap.capture.zero3_buffers import ShardBuffers
from gradtap.capture.zero12_buffers import PartitionBuffers
from gradtap.capture.zero_buffers import find_buffers
from gradtap.errors import UnsupportedError

VIEWS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(group))
    yield


class FP16_Optimizer:
    def __init__(self, param: Any) -> None:
        self.fp16_groups = [[param]]


class FP16_UnfusedOptimizer(FP16_Optimizer):
    pass


def shard(numel: int, view: torch.Tensor, **more: Any) -> tuple[Any, Any]:
    """A parameter of `numel` elements under ZeRO-3, and an optimizer that holds `view` of it."""
    param = SimpleNamespace(ds_id=7, ds_numel=numel, ds_shape=(numel,), ds_process_group=(0, 1), **more)
    zero = SimpleNamespace(fp16_groups=[[param]], dp_process_group=(0, 1), micro_step_id=0, **{VIEWS: {7: view}})
    return zero, param


def test_padding_of_a_shard_is_never_given() -> None:
    """Of 5 elements in parts of 3, rank 1 gives elements 3 and 4; the padding behind them stays unread."""
    zero, param = shard(5, torch.tensor([3.0, 4.0, math.nan]))
    buffers = ShardBuffers(zero)
    ((start, stop, values),) = buffers.pieces(param)
    assert (start, stop) == (3, 5) and values is not None and values.tolist() == [3.0, 4.0]
    assert buffers.own(param).bounds == (0, 3, 5)


def test_a_rank_that_owns_nothing_gives_nothing() -> None:
    """A parameter of one element lies on rank 0; rank 1 has padding only."""
    zero, param = shard(1, torch.tensor([math.nan]))
    assert ShardBuffers(zero).pieces(param) == []
    assert ShardBuffers(zero).own(param).bounds == (0, 1, 1)


def test_views_are_the_same_with_nvme() -> None:
    """With optimizer states on NVMe the gradient is read from the same view, and the session says so."""
    zero, param = shard(4, torch.tensor([2.0, 3.0]))
    vars(zero).update(
        swap_optimizer=True, offload_optimizer=True, dtype=torch.float32, gradient_accumulation_dtype=torch.float32
    )
    buffers = ShardBuffers(zero)
    ((start, stop, values),) = buffers.pieces(param)
    assert (start, stop) == (2, 4) and values is not None and values.tolist() == [2.0, 3.0]
    assert buffers.settings()["nvme_offload"] is True


def test_a_leaf_modules_zeros_count_as_reached() -> None:
    """Only a leaf module's parameter, in a window whose backward filled it in, is reached without autograd."""
    zero, leaf = shard(4, torch.zeros(2), ds_z3_leaf_module=object())
    zero._offload_boundary_param_ids = set()
    assert not ShardBuffers(zero).reached(leaf)
    zero._offload_boundary_param_ids = {7}
    assert ShardBuffers(zero).reached(leaf)
    zero, plain = shard(4, torch.zeros(2))
    zero._offload_boundary_param_ids = {7}
    assert not ShardBuffers(zero).reached(plain)


def test_experts_and_unknown_releases_are_refused() -> None:
    """A parameter split over a part of the ranks, and a release without the views, are refused by name."""
    zero, param = shard(4, torch.zeros(2))
    param.ds_process_group = (1,)
    with pytest.raises(UnsupportedError, match="parameters of experts are not supported; train without"):
        ShardBuffers(zero)
    with pytest.raises(UnsupportedError, match="keeps ZeRO-3 gradients in a place that is not known; use release"):
        ShardBuffers(SimpleNamespace())


def test_the_norm_of_a_step_at_which_the_scale_grew() -> None:
    """A gradient of norm 3 at scale 4, which grew to 8 in the step: each engine's report gives 3, and what it clips."""
    param = torch.nn.Parameter(torch.ones(2))
    zero3 = ShardBuffers(shard(4, torch.zeros(2))[0]).norms(3 * 4 / 8, 4, 8)
    assert (zero3.true, zero3.clipped) == (3, 1.5)
    zero2 = PartitionBuffers(SimpleNamespace(bit16_groups=[])).norms(3, 4, 8)
    assert (zero2.true, zero2.clipped) == (3, 1.5)
    # Without ZeRO the loss is not scaled: a gradient of norm 3 is divided by 8 all the same.
    fused = WholeBuffers(SimpleNamespace(optimizer=FP16_Optimizer(param))).norms(3 / 8, 4, 8)
    unfused = WholeBuffers(SimpleNamespace(optimizer=FP16_UnfusedOptimizer(param))).norms(3, 4, 8)
    assert fused == unfused and (fused.true, fused.clipped) == (3, 3 / 8)
    assert clip_coefficient(fused.clipped, 0.1) == pytest.approx(0.1 / (3 / 8), rel=1e-4)


def test_bf16_optimizer_is_read_from_its_flat_buffer() -> None:
    """`param.grad` of a BF16_Optimizer holds one rank's last micro-batch and is left alone."""
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    param.grad = torch.full((2,), 9.0, dtype=torch.bfloat16)
    made = SimpleNamespace(
        bf16_groups=[[param]],
        real_dp_process_group=[(0, 1)],
        fp32_groups_gradients=[[torch.tensor([1.0, 2.0])]],
        fp32_groups_has_gradients=[[False]],
    )
    buffers = Bf16Buffers(made)
    ((_, _, values),) = buffers.pieces(param)
    assert values is not None and values.tolist() == [1.0, 2.0] and buffers.dtype(param) == torch.float32
    assert not buffers.under_way()
    made.fp32_groups_has_gradients[0][0] = True
    assert buffers.under_way()


def test_a_window_under_way_is_seen() -> None:
    """ZeRO-3 raises its count with the next forward, so the marks of the last backward are looked at too."""
    zero, _ = shard(4, torch.zeros(2))
    assert not ShardBuffers(zero).under_way()
    zero._epilogue_ran_this_backward = True
    assert ShardBuffers(zero).under_way()


def test_each_kind_of_optimizer_has_its_buffers() -> None:
    """The choice is by the class of the engine's optimizer."""
    param = torch.nn.Parameter(torch.ones(2))
    for optimizer in (torch.optim.SGD([param], lr=0.1), FP16_Optimizer(param), FP16_UnfusedOptimizer(param)):
        assert isinstance(find_buffers(SimpleNamespace(optimizer=optimizer)), WholeBuffers)


def test_a_sparse_gradient_is_refused_when_it_comes() -> None:
    """A gradient that turns out sparse raises, and is not read as something else."""
    param = torch.nn.Parameter(torch.ones(2))
    buffers = WholeBuffers(SimpleNamespace(optimizer=torch.optim.SGD([param], lr=0.1)))
    param.grad = torch.ones(2).to_sparse()
    with pytest.raises(UnsupportedError, match="sparse; only dense"):
        buffers.pieces(param)
