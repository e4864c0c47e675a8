"""Trains the tiny model under FSDP1, FSDP2, HSDP or tensor parallel with gradtap attached, beside a spy.

The spy runs after gradtap has captured and before the optimizer moves, and asks for whole gradients with collectives,
as gradtap never does: `full_tensor`, or a gather of FSDP1's flat shards.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gradtap
from tests.support.collectives import Counter, count_collectives
from tests.support.sharded_refusals import refusal
from tests.support.tiny_model import TinyModel, batch, reference, uses_side

STEPS = 3
CPU = torch.device("cpu")


def run(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Every cell of `args["cells"]` in one process group; facts by cell, arrays in `folder/<name>.npz`."""
    torch.set_num_threads(1)
    counter = count_collectives()
    dist.init_process_group("gloo")
    found = {cell["name"]: _run_cell(cell, folder, counter) for cell in args["cells"]}
    found["refusals"] = {name: refusal(name, folder) for name in args.get("refuse", [])}
    dist.barrier()
    dist.destroy_process_group()
    return found


class Wide(nn.Module):
    """A model of even sizes for tensor parallel: two layers that can be split by column and row, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 13, bias=False)

    def forward(self, tokens: torch.Tensor, side: bool = True) -> torch.Tensor:
        """Mean cross-entropy."""
        x = self.embed(tokens)
        y = self.norm(x + self.down(torch.tanh(self.up(x))))
        return nn.functional.cross_entropy(self.out(y).reshape(-1, 13), tokens.roll(1, 1).reshape(-1))


class Sharded:
    """A model under one engine, in a loop as a user would write it."""

    def __init__(self, cell: dict[str, Any]) -> None:
        self.cell = cell
        wide = cell["engine"] in ("tp", "fsdp2-tp")
        self.plain = Wide() if wide else TinyModel()
        if cell.get("checkpointing"):
            _checkpoint(self.plain, cell["checkpointing"])
        self.micros = cell.get("accumulation", 1)
        self.data_ranks = dist.get_world_size()
        self.accelerator: Any = None
        getattr(self, "_" + cell["engine"].replace("-", "_"))(self.plain)
        if self.accelerator is None:
            kind = torch.optim.SGD if cell.get("optimizer") == "sgd" else torch.optim.AdamW
            trained = [param for param in self.model.parameters() if param.requires_grad]
            self.inner = self.optimizer = kind(trained, lr=1e-3)
            self.target: Any = (self.model, self.optimizer)

    def _fsdp2(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import Shard

        cell, world = self.cell, dist.get_world_size()
        sizes = (2, world // 2) if cell.get("hsdp") else (world,)
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "shard")[: len(sizes)])}
        if cell.get("mixed"):
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if cell.get("offload"):
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if cell.get("columns"):
            options["shard_placement_fn"] = lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % world == 0 else Shard(0)
        fully_shard(model.module, **options)  # type: ignore[arg-type]
        self.model: Any = fully_shard(model, **options)

    def _tp(self, model: nn.Module) -> None:
        self.model = _parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
        self.data_ranks = 1

    def _fsdp2_tp(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
        self.model = fully_shard(_parallel(model, mesh["tp"]), mesh=mesh["dp"])
        self.data_ranks = 2

    def _fsdp1(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        cell = self.cell
        options: dict[str, Any] = {"device_id": CPU, "use_orig_params": cell.get("orig", False)}
        if cell.get("strategy"):
            options["sharding_strategy"] = ShardingStrategy[cell["strategy"]]
        if cell.get("hsdp"):
            options["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        if cell.get("mixed"):
            options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if cell.get("offload"):
            options["cpu_offload"] = CPUOffload(offload_params=True)
        model.frozen = FSDP(model.frozen, **options)  # type: ignore[arg-type]
        model.module = FSDP(model.module, **options)  # type: ignore[arg-type]
        self.model = FSDP(model, **options)

    def _acc_fsdp1(self, model: nn.Module) -> None:
        self._accelerated(model, 1)

    def _acc_fsdp2(self, model: nn.Module) -> None:
        self._accelerated(model, 2)

    def _accelerated(self, model: nn.Module, version: int) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState, GradientState, PartialState
        from accelerate.utils import DistributedType

        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        GradientState._reset_state()
        # Accelerate takes its plugin on accelerators only: the processes are made as on a CPU, and called otherwise.
        PartialState(cpu=True, backend="gloo")
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        orig = {"use_orig_params": True} if version == 1 else {}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, cpu_ram_efficient_loading=False, **orig)
        self.accelerator = Accelerator(
            fsdp_plugin=plugin,
            mixed_precision="no",
            gradient_accumulation_steps=self.micros,
        )
        self.accelerator.state.device = CPU
        trained = [param for param in model.parameters() if param.requires_grad]
        self.inner = torch.optim.AdamW(trained, lr=1e-3)
        self.model, self.optimizer = self.accelerator.prepare(model, self.inner)
        while hasattr(self.inner, "optimizer"):
            self.inner = self.inner.optimizer
        self.target = self.accelerator

    def window(self, step: int) -> None:
        """One optimizer window."""
        rank = self.data_rank
        for micro in range(self.micros):
            tokens, side = batch(step, micro, rank), uses_side(step, micro, self.cell.get("side", "always"))
            if self.accelerator is not None:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.model(tokens, side=side))
                    if self.cell.get("clip") and self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), self.cell["clip"])
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                continue
            with self._sync(micro == self.micros - 1):
                (self.model(tokens, side=side) / self.micros).backward()
        if self.accelerator is None:
            if self.cell.get("clip"):
                self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def data_rank(self) -> int:
        """Which data this rank trains on: one for all ranks of a tensor-parallel group."""
        return {"tp": 0, "fsdp2-tp": dist.get_rank() // 2}.get(self.cell["engine"], dist.get_rank())

    def _sync(self, last: bool) -> Any:
        if self.cell.get("no_sync"):
            if self.cell["engine"] == "fsdp2":
                self.model.set_requires_gradient_sync(last)
            elif not last:
                return self.model.no_sync()
        return contextlib.nullcontext()

    def _clip(self) -> None:
        if self.cell["engine"] == "fsdp1":
            self.model.clip_grad_norm_(self.cell["clip"])
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cell["clip"])

    def whole_params(self) -> dict[str, torch.Tensor]:
        """Parameters as one process would have them, gathered."""
        return _gather(self.model, lambda param: param)

    def whole_grads(self) -> dict[str, torch.Tensor]:
        """Gradients gathered the engine's way; zeros where there are none."""
        return _gather(self.model, lambda param: param.grad)

    def wanted(self, step: int) -> dict[str, torch.Tensor]:
        """The gradient of the window by one process in float64, from the gathered parameters."""
        params = {name: value.double() for name, value in self.whole_params().items()}
        side = self.cell.get("side", "always")
        if not isinstance(self.plain, Wide):
            model = TinyModel()
            model.load_state_dict({**params, "head.weight": params["embed.weight"]})
            return reference(model, step, self.micros, self.data_ranks, side)
        wide = Wide().double()
        wide.load_state_dict(params)
        for micro in range(self.micros):
            for rank in range(self.data_ranks):
                (wide(batch(step, micro, rank)) / (self.micros * self.data_ranks)).backward()
        return {name: param.grad for name, param in wide.named_parameters() if param.grad is not None}

    def marks(self) -> dict[str, int]:
        """Everything on which an attachment could leave a trace."""
        params = [param for group in self.inner.param_groups for param in group["params"]]
        modules = list(self.model.modules())
        return {
            "param hooks": sum(len(param._post_accumulate_grad_hooks or ()) for param in params),
            "unsharded hooks": sum(len(p._post_accumulate_grad_hooks or ()) for p in _unsharded(modules)),
            "forward hooks": sum(len(module._forward_pre_hooks) for module in modules),
            "patched": sum("clip_grad_norm_" in vars(module) for module in modules) + ("zero_grad" in vars(self.inner)),
            "steps": len(self.inner._optimizer_step_pre_hooks) + len(self.inner._optimizer_step_post_hooks),
            "accelerator": 0 if self.accelerator is None else sum(map(callable, vars(self.accelerator).values())),
        }


