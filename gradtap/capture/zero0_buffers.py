"""Whole averaged gradients on every rank: ZeRO-0, and the BF16_Optimizer of ZeRO-1 with float32 accumulation.

Replicas are shared out among the ranks by the planner.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gradtap.capture.zero_buffers import Norms, Piece
from gradtap.errors import UnsupportedError
from gradtap.types import Ownership


class WholeBuffers:
    """`Buffers` of an engine without ZeRO: `param.grad`, reduced, under a torch optimizer or an fp16/bf16 wrapper.

    DeepSpeed 0.19.8 divides by the loss scale in the wrapper's step, but does not multiply the loss by it.
    """

    loss_scaled = False

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        self._wrapped = not isinstance(optimizer, torch.optim.Optimizer)
        groups = optimizer.fp16_groups if self._wrapped else [group["params"] for group in optimizer.param_groups]
        self._held = {id(param): param for group in groups for param in group}
        self._ranks = _ranks(getattr(engine, "seq_data_parallel_group", None))
        # The fused wrapper divides its norm by the scale, the unfused does not.
        self._divides_norm = type(optimizer).__name__ == "FP16_Optimizer"

    def holds(self, param: Any) -> bool:
        """Whether the optimizer holds this parameter."""
        return id(param) in self._held

    def shape(self, param: Any) -> tuple[int, ...]:
        """The parameter's own."""
        return tuple(param.shape)

    def dtype(self, param: Any) -> torch.dtype:
        """The parameter's own."""
        return param.dtype  # type: ignore[no-any-return]

    def own(self, param: Any) -> Ownership:
        """Every rank holds all of it."""
        return Ownership(kind="replicated", ranks=self._ranks)

    def settle(self) -> None:
        """The reduction is ordered on the current stream."""

    def pieces(self, param: Any) -> list[Piece]:
        """All of `param.grad`. Raises `UnsupportedError` for a sparse one."""
        grad = param.grad
        if grad is not None and grad.layout != torch.strided:
            raise UnsupportedError("a gradient is sparse; only dense gradients are supported: use dense embeddings")
        return [(0, param.numel(), None if grad is None else grad.detach().reshape(-1))]

    def reached(self, param: Any) -> bool:
        """There is no such mark."""
        return False

    def adds_old(self, param: Any) -> bool:
        """Gradients are dropped after each step."""
        return False

    def under_way(self) -> bool:
        """Whether a backward has left gradients."""
        return any(param.grad is not None for param in self._held.values())

    def norms(self, reported: float, before: float, after: float) -> Norms:
        """The norm of what is stored; the limit is compared with it divided by the scale after the step."""
        true = reported * after if self._divides_norm else reported
        return Norms(true=true, clipped=true / after)

    def settings(self) -> dict[str, Any]:
        """The dtypes of the gradients."""
        dtypes = sorted({str(param.dtype).removeprefix("torch.") for param in self._held.values()})
        return {"model_dtype": ",".join(dtypes), "accumulation_dtype": ",".join(dtypes), "cpu_offload": False}


class Bf16Buffers:
    """`Buffers` of a `BF16_Optimizer`: a flat buffer per group, reduced on all ranks, before clipping.

    `param.grad` is never read: it holds this rank's last micro-batch.
    """

    loss_scaled = True

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._at = {
            id(param): (group, place)
            for group, params in enumerate(optimizer.bf16_groups)
            for place, param in enumerate(params)
        }
        self._ranks = [_ranks(group) for group in optimizer.real_dp_process_group]

    def holds(self, param: Any) -> bool:
        """Whether a group holds this parameter."""
        return id(param) in self._at

    def shape(self, param: Any) -> tuple[int, ...]:
        """The parameter's own."""
        return tuple(param.shape)

    def dtype(self, param: Any) -> torch.dtype:
        """The accumulation's."""
        return self._view(param).dtype

    def own(self, param: Any) -> Ownership:
        """Every rank holds all of it."""
        return Ownership(kind="replicated", ranks=self._ranks[self._at[id(param)][0]])

    def settle(self) -> None:
        """The reduction is ordered on the current stream."""

    def pieces(self, param: Any) -> list[Piece]:
        """The parameter's view of the flat buffer; zeros where no backward of the window reached it."""
        view = self._view(param)
        return [(0, view.numel(), view.detach().reshape(-1))]

    def reached(self, param: Any) -> bool:
        """There is no such mark."""
        return False

    def adds_old(self, param: Any) -> bool:
        """The flat buffers are cleared after each step."""
        return False

    def under_way(self) -> bool:
        """By the optimizer's own marks."""
        return any(any(marks) for marks in self._optimizer.fp32_groups_has_gradients)

    def norms(self, reported: float, before: float, after: float) -> Norms:
        """There is no loss scale."""
        return Norms(true=reported, clipped=reported)

    def settings(self) -> dict[str, Any]:
        """The dtypes."""
        accumulated = str(self._optimizer.grad_acc_dtype).removeprefix("torch.")
        return {"model_dtype": "bfloat16", "accumulation_dtype": accumulated, "cpu_offload": False}

    def _view(self, param: Any) -> torch.Tensor:
        group, place = self._at[id(param)]
        view: torch.Tensor = self._optimizer.fp32_groups_gradients[group][place]
        return view


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(range(dist.get_world_size())) if group is None else tuple(dist.get_process_group_ranks(group))
