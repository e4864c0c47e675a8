"""FSDP1 (`FullyShardedDataParallel`): reads each parameter's range of the rank's shard of the flat gradient.

With `use_orig_params` the ranges are the parameters' own `grad`, else parts of `flat_param.grad`. Padding is left out:
where parameters lie in the flat one is FSDP's own account, for there is padding between them too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradtap.capture.holdings import FSDP1, check_world, dense, is_a, refuse_lost, spec_of
from gradtap.capture.names import NamedParam, walk_modules, wrapped_attribute
from gradtap.capture.patches import PatchSet
from gradtap.capture.torch_checks import check_param
from gradtap.capture.touched import TouchTracker
from gradtap.errors import UnsupportedError
from gradtap.types import LocalGrad, Ownership, ParamSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One parameter within a flat one: its number there, from element `offset` of the unsharded flat one."""

    unit: Any
    number: int
    offset: int

    @property
    def handle(self) -> Any:
        """FSDP's handle of the flat parameter."""
        return self.unit._handle

    @property
    def place(self) -> tuple[nn.Module, str]:
        """The module that has it, and its name there."""
        info = self.handle.flat_param._param_infos[self.number]
        return info.module, info.param_name

    @property
    def held(self) -> Any:
        """The object that the optimizer holds: the parameter's own, or the flat one."""
        flat = self.handle.flat_param
        return flat._params[self.number] if self.handle._use_orig_params else flat


