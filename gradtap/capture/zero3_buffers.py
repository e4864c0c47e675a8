"""Gradients under ZeRO-3: a view of this rank's part of each parameter, wherever the optimizer is offloaded to.

The view is the same with optimizer states on the device, on the host and on NVMe. The last owners' parts are padded;
padding is never read. A view keeps the last window's content where no backward reached the parameter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gradtap.capture import zero_layout
from gradtap.capture.zero_buffers import Norms, Piece
from gradtap.errors import UnsupportedError
from gradtap.types import Ownership

_VIEWS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


class ShardBuffers:
    """`Buffers` of a `DeepSpeedZeroOptimizer_Stage3`.

    Raises `UnsupportedError` where this version keeps gradients elsewhere, or where a parameter is split over a part
    of the ranks only (the parameters of experts: their names are the same for different experts).
    """

    loss_scaled = True

    def __init__(self, zero: Any) -> None:
        self._zero, self._rank = zero, dist.get_rank()
        views = getattr(zero, _VIEWS, None)
        if not isinstance(views, dict):
            raise UnsupportedError(
                "this DeepSpeed version keeps ZeRO-3 gradients in a place that is not known; use release 0.19 of "
                "deepspeed, or ZeRO stage 2"
            )
        self._default = _members(zero.dp_process_group)
        self._held = {id(param): param for group in zero.fp16_groups for param in group}
        self._ranks = {key: self._owners(param) for key, param in self._held.items()}

    def holds(self, param: Any) -> bool:
        """Whether a sub-group holds this parameter."""
        return id(param) in self._held

    def shape(self, param: Any) -> tuple[int, ...]:
        """Of the whole parameter: the tensor itself is empty while it is partitioned."""
        return tuple(param.ds_shape if hasattr(param, "ds_shape") else param.shape)

    def dtype(self, param: Any) -> torch.dtype:
        """The one in which gradients are accumulated."""
        return self._view(param).dtype

    def own(self, param: Any) -> Ownership:
        """Equal parts of the flattened parameter, the last ones shorter or empty."""
        ranks = self._ranks[id(param)]
        bounds = zero_layout.owner_bounds(0, int(param.ds_numel), self._view(param).numel(), len(ranks))
        return Ownership(kind="cuts", ranks=ranks, bounds=bounds)

    def settle(self) -> None:
        """Views on the host are filled from a stream of the engine's own."""
        if getattr(self._zero, "offload_optimizer", False) and torch.cuda.is_available():
            torch.cuda.synchronize()

    def pieces(self, param: Any) -> list[Piece]:
        """The front of this rank's view, without the padding behind it."""
        view = self._view(param)
        member = self._ranks[id(param)].index(self._rank)
        start, stop, position = zero_layout.place_in_partition(0, int(param.ds_numel), view.numel(), member)
        return [] if start == stop else [(start, stop, view.detach()[position : position + stop - start])]

    def reached(self, param: Any) -> bool:
        """A leaf module's parameters without a gradient get true zeros when its backward ends."""
        if not hasattr(param, "ds_z3_leaf_module"):
            return False
        return param.ds_id in getattr(self._zero, "_offload_boundary_param_ids", ())

    def adds_old(self, param: Any) -> bool:
        """Later micro-batches are added to whatever the view holds."""
        return True

    def under_way(self) -> bool:
        """The count rises with the forward after a backward, so the marks of that backward are looked at too."""
        zero = self._zero
        ran = bool(getattr(zero, "_epilogue_ran_this_backward", False))
        return ran or int(zero.micro_step_id) > 0 or bool(getattr(zero, "_offload_boundary_param_ids", ()))

    def norms(self, reported: float, before: float, after: float) -> Norms:
        """The engine divides its norm by the scale after the step, which is another where the scale has grown."""
        return Norms(true=reported * after / before, clipped=reported)

    def settings(self) -> dict[str, Any]:
        """Offload and dtypes."""
        zero = self._zero
        return {
            "model_dtype": str(zero.dtype).removeprefix("torch."),
            "accumulation_dtype": str(zero.gradient_accumulation_dtype).removeprefix("torch."),
            "cpu_offload": bool(getattr(zero, "offload_optimizer", False)),
            "nvme_offload": bool(getattr(zero, "swap_optimizer", False)),
            "quantized_gradients": bool(getattr(zero, "zero_quantized_gradients", False)),
        }

    def _view(self, param: Any) -> torch.Tensor:
        # Looked up each time: loading a checkpoint, or offloading states, may make new ones.
        view: torch.Tensor = getattr(self._zero, _VIEWS)[param.ds_id]
        return view

    def _owners(self, param: Any) -> tuple[int, ...]:
        ranks = _members(getattr(param, "ds_process_group", None) or self._zero.dp_process_group)
        if set(ranks) != set(self._default):
            raise UnsupportedError(
                f"a parameter of shape {self.shape(param)} is split over ranks {ranks[:8]} and the model over "
                f"{len(self._default)}: parameters of experts are not supported; train without expert parallelism"
            )
        return ranks


def _members(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