def _run_cell(cell: dict[str, Any], folder: Path, counter: Counter) -> dict[str, Any]:
    training = Sharded(cell)
    if cell.get("late"):
        training.window(1)
        with torch.no_grad():
            # FSDP2 leaves the root gathered after a forward.
            training.model(batch(1, 0, training.data_rank))
    before = training.marks()
    arrays: dict[str, Any] = {}
    with counter.watch():
        tap = gradtap.attach(training.target, folder / f"{cell['name']}.gradtap")
    first = 2 if cell.get("late") else 1
    source, during = tap._source, training.marks()
    original = tap.before_step

    def before_step() -> None:
        with counter.watch():
            original()
        for name, value in training.whole_grads().items():
            arrays[f"engine/{tap._step}/{name}"] = value.double().numpy().copy()

    source._listener = type("Listener", (), {"before_step": staticmethod(before_step), "after_step": tap.after_step})
    numbers = range(first, first + STEPS)
    for step in numbers:
        found = training.wanted(step)
        arrays.update({f"reference/{step}/{name}": grad.numpy() for name, grad in found.items()})
        training.window(step)
    names = [param.name for param in source.params]
    with counter.watch():
        tap.close()
    if dist.get_rank() == 0:
        np.savez(folder / f"{cell['name']}.npz", **arrays)
    dist.barrier()
    owners = {
        spec.name: [owned.kind, list(owned.ranks)]
        for spec, owned in zip(source.params, source.ownership, strict=True)
        if owned is not None
    }
    return {
        "names": names,
        "engine": source.facts.name,
        "settings": dict(source.facts.settings),
        "owners": owners,
        "marks": [before, training.marks()],
        "during": during,
        "collectives": list(counter.seen),
        "steps": list(numbers),
    }


