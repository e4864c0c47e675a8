"""Refusals of DeepSpeed modes that a CPU cannot build: engine-shaped fakes. Real engines: tests/integration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradtap.capture.zero_checks import check_engine
from gradtap.errors import AttachError, UnsupportedError


class DeepSpeedZeroOptimizer:
    """What `check_engine` looks at."""

    def __init__(self, **changes: Any) -> None:
        self.dtype = torch.float32
        self.bit16_groups = [[torch.nn.Parameter(torch.ones(2))]]
        self.optimizer = torch.optim.SGD(self.bit16_groups[0], lr=0.1)
        for name, value in changes.items():
            setattr(self, name, value)


class Muon:
    pass


def _engine(optimizer: Any = None, **changes: Any) -> Any:
    made = {"optimizer": optimizer or DeepSpeedZeroOptimizer(), "_take_model_step": lambda kwargs: None}
    return SimpleNamespace(**(made | changes))


def test_the_plain_fake_is_accepted() -> None:
    """Without any of the changes below nothing is refused, so each refusal is due to its change."""
    check_engine(_engine())


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (_engine(zenflow=True), "ZenFlow is not supported.*remove zero_optimization.zenflow"),
        (_engine(pipeline_parallelism=True), "pipeline engine"),
        (_engine(is_deepcompile_enabled=lambda: True), "DeepCompile"),
        (_engine(has_moe_layers=True), "MoE layers"),
        (_engine(DeepSpeedZeroOptimizer(optimizer=Muon())), "Muon under DeepSpeed.*use another optimizer"),
        (_engine(DeepSpeedZeroOptimizer(sequence_parallel_size=2)), "sequence parallelism"),
        (_engine(DeepSpeedZeroOptimizer(model_parallel_world_size=2)), "model .tensor. parallelism"),
        (_engine(DeepSpeedZeroOptimizer(torch_autocast_gradscaler=object())), "torch_autocast in float16"),
        (
            _engine(DeepSpeedZeroOptimizer(bit16_groups=[[torch.nn.Parameter(torch.ones(2).half())]])),
            "mixes float32 and float16",
        ),
        (_engine(sparse_gradients_enabled=lambda: True), "sparse_gradients is not"),
        (_engine(enable_backward_allreduce=False), "does not reduce gradients"),
        (_engine(mp_world_size=2), "model .tensor. parallelism"),
        (_engine(torch_autocast_z0_gradscaler=object()), "torch_autocast in float16"),
        (_engine(type("ZenFlowZeroOptimizerParallel", (), {})()), "ZenFlow is not"),
        (_engine(type("OnebitAdam", (torch.optim.SGD,), {})([torch.ones(1)])), "OnebitAdam is not supported"),
        (_engine(type("SuperOffloadOptimizer_Stage3", (), {})()), "SuperOffload is not supported"),
        (_engine(type("Novel", (), {})()), "DeepSpeed's optimizer Novel"),
        (_engine(_take_model_step=None), "this DeepSpeed version"),
    ],
)
def test_a_mode_without_a_true_gradient_is_refused(engine: Any, words: str) -> None:
    """Each such mode raises `UnsupportedError` that names it, what is supported, and what to do."""
    with pytest.raises(UnsupportedError, match=words) as raised:
        check_engine(engine)
    assert "supported with DeepSpeed are ZeRO stages 0 to 3" in str(raised.value)


def test_an_engine_without_optimizer_has_nothing_to_record() -> None:
    """An inference engine raises `AttachError` that says so."""
    with pytest.raises(AttachError, match="has no optimizer"):
        check_engine(SimpleNamespace(optimizer=None))
