"""What a real optimizer is handed, spied on, is what `as_consumed` gives; the audit is silent on a sound loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradtap

ULPS = 2


@pytest.mark.parametrize("limit", [0.05, 1e6])
def test_the_inner_optimizer_gets_what_is_called_consumed(tmp_path: Path, limit: float) -> None:
    """Under Accelerate, clipped or not, every element is within 2 ulp of what the torch optimizer found."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(12, 7), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, inner, loader)
    handed: list[dict[str, Any]] = []
    with gradtap.attach(accelerator, tmp_path / "run.gradtap", first_step=1):
        # Registered after gradtap's own hook: at the step itself, when all clipping is over.
        spy = inner.register_step_pre_hook(
            lambda *_: handed.append({n: p.grad.numpy().copy() for n, p in model.named_parameters()})
        )
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), limit)
                optimizer.step()
                optimizer.zero_grad()
        spy.remove()
    with gradtap.open(tmp_path / "run.gradtap") as run:
        assert len(run.steps) == len(handed) == 3 and run.findings == ()
        for step, grads in zip(run.steps, handed, strict=True):
            for name, wanted in grads.items():
                found = run.grad(name, step, as_consumed=True)
                assert found.consumed is not None and (found.consumed[0] < 1) == (limit < 1)
                np.testing.assert_array_max_ulp(np.asarray(found), wanted, ULPS)
