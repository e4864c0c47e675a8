"""HF Trainer on a tiny Llama made from a configuration, with gradtap's callback and a spy beside it.

The spy sees each window's micro-batches, computes the window's token-weighted mean gradient in float64 by one process,
and asks for the full gradients itself: `param.grad` before the Trainer clips, or DeepSpeed's `safe_get_full_grad`.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.utils.data import SequentialSampler

import gradtap
import gradtap.hf
from tests.support import deepspeed_cpu

STEPS = 8
ROWS = 7
"""Micro-batches of an epoch on each rank; two make a window, so the last one is short."""


def run_cells(args: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Train each cell of `args["cells"]` in the process group that the Trainer itself makes, or in none."""
    if args.get("alone"):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    if any(cell.get("stage") for cell in args["cells"]):
        deepspeed_cpu.init_group(deepspeed_cpu.prepare())
    return [_run_cell(cell, folder) for cell in args["cells"]]


def make_model() -> Any:
    """A Llama of one layer and odd sizes, in float32, the same everywhere."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=29, hidden_size=12, intermediate_size=17, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of which a different number of tokens counts for the loss."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for index in range(count):
        tokens = torch.randint(29, (6,), generator=generator)
        labels = tokens.clone()
        labels[: index % 4] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


class Spied(transformers.Trainer):  # type: ignore[misc]
    """A Trainer that keeps what it trains on, and the gradients before it clips them."""

    arrays: dict[str, Any]

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        window = self.__dict__.setdefault("window", [])
        if not window:
            self.before = copy.deepcopy(self.model).double()
        window.append({name: value.clone() for name, value in inputs.items()})
        if self.accelerator.sync_gradients:
            step = self.state.global_step + 1
            _keep(self.arrays, "reference", step, _reference(self.before, window))
            window.clear()
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self.accelerator.sync_gradients and not self.is_deepspeed_enabled:
            held = {name: p.grad for name, p in self.accelerator.unwrap_model(model).named_parameters()}
            _keep(self.arrays, "engine", self.state.global_step + 1, held)
        return loss


class EngineSpy(transformers.TrainerCallback):  # type: ignore[misc]
    """Asks DeepSpeed for whole gradients at its own boundary; there before gradtap is."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays, self.trainer = arrays, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine = self.trainer.accelerator.deepspeed_engine_wrapped.engine
        original = engine._take_model_step

        def look(*args: Any, **kwargs: Any) -> Any:
            from deepspeed.utils import safe_get_full_grad

            held = {name: safe_get_full_grad(param) for name, param in engine.module.named_parameters()}
            _keep(self.arrays, "engine", engine.global_steps + 1, held)
            return original(*args, **kwargs)

        engine._take_model_step = look


def _keep(arrays: dict[str, Any], kind: str, step: int, values: dict[str, Any]) -> None:
    arrays.update({f"{kind}/{step}/{name}": value.detach().numpy().copy() for name, value in values.items()})


def _reference(model: Any, window: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batches: list[Any] = [window]
    if dist.is_initialized():
        batches = [None] * dist.get_world_size()
        dist.all_gather_object(batches, window)
    flat = [batch for rank in batches for batch in rank]
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in flat)
    model.zero_grad()
    for batch in flat:
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 29), labels.reshape(-1), reduction="sum")
        (loss / tokens).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def _run_cell(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    config = None
    if cell.get("stage"):
        config = deepspeed_cpu.config(cell["stage"], accumulation=2, clip=0.05, micro_batch=2)
    args = transformers.TrainingArguments(
        output_dir=str(folder / cell["name"]),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.05,
        max_steps=cell.get("steps", STEPS),
        learning_rate=1e-2,
        optim=cell.get("optim", "adamw_torch"),
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="steps" if cell.get("save") else "no",
        save_steps=cell.get("save", 500),
        deepspeed=config,
        ddp_backend="gloo" if world > 1 and config is None else None,
        dataloader_pin_memory=False,
    )
    arrays: dict[str, Any] = {}
    store = folder / f"{cell['name']}.gradtap"
    spy = EngineSpy(arrays) if config else None
    callbacks = [spy] if spy else []
    if cell["way"] == "callback":
        callbacks.append(callback := gradtap.hf.GradTapCallback(store))
    trainer = Spied(model=make_model(), args=args, train_dataset=rows(ROWS * 2 * world), callbacks=callbacks)
    trainer.arrays = arrays
    if spy:
        spy.trainer = trainer
    tap = None if cell["way"] == "callback" else gradtap.attach(trainer, store)
    trainer.train(resume_from_checkpoint=cell.get("resume") and str(folder / cell["resume"]))
    open_after = callback.tap if cell["way"] == "callback" else tap.tap
    if int(os.environ.get("RANK", "0")) == 0:
        np.savez(folder / f"{cell['name']}.npz", **arrays)
    from accelerate import Accelerator

    return {
        "names": [name for name, _ in make_model().named_parameters()],
        "open": open_after is not None,
        "patched": Accelerator.prepare.__module__ != "accelerate.accelerator"
        or hasattr(Accelerator.prepare, "__wrapped__"),
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
    }
