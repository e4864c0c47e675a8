"""Lightning on the tiny model, with gradtap's callback and a spy: plain, accumulated, clipped, by hand, DeepSpeed.

The spy keeps `param.grad` at the end of each backward, before Lightning clips (or DeepSpeed's `safe_get_full_grad` at
the engine's boundary), and computes the window's mean gradient in float64.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist

import gradtap
import gradtap.lightning
from tests.support import deepspeed_cpu
from tests.support.tiny_model import TinyModel, batch

MICROS = 7
"""Micro-batches of an epoch on each rank."""


def run_cells(args: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Train each cell of `args["cells"]`: its facts; arrays in `folder/<name>.npz`."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    if args.get("alone"):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    ranked, told = dict(os.environ), []
    for cell in args["cells"]:
        # Lightning takes the ranks' variables away when a training has ended.
        os.environ.update(ranked)
        told.append(_run_cell(cell, folder))
    return told


class Module(pl.LightningModule):
    """The tiny model as a LightningModule; with `hand`, it optimizes by itself, two micro-batches a step."""

    def __init__(self, cell: dict[str, Any], arrays: dict[str, Any]) -> None:
        super().__init__()
        self.tiny = TinyModel()
        self.cell, self.arrays = cell, arrays
        self.automatic_optimization = not cell.get("hand")
        self.window: list[torch.Tensor] = []
        self.updates = cell.get("after", 0)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.tiny.parameters() if p.requires_grad]
        kind = torch.optim.SGD if self.cell.get("sgd") else torch.optim.AdamW
        made = [kind(trained, lr=1e-3)]
        if self.cell.get("optimizers") == 2:
            made = [kind(trained[:2], lr=1e-3), kind(trained[2:], lr=1e-3)]
        return made

    def training_step(self, tokens: torch.Tensor, index: int) -> Any:
        if not self.window:
            # In a list, so that it is no child of the module.
            self.before = [copy.deepcopy(self.tiny).double()]
        self.window.append(tokens.clone())
        loss = self.tiny(tokens)
        if self.cell.get("fail") == self.updates:
            raise ZeroDivisionError("the training's own failure")
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / 2)
        if index % 2:
            for optimizer in self.optimizers() if self.cell.get("optimizers") else [self.optimizers()]:
                optimizer.step()
                optimizer.zero_grad()
        return None

    def at_boundary(self, held: dict[str, Any]) -> None:
        """Keep what the engine holds, and the reference."""
        self.updates += 1
        _keep(self.arrays, "engine", self.updates, held)
        _keep(self.arrays, "reference", self.updates, _reference(self.before[0], self.window))
        self.window.clear()


class Spy(pl.Callback):
    """Looks at the same moment as gradtap, first."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        engine = getattr(trainer.strategy, "deepspeed_engine", None)
        if engine is None:
            return
        original = engine._take_model_step

        def look(*args: Any, **kwargs: Any) -> Any:
            from deepspeed.utils import safe_get_full_grad

            trained = [(n, p) for n, p in pl_module.named_parameters() if p.requires_grad]
            pl_module.at_boundary({name: safe_get_full_grad(param) for name, param in trained})
            return original(*args, **kwargs)

        engine._take_model_step = look

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if getattr(trainer.strategy, "deepspeed_engine", None) is None and pl_module.window:
            held = {name: p.grad for name, p in pl_module.named_parameters() if p.requires_grad}
            pl_module.at_boundary(held)


def strategy(config: dict[str, Any], accumulation: int) -> Any:
    """DeepSpeedStrategy, which allows GPUs only, on this CPU."""
    from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy

    class OnCpu(DeepSpeedStrategy):
        def setup_environment(self) -> None:
            # Past DeepSpeedStrategy's own, which asks for CUDA.
            DDPStrategy.setup_environment(self)

        def _init_deepspeed_distributed(self) -> None:
            self._process_group_backend = "gloo"
            self._set_node_environment_variables()
            deepspeed_cpu.init_group(deepspeed_cpu.prepare())

        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", 0)

        def setup_distributed(self) -> None:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    kept = {name: value for name, value in config.items() if name != "gradient_accumulation_steps"}
    return OnCpu(config=kept)


def _keep(arrays: dict[str, Any], kind: str, step: int, values: dict[str, Any]) -> None:
    kept = {f"{kind}/{step}/{name}": value.detach().numpy().copy() for name, value in values.items()}
    arrays.update(kept)


def _reference(model: Any, window: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    batches: list[Any] = [window]
    if dist.is_initialized():
        batches = [None] * dist.get_world_size()
        dist.all_gather_object(batches, window)
    flat = [tokens for rank in batches for tokens in rank]
    for tokens in flat:
        (model(tokens) / len(flat)).backward()
    return {f"tiny.{name}": param.grad for name, param in model.named_parameters() if param.grad is not None}


def _run_cell(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    world, arrays = int(os.environ.get("WORLD_SIZE", "1")), {}
    accumulation = cell.get("accumulation", 1)
    data = torch.cat([batch(1, micro, rank) for micro in range(MICROS) for rank in range(world)])
    loader = torch.utils.data.DataLoader(data, batch_size=4)  # type: ignore[arg-type,var-annotated]
    store = folder / f"{cell['name']}.gradtap"
    options = {"optimizer": cell["take"]} if "take" in cell else {}
    callback = gradtap.lightning.GradTapCallback(store, **options)
    callbacks: list[Any] = [Spy()] if cell["way"] == "attach" else [Spy(), callback]
    chosen: Any = "auto"
    if world > 1:
        chosen = "ddp"
    if cell.get("stage"):
        config = deepspeed_cpu.config(cell["stage"], clip=cell.get("clip", 0.0), offload=cell.get("offload", False))
        chosen = strategy(config, accumulation)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=chosen,
        callbacks=callbacks,
        max_epochs=cell.get("epochs", 2),
        accumulate_grad_batches=accumulation,
        gradient_clip_val=None if cell.get("stage") or cell.get("hand") else cell.get("clip"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    if cell["way"] == "attach":
        gradtap.attach(trainer, store)
    module = Module(cell, arrays)
    told = ""
    with contextlib.ExitStack() as stack:
        if "fail" in cell or cell.get("refused"):
            stack.enter_context(contextlib.suppress(ZeroDivisionError))
        try:
            trainer.fit(module, loader, ckpt_path=cell.get("resume") and str(folder / cell["resume"]))
        except gradtap.GradtapError as error:
            told = f"{type(error).__name__}: {error}"
    if cell.get("save"):
        trainer.save_checkpoint(folder / cell["save"])
    if int(os.environ.get("RANK", "0")) == 0:
        np.savez(folder / f"{cell['name']}.npz", **arrays)
    # DeepSpeed's own hooks stay with its engine.
    held = [hook for p in module.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values()]
    hooks = sum(str(getattr(hook, "__module__", "")).startswith("gradtap") for hook in held)
    return {
        "names": [name for name, p in module.named_parameters() if p.requires_grad],
        "open": callback.tap is not None,
        "hooks": hooks,
        "told": told,
        "global_step": trainer.global_step,
    }