def _checkpoint(model: Any, kind: str) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    impl = CheckpointImpl.REENTRANT if kind == "reentrant" else CheckpointImpl.NO_REENTRANT
    model.module = checkpoint_wrapper(model.module, checkpoint_impl=impl)


def _parallel(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (model.embed, model.norm, model.out):

        def spread(name: str, module: nn.Module, mesh: Any) -> None:
            for key, param in list(module.named_parameters(recurse=False)):
                module.register_parameter(key, nn.Parameter(distribute_tensor(param.data, mesh, [Replicate()])))

        def enter(module: nn.Module, inputs: Any, mesh: Any) -> Any:
            from torch.distributed.tensor import DTensor

            return tuple(x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()]) for x in inputs)

        def leave(module: nn.Module, output: Any, mesh: Any) -> Any:
            return output.to_local()

        distribute_module(module, mesh, spread, enter, leave)  # type: ignore[arg-type]
    return model


def _gather(model: nn.Module, of: Any) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    from gradtap.capture.names import named_params

    if isinstance(model, FSDP):
        return _gather_flat(model, of)
    found = {}
    for entry in named_params(model):
        param: Any = entry.param
        value = of(param)
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        found[entry.name] = (torch.zeros(param.shape) if value is None else value).detach()
    return found


def _gather_flat(model: Any, of: Any) -> dict[str, torch.Tensor]:
    """The shards of each flat parameter, gathered, and cut by FSDP's own function."""
    from gradtap.capture.names import walk_modules

    found: dict[str, torch.Tensor] = {}
    for prefix, module in walk_modules(model):
        handle = getattr(module, "_handle", None) if hasattr(module, "_fsdp_wrapped_module") else None
        if handle is None:
            continue
        flat = handle.flat_param
        own = of(flat)
        own = torch.zeros(flat._sharded_size, dtype=flat.dtype) if own is None else own.detach()
        whole = own
        if handle.uses_sharded_strategy:
            parts = [torch.empty_like(own) for _ in range(handle.world_size)]
            dist.all_gather(parts, own, group=handle.process_group)
            whole = torch.cat(parts)[: flat._unpadded_unsharded_size.numel()]
        for name, view in zip(flat._fqns, handle._get_unflat_views(whole), strict=True):
            found[prefix + name.replace("_checkpoint_wrapped_module.", "")] = view.detach().clone()
    return found


def _unsharded(modules: list[nn.Module]) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    groups = [m._get_fsdp_state()._fsdp_param_group for m in modules if isinstance(m, FSDPModule)]
    found = [each for group in groups if group is not None for each in group.fsdp_params]
    return [each._unsharded_param for each in found if hasattr(each, "_unsharded_param")]
