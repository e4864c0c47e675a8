"""Two experts in a leaf module under ZeRO-3, one used in each window: DeepSpeed fills in zeros for the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradtap
from tests.support import deepspeed_cpu

STEPS = 3


class Experts(nn.Module):
    """Uses the expert that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        """The chosen expert's output; `x` is (batch, 5)."""
        chosen: torch.Tensor = self.experts[which](x)
        return chosen


class Mixture(nn.Module):
    """A layer before the experts, so that the leaf module's input asks for a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.leaf = nn.Linear(5, 5), Experts()

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        """A loss."""
        found: torch.Tensor = self.leaf(self.first(x), which).square().mean()
        return found


def run(args: dict[str, Any], folder: Path) -> None:
    """Train with a recorder; step n uses expert n % 2."""
    deepspeed = deepspeed_cpu.prepare()
    deepspeed_cpu.init_group(deepspeed)
    from deepspeed.utils import set_z3_leaf_modules

    model = Mixture()
    set_z3_leaf_modules(model, [Experts])
    config = deepspeed_cpu.config(3, zero={"stage3_param_persistence_threshold": 0})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    with gradtap.attach(engine, folder / "run.gradtap"):
        for step in range(1, STEPS + 1):
            torch.manual_seed(10 * step + torch.distributed.get_rank())
            engine.backward(engine(torch.randn(4, 5), step % 2))
            engine.step()
    torch.distributed.barrier()
