"""Gradients under ZeRO-1 and ZeRO-2: this rank's partition of each parameter group's flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradtap.capture import zero_layout
from gradtap.capture.zero_buffers import Norms, Piece
from gradtap.errors import UnsupportedError
from gradtap.types import Ownership


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one parameter lies in its group's flat buffer, and who shares that buffer."""

    group: int
    offset: int
    numel: int
    partition: int
    members: tuple[int, ...]


class PartitionBuffers:
    """`Buffers` of a `DeepSpeedZeroOptimizer`, with or without offload."""

    loss_scaled = True

    def __init__(self, zero: Any) -> None:
        self._zero, self._rank = zero, dist.get_rank()
        self._places = _layout(zero)

    def holds(self, param: Any) -> bool:
        """Whether a group holds this parameter."""
        return id(param) in self._places

    def shape(self, param: Any) -> tuple[int, ...]:
        """The parameter's own."""
        return tuple(param.shape)

    def dtype(self, param: Any) -> torch.dtype:
        """float32 with offload or a compact buffer, else the model's."""
        zero, group = self._zero, self._places[id(param)].group
        if zero.cpu_offload:
            return zero.single_partition_of_fp32_groups[group].grad.dtype  # type: ignore[no-any-return]
        return torch.float32 if self._compact(group) else zero.dtype

    def own(self, param: Any) -> Ownership:
        """Cuts where partitions end."""
        place = self._places[id(param)]
        bounds = zero_layout.owner_bounds(place.offset, place.numel, place.partition, len(place.members))
        return Ownership(kind="cuts", ranks=place.members, bounds=bounds)

    def settle(self) -> None:
        """With offload, wait for the copies to the host."""
        if not self._zero.cpu_offload:
            return
        wait = getattr(self._zero, "_wait_for_offload_copies", None)
        if callable(wait):
            wait()
        elif torch.cuda.is_available():
            torch.cuda.synchronize()

    def pieces(self, param: Any) -> list[Piece]:
        """From each fragment of the partition that holds some of the parameter."""
        place = self._places[id(param)]
        start, stop, position = zero_layout.place_in_partition(
            place.offset, place.numel, place.partition, place.members.index(self._rank)
        )
        if start == stop:
            return []
        fragments = self._fragments(place.group)
        sizes = [fragment.numel() for fragment in fragments]
        found: list[Piece] = []
        at = start
        for index, inside, count in zero_layout.cover(sizes, position, stop - start):
            found.append((at, at + count, fragments[index].detach().reshape(-1)[inside : inside + count]))
            at += count
        return found

    def reached(self, param: Any) -> bool:
        """These engines keep no such mark."""
        return False

    def adds_old(self, param: Any) -> bool:
        """ZeRO-2 with offload adds what the last window left in its host buffer."""
        zero = self._zero
        if not (zero.cpu_offload and zero.partition_gradients):
            return False
        return not self._compact(self._places[id(param)].group)

    def under_way(self) -> bool:
        """By the optimizer's own count; the engine's counts windows under Accelerate."""
        return int(getattr(self._zero, "micro_step_id", -1)) >= 0

    def norms(self, reported: float, before: float, after: float) -> Norms:
        """The norm is divided by the scale before the step, the limit is compared by the scale after it."""
        return Norms(true=reported, clipped=reported * before / after)

    def settings(self) -> dict[str, Any]:
        """Layout, offload and dtypes."""
        zero = self._zero
        return {
            "model_dtype": str(zero.dtype).removeprefix("torch."),
            "accumulation_dtype": str(getattr(zero, "gradient_accumulation_dtype", zero.dtype)).removeprefix("torch."),
            "cpu_offload": bool(zero.cpu_offload),
            "round_robin_gradients": bool(getattr(zero, "round_robin_gradients", False)),
            "parameter_alignment": bool(getattr(zero, "parameter_alignment", False)),
        }

    def _fragments(self, group: int) -> Sequence[torch.Tensor]:
        if self._zero.cpu_offload:
            return (self._zero.single_partition_of_fp32_groups[group].grad,)
        held = self._zero.averaged_gradients.get(group)
        if held is None:
            raise UnsupportedError(
                f"DeepSpeed holds no averaged gradients for parameter group {group} at its step boundary; "
                "no backward reached this step, or this version keeps them elsewhere"
            )
        flat = getattr(held, "flat_partition", None)
        return (flat,) if flat is not None else tuple(held)

    def _compact(self, group: int) -> bool:
        compact = getattr(self._zero, "_use_compact_grad_partition_buffer", None)
        return bool(compact(group)) if callable(compact) else False


def _layout(zero: Any) -> dict[int, Place]:
    places: dict[int, Place] = {}
    for group, plain in enumerate(zero.bit16_groups):
        # Round-robin reordering and alignment gaps are there in some releases only.
        ordered = list(zero.round_robin_bit16_groups[group]) if hasattr(zero, "round_robin_bit16_groups") else plain
        numels = [param.numel() for param in ordered]
        if hasattr(zero, "round_robin_bit16_offsets"):
            offsets = [int(offset) for offset in zero.round_robin_bit16_offsets[group]]
        else:
            offsets = zero_layout.running_offsets(numels)
        members = tuple(dist.get_process_group_ranks(zero.real_dp_process_group[group]))
        partition = int(zero.partition_size[group])
        for param, offset, numel in zip(ordered, offsets, numels, strict=True):
            places[id(param)] = Place(group=group, offset=offset, numel=numel, partition=partition, members=members)
    return places