class Fsdp1Holding:
    """A model wrapped in FSDP1. Raises `UnsupportedError` for groups of ranks, or a mode, whose map is not known."""

    engine = "fsdp1"
    replaces_grads = True

    def __init__(self, model: nn.Module, optimized: set[int], rank: int) -> None:
        self._rank = rank
        self._units: list[Any] = [module for module in model.modules() if is_a(module, FSDP1)]
        self._members: list[Member | None] = []
        named, specs = [], []
        for entry, member in _entries(model, self._units):
            shape = tuple(entry.param.shape) if member is None else _shape(member)
            named.append(entry)
            specs.append(spec_of(entry, shape, optimized))
            self._members.append(member)
            check_param(entry)
        self.named: tuple[NamedParam, ...] = tuple(named)
        self.params: tuple[ParamSpec, ...] = tuple(specs)
        self.ownership = tuple(self._owners(index) for index in range(len(self.named)))
        self.settings: Mapping[str, Any] = {
            "sharding_strategy": sorted({unit._handle._sharding_strategy.name for unit in self._units if unit._handle}),
            "use_orig_params": any(unit._handle._use_orig_params for unit in self._units if unit._handle),
        }

    def watch(self, patches: PatchSet, tracker: TouchTracker) -> None:
        """At each forward, hook the views of the flat parameter that the modules work with."""
        by_unit: dict[int, list[tuple[nn.Module, str, Any]]] = {}
        for index, member in enumerate(self._members):
            if member is not None and self.params[index].stored:
                by_unit.setdefault(id(member.unit), []).append((*member.place, tracker.marker(index)))
        for unit in self._units:
            views = by_unit.get(id(unit), [])

            def arm(*_: Any, views: list[tuple[nn.Module, str, Any]] = views) -> None:
                if not patches.active or not torch.is_grad_enabled():
                    return
                for module, name, mark in views:
                    view = getattr(module, name, None)
                    if isinstance(view, torch.Tensor) and view.requires_grad and not view.is_leaf:
                        view.register_hook(lambda _, mark=mark: mark(None) if patches.active else None)  # type: ignore[no-untyped-call]

            if views:
                patches.hook(_innermost(unit).register_forward_pre_hook(arm))

    def clippers(self) -> Sequence[tuple[nn.Module, Sequence[nn.Parameter]]]:
        """The outermost FSDP modules."""
        inner = {id(each) for unit in self._units for each in unit.modules() if each is not unit}
        return [(unit, list(unit.parameters())) for unit in self._units if id(unit) not in inner]

    def gradients(self, touched: Sequence[int]) -> list[LocalGrad]:
        """Views of this rank's ranges; nothing of a parameter that lies on other ranks."""
        found: list[LocalGrad] = []
        lost, left = 0, False
        for index, member in enumerate(self._members):
            if not self.params[index].stored or member is None:
                continue
            info = member.handle.flat_param._shard_param_infos[member.number]
            if not info.in_shard:
                continue
            start = info.intra_param_start_idx
            values = self._values(index, member, info)
            lost += values is None and touched[index] >= 0
            left |= values is not None
            found.append(LocalGrad(param=index, start=start, stop=start + info.numel_in_shard, tensor=values))
        refuse_lost(lost, not left)
        return found

    def _values(self, index: int, member: Member, info: Any) -> torch.Tensor | None:
        grad = dense(member.held.grad, self.params[index].name)
        if grad is None:
            return None
        flat, handle = grad.detach().reshape(-1), member.handle
        own = handle._use_orig_params
        if flat.numel() != (info.numel_in_shard if own else handle.flat_param._sharded_size.numel()):
            raise UnsupportedError(
                f"the gradient of {self.params[index].name} is not reduced at the optimizer's step: run the last "
                "backward of the window outside no_sync()"
            )
        return flat if own else flat[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]

    def _owners(self, index: int) -> Ownership | None:
        spec, member = self.params[index], self._members[index]
        if not spec.stored:
            return None
        if member is None:
            if dist.get_world_size() > 1:
                raise UnsupportedError(
                    f"parameter {spec.name} is left out by FSDP (ignored_modules or ignored_states), so its gradient "
                    "need not agree between ranks: let FSDP hold it, or freeze it"
                )
            raise UnsupportedError(f"parameter {spec.name} is left out by FSDP: let FSDP hold it, or freeze it")
        _check_mode(member, spec.name)
        return self._of_groups(_groups(member.unit, spec.name), member, spec)

    def _of_groups(self, groups: list[list[int]], member: Member, spec: ParamSpec) -> Ownership:
        check_world({rank for group in groups for rank in group}, spec.name)
        handle = member.handle
        if not handle.uses_sharded_strategy:
            ranks = tuple(sorted(rank for group in groups for rank in group))
            return Ownership(kind="replicated", ranks=ranks)
        size = handle.flat_param._sharded_size.numel()
        # Of replicas one writes, by turns, so that their loads are about equal.
        ranks = tuple(groups[member.number % len(groups)])
        # Of many ranks few hold some of it: those from `first` to before `after`.
        first, after = member.offset // size, -(-(member.offset + spec.numel) // size)
        cuts = tuple(max(at * size - member.offset, 0) for at in range(first, after))
        owned = Ownership(kind="cuts", ranks=ranks[first:after], bounds=(*cuts, spec.numel))
        info = handle.flat_param._shard_param_infos[member.number]
        told = (info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else (0, 0)
        at = next(group.index(self._rank) for group in groups if self._rank in group)
        ours = owned.bounds[at - first : at - first + 2] if first <= at < after else (0, 0)
        if ours != told and (info.in_shard or ours[0] != ours[1]):
            raise UnsupportedError(
                f"this rank should hold elements {ours[0]} to {ours[1]} of {spec.name}, but FSDP says {told[0]} to "
                f"{told[1]}: this version of torch lays out its flat parameters in a way that is not known"
            )
        return owned


def _entries(model: nn.Module, units: Sequence[Any]) -> Iterator[tuple[NamedParam, Member | None]]:
    """Every parameter of the model in model order, with its place in a flat one; None for one that FSDP leaves out."""
    members: dict[tuple[int, str], Member] = {}
    here: dict[int, list[str]] = {}
    for unit in units:
        for member in _members_of(unit):
            module, name = member.place
            members[id(module), name] = member
            here.setdefault(id(module), []).append(name)
        for shared in () if unit._handle is None else unit._handle.flat_param._shared_param_infos:
            members[id(shared.module), shared.param_name] = members[id(shared.prim_module), shared.prim_param_name]
            here.setdefault(id(shared.module), []).append(shared.param_name)
    names: dict[int, list[str]] = {}
    order: dict[int, tuple[Any, Member | None]] = {}
    for prefix, module in walk_modules(model):
        own = {name: param for name, param in module._parameters.items() if param is not None}
        for name in dict.fromkeys([*here.get(id(module), []), *own]):
            found = members.get((id(module), name))
            if found is None and hasattr(own.get(name), "_param_infos"):
                continue
            key = id(own[name]) if found is None else id(found)
            order.setdefault(key, (own[name] if found is None else found.held, found))
            names.setdefault(key, []).append(prefix + name)
    for key, (param, place) in order.items():
        first, *aliases = names[key]
        yield NamedParam(name=first, aliases=tuple(dict.fromkeys(aliases)), param=param), place


def _members_of(unit: Any) -> Iterator[Member]:
    if unit._handle is None:
        return
    flat: Any = unit._handle.flat_param
    ends = list(itertools.accumulate(flat._numels_with_padding))
    parts = zip(ends, flat._numels_with_padding, flat._is_padding_mask, strict=True)
    offsets = [end - numel for end, numel, padding in parts if not padding]
    for number, offset in enumerate(offsets):
        yield Member(unit=unit, number=number, offset=offset)


def _shape(member: Member) -> tuple[int, ...]:
    return tuple(member.handle.flat_param._shapes[member.number])


def _innermost(unit: Any) -> nn.Module:
    """The module that works with the views: below checkpointing, which runs it again within backward."""
    inner: Any = unit._fsdp_wrapped_module
    while wrapped_attribute(inner) == "_checkpoint_wrapped_module":
        inner = inner._checkpoint_wrapped_module
    return inner  # type: ignore[no-any-return]


def _groups(unit: Any, name: str) -> list[list[int]]:
    """The groups of ranks that each hold the whole flat parameter, sharded; one but for hybrid sharding."""
    own = list(dist.get_process_group_ranks(unit._handle.process_group))
    between: Any = getattr(unit, "_inter_node_pg", None)
    if between is None:
        return [own]
    across = list(dist.get_process_group_ranks(between))
    size, world = len(own), len(own) * len(across)
    node, at = own[0] // size, across[0]
    # Other groups are known only where they follow from this rank's own two.
    if own != list(range(node * size, (node + 1) * size)) or across != list(range(at, world, size)):
        raise UnsupportedError(
            f"parameter {name} is sharded within ranks {own[:8]} and replicated over {across[:8]}; hybrid sharding is "
            "supported where each group is of neighbouring ranks, as a device mesh makes them"
        )
    return [list(range(first, first + size)) for first in range(0, world, size)]


def _check_mode(member: Member, name: str) -> None:
    handle = member.handle
    if handle._keep_low_precision_grads:
        raise UnsupportedError(
            f"keep_low_precision_grads changes the dtype of the gradient of {name} between steps; set it to False"
        )
    if any(each is not None for each in handle.flat_param._param_extensions):
        raise UnsupportedError(
            f"parameter {name} is a DTensor within FSDP1, whose local part is not the parameter's: use fully_shard"
        )
