"""Sharded models that gradtap must refuse, each made as a user might. Every rank of the group calls `refusal`."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gradtap
from gradtap.errors import AttachError, CaptureError


def refusal(name: str, folder: Path) -> str:
    """What attaching to, or stepping, the pair of that name raises; `accepted` where nothing."""
    pair = _REFUSED[name]()
    try:
        if name.startswith("not reduced"):
            with gradtap.attach(pair, folder / f"{name}.gradtap", on_error="raise") as tap:
                _step_unreduced(*pair)
                tap.close()
            return "accepted"
        gradtap.attach(pair, folder / f"refused-{name}.gradtap").close()
    except (AttachError, CaptureError) as error:
        cause = error.__cause__ if isinstance(error, CaptureError) else None
        return f"{type(cause or error).__name__}: {error}"
    return "accepted"


def _step_unreduced(model: Any, optimizer: Any) -> None:
    if hasattr(model.weight, "placements") and not hasattr(model, "unshard"):
        from torch.distributed.tensor import DTensor, Partial

        # As where a layer that all ranks hold works on a part of the sequence.
        model.weight.grad = DTensor.from_local(torch.ones(4, 4), model.weight.device_mesh, [Partial()])
        optimizer.step()
        return
    with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
        model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def _unreduced() -> Any:
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.set_requires_gradient_sync(False)
    return _pair(model)


def _many_runs() -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return _pair(fully_shard(nn.Linear(2, 20_000, bias=False), mesh=mesh, shard_placement_fn=lambda _: Shard(1)))


def _replicated() -> Any:
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = nn.Linear(4, 4, bias=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [Replicate()]))
    return _pair(model)


def _unreduced1() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    return _pair(FSDP(nn.Linear(4, 4), device_id=torch.device("cpu")))


def _pair(model: nn.Module) -> tuple[nn.Module, Any]:
    return model, torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)


def _partial() -> Any:
    from torch.distributed.tensor import DTensor, Partial

    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.weight = nn.Parameter(DTensor.from_local(model.weight.data, mesh, [Partial()]))
    return _pair(model)


def _ignored() -> Any:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return _pair(fully_shard(model, mesh=mesh, ignored_params={model.bias}))


def _part_of_the_world() -> Any:
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate

    mesh = DeviceMesh("cpu", [dist.get_rank()], _init_backend=False)
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(model.weight.data, mesh, [Replicate()], run_check=False))
    return _pair(model)


def _strided() -> Any:
    """Rows of which a rank holds some that are not together: 5 rows, split by two mesh axes."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2))
    model = nn.Linear(3, 5, bias=False)
    local = torch.zeros(math.ceil(5 / 4), 3)
    placed = [_StridedShard(0, split_factor=2), Shard(0)]
    size = {"shape": torch.Size((5, 3)), "stride": (3, 1)}
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, placed, run_check=False, **size))
    return _pair(model)


def _ignored1() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return _pair(
        FSDP(model, device_id=torch.device("cpu"), use_orig_params=True, ignored_states=list(model[1].parameters()))
    )


_REFUSED = {
    "partial": _partial,
    "ignored by FSDP2": _ignored,
    "ignored by FSDP1": _ignored1,
    "part of the world": _part_of_the_world,
    "strided": _strided,
    "not reduced": _unreduced,
    "many runs": _many_runs,
    "not reduced: partial gradient": _replicated,
    "not reduced FSDP1": _unreduced1,
}
