from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gradtap.demo.check import compare, reference, relative_error
from gradtap.demo.data import batch
from gradtap.demo.model import ByteTransformer
from gradtap.demo.options import ACCUMULATION, TOLERANCE, Options

WANTED = {"a": np.array([3.0, 4.0]), "b": np.ones((2, 2))}


def test_equal_gradients_hold_and_the_largest_error_is_named() -> None:
    """Errors within the tolerance hold, and the parameter that is furthest off is named with its error."""
    stored = {"a": WANTED["a"] * (1 + TOLERANCE / 2), "b": WANTED["b"]}
    result = compare(stored, WANTED, 3)
    assert result["held"]
    assert result["largest_name"] == "a"
    assert result["largest_error"] == pytest.approx(TOLERANCE / 2)


@pytest.mark.parametrize(
    "stored",
    [
        {"a": WANTED["a"] * (1 + 2 * TOLERANCE), "b": WANTED["b"]},
        {"a": WANTED["a"] * 0.5, "b": WANTED["b"]},
        {"a": np.array([3.0, np.nan]), "b": WANTED["b"]},
        {"a": WANTED["a"][:1], "b": WANTED["b"]},
        {"a": WANTED["a"]},
        {"a": WANTED["a"], "b": WANTED["b"], "c": WANTED["a"]},
        {},
    ],
)
def test_whatever_differs_does_not_hold(stored: dict[str, np.ndarray]) -> None:
    """A wrong value, a NaN, another shape, a missing or an unexpected parameter: none of them passes."""
    assert not compare(stored, WANTED, 3)["held"]


def test_a_zero_gradient_equals_only_zeros() -> None:
    """No division by the norm of nothing."""
    assert relative_error(np.zeros(2), np.zeros(2)) == 0.0
    assert relative_error(np.array([0.0, 1e-30]), np.zeros(2)) == float("inf")


def test_the_reference_is_the_mean_over_ranks_and_micro_batches(tmp_path: Path) -> None:
    """Equal to the gradients of single batches, added up and divided by their number."""
    options = Options(processes=3, seed=4)
    torch.save(ByteTransformer(9).state_dict(), tmp_path / "before.pt")
    got = reference(tmp_path / "before.pt", options, 5)
    total = np.zeros_like(got["norm.weight"])
    for rank in range(3):
        for micro in range(ACCUMULATION):
            model = ByteTransformer(9).double()
            model(torch.from_numpy(batch(5, micro, rank, 4))).backward()
            assert model.norm.weight.grad is not None
            total += model.norm.weight.grad.numpy()
    assert np.allclose(got["norm.weight"], total / (3 * ACCUMULATION), rtol=1e-9, atol=1e-15)
    assert "positions.weight" not in got
