"""FSDP2 (`fully_shard`), HSDP and tensor parallel: reads the local part of each parameter's DTensor gradient.

After the backward that reduces, `param.grad` is a DTensor placed as its parameter, without padding. Where the elements
lie is in `dtensor_layout`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from gradtap.capture.dtensor_layout import Layout, Split, layout_of, owners_of, runs_of, split_of
from gradtap.capture.holdings import FSDP2, check_world, dense, hook_of, is_a, refuse_lost, spec_of
from gradtap.capture.names import named_params
from gradtap.capture.patches import PatchSet
from gradtap.capture.torch_checks import check_param
from gradtap.capture.touched import TouchTracker
from gradtap.capture.zero_checks import check_sparse
from gradtap.errors import UnsupportedError
from gradtap.types import Box, LocalGrad, Ownership

MOST_RUNS = 16384
"""Contiguous runs that one rank may hold: each is a chunk of its own, and a row of the summaries."""


class DTensorHolding:
    """A model whose parameters are DTensors. Raises `UnsupportedError` for placements that are no shard or replica."""

    replaces_grads = False

    def __init__(self, model: nn.Module, optimized: set[int], rank: int) -> None:
        self._modules = [module for module in model.modules() if is_a(module, FSDP2)]
        self._groups = list(_groups(self._modules))
        self._managed = {id(each.sharded_param): each for group in self._groups for each in group.fsdp_params}
        self.engine = "fsdp2" if self._modules else "dtensor"
        sharded = self._by_any()
        self.named = tuple(replace(e, param=sharded.get(id(e.param), e.param)) for e in named_params(model))
        check_sparse(model)
        self.params = tuple(spec_of(entry, tuple(entry.param.shape), optimized) for entry in self.named)
        self._layouts: dict[Any, Layout] = {}
        self._owned: dict[tuple[int, int], Ownership] = {}
        self._boxes: dict[int, Box | None] = {}
        self.ownership = tuple(self._owners(index, rank) for index in range(len(self.named)))
        self._check_runs()
        self.settings: Mapping[str, Any] = self._describe()

    def watch(self, patches: PatchSet, tracker: TouchTracker) -> None:
        """Hook the unsharded parameters, which exist from their first all-gather on, and what FSDP does not hold.

        A hook on the sharded ones would tell of reducing backwards only, and slow down the copy to a CPU.
        """
        waiting: dict[int, int] = {}
        for index in self._boxes:
            param = self.named[index].param
            if id(param) in self._managed:
                waiting[id(param)] = index
            else:
                patches.hook(hook_of(param, tracker.marker(index)))

        def arm(module: nn.Module, _: Any) -> None:
            for group in _groups([module]) if waiting else ():
                for each in group.fsdp_params:
                    whole = getattr(each, "_unsharded_param", None)
                    if whole is not None and id(each.sharded_param) in waiting:
                        patches.hook(hook_of(whole, tracker.marker(waiting.pop(id(each.sharded_param)))))

        for module in self._modules:
            arm(module, None)
            patches.hook(module.register_forward_pre_hook(arm))

    def clippers(self) -> Sequence[tuple[nn.Module, Sequence[nn.Parameter]]]:
        """None: FSDP2 is clipped by torch's function, or through Accelerate."""
        return ()

    def gradients(self, touched: Sequence[int]) -> list[LocalGrad]:
        """Views of the local parts, one for each contiguous run of the parameter."""
        self._check_reduced()
        found: list[LocalGrad] = []
        lost, left = 0, False
        for index, box in self._boxes.items():
            grad = self.named[index].param.grad
            lost += grad is None and touched[index] >= 0
            left |= grad is not None
            if box is not None:
                found.extend(self._pieces(index, box, None if grad is None else self._local(index, box, grad)))
        refuse_lost(lost, not left)
        return found

    def _pieces(self, index: int, box: Box, local: torch.Tensor | None) -> Iterator[LocalGrad]:
        starts, length = runs_of(box, self.params[index].shape)
        # In another memory layout it is copied to row-major order here.
        flat = None if local is None else local.detach().reshape(-1)
        for number, start in enumerate(starts.tolist()):
            part = None if flat is None else flat[number * length : (number + 1) * length]
            yield LocalGrad(param=index, start=start, stop=start + length, tensor=part)

    def _local(self, index: int, box: Box, grad: Any) -> torch.Tensor | None:
        spec, param = self.params[index], self.named[index].param
        placed, wanted = getattr(grad, "placements", None), getattr(param, "placements", None)
        if placed != wanted:
            raise UnsupportedError(
                f"the gradient of {spec.name} is placed as {placed}, its parameter as {wanted}: a partial sum is no "
                "gradient. Redistribute it to the parameter's placements before the step"
            )
        with torch.no_grad():
            local = dense(grad if placed is None else grad.to_local(), spec.name)
        held = tuple(stop - start for start, stop in box)
        if local is not None and tuple(local.shape) != held:
            raise UnsupportedError(
                f"this rank's part of the gradient of {spec.name} has shape {tuple(local.shape)}; at attach it was "
                f"{held}: close the recorder and attach again"
            )
        return local

    def _check_reduced(self) -> None:
        for group in self._groups:
            if group.reduce_grads and group.all_reduce_grads:
                continue
            for each in group.fsdp_params:
                if _unreduced(each) or not group.all_reduce_grads:
                    raise UnsupportedError(
                        f"the optimizer steps while the gradients of {group._module_fqn or 'the model'} are not "
                        "reduced: call set_requires_gradient_sync(True) and set_requires_all_reduce(True) before the "
                        "window's last backward"
                    )

    def _by_any(self) -> dict[int, nn.Parameter]:
        """The sharded parameter by the id of what a forward may have left in the module in its place."""
        return {
            id(there): each.sharded_param
            for each in self._managed.values()
            for attribute in ("_unsharded_param", "_sharded_post_forward_param")
            if (there := getattr(each, attribute, None)) is not None
        }

    def _owners(self, index: int, rank: int) -> Ownership | None:
        entry, spec = self.named[index], self.params[index]
        check_param(entry)
        if not spec.stored:
            return None
        param: Any = entry.param
        if not hasattr(param, "placements"):
            if torch.distributed.get_world_size() > 1:
                raise UnsupportedError(
                    f"parameter {spec.name} is a plain tensor in a model of sharded ones, so its gradient need not "
                    "agree between ranks: leave it out of ignored_params, or freeze it"
                )
            self._boxes[index] = tuple((0, extent) for extent in spec.shape)
            return Ownership(kind="whole", ranks=(rank,))
        layout, copies = self._layout(spec.shape, param.device_mesh, param.placements, spec.name)
        # Of replicas, each in its turn writes a parameter.
        key = (id(layout), len(self._boxes) % copies)
        if key not in self._owned:
            self._owned[key] = owners_of(spec.shape, layout, key[1])
        owned = self._owned[key]
        self._boxes[index] = box = layout.held.get(rank)
        local, empty = tuple(param._local_tensor.shape), param._local_tensor.numel() == 0
        if not (empty if box is None else local == tuple(stop - start for start, stop in box)):
            raise UnsupportedError(
                f"parameter {spec.name} placed as {tuple(param.placements)} should have the block {box} on this "
                f"rank, but has the shape {local}: this uneven split is not supported; make the axis divisible"
            )
        return owned

    def _layout(self, shape: tuple[int, ...], mesh: Any, placements: Any, name: str) -> tuple[Layout, int]:
        """The layout, and the number of replicas."""
        ranks = np.asarray(mesh.mesh.tolist(), np.int64)
        splits: tuple[Split, ...] = tuple(split_of(placement, name) for placement in placements)
        check_world(set(ranks.ravel().tolist()), name)
        copies = max(1, math.prod(n for n, split in zip(ranks.shape, splits, strict=True) if split.axis is None))
        key = (shape, ranks.tobytes(), ranks.shape, splits)
        if key not in self._layouts:
            self._layouts[key] = layout_of(shape, ranks, splits, name)
        return self._layouts[key], copies

    def _check_runs(self) -> None:
        runs = {i: len(runs_of(box, self.params[i].shape)[0]) for i, box in self._boxes.items() if box is not None}
        if sum(runs.values()) > MOST_RUNS:
            worst = max(runs, key=runs.__getitem__)
            raise UnsupportedError(
                f"this rank's blocks are {sum(runs.values())} separate runs of elements, {runs[worst]} of them in "
                f"{self.params[worst].name}; at most {MOST_RUNS} are supported: shard large weights on dimension 0"
            )

    def _describe(self) -> dict[str, Any]:
        meshes = {tuple(each.param.device_mesh.shape) for each in self.named if hasattr(each.param, "device_mesh")}
        placed = {str(tuple(each.param.placements)) for each in self.named if hasattr(each.param, "placements")}
        found: dict[str, Any] = {"mesh": [list(each) for each in sorted(meshes)], "placements": sorted(placed)}
        divided = [getattr(group, "gradient_divide_factor", None) for group in self._groups]
        if any(each is not None for each in divided):
            found["gradient_divide_factor"] = divided
        return found


def is_sharded(model: nn.Module) -> bool:
    """Whether the model has DTensor parameters or FSDP2 modules."""
    return any(is_a(module, FSDP2) for module in model.modules()) or any(
        hasattr(param, "placements") for param in model.parameters()
    )


def _groups(modules: Sequence[nn.Module]) -> Iterator[Any]:
    seen: set[int] = set()
    for module in modules:
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is not None and id(group) not in seen:
                seen.add(id(group))
                yield group


def _unreduced(each: Any) -> bool:
    whole = getattr(each, "_unsharded_param", None)
    return each.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)
