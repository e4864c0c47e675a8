"""k, factor and clip coefficient."""

from __future__ import annotations

import math

import pytest

from gradtap.capture.scale import clip_coefficient, split_scale, window_factor


@pytest.mark.parametrize("scale", [1.0, 2.0, 65536.0, 2.0**-3])
def test_a_power_of_two_needs_no_factor(scale: float) -> None:
    """k alone undoes a loss scale that is a power of two, exactly."""
    k, factor = split_scale(scale)
    assert (2.0**k, factor) == (scale, 1.0)


@pytest.mark.parametrize("scale", [1000.0, 3.0, 0.1])
def test_any_other_scale_is_undone_by_k_and_factor(scale: float) -> None:
    """Bits x 2**-k x factor is bits / scale, and the factor is within the nearest power of two's reach."""
    k, factor = split_scale(scale)
    assert math.isclose(2.0**-k * factor, 1 / scale)
    assert 2**-0.5 <= factor <= 2**0.5


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_no_scale_gives_no_factor(scale: float) -> None:
    """A meaningless scale leaves the bits alone and says that no factor is known."""
    k, factor = split_scale(scale)
    assert k == 0 and math.isnan(factor)


def test_a_ragged_window_has_the_factor_of_full_to_real() -> None:
    """Three of four micro-batches, divided by four, need 4/3; a full or an overfull window needs none."""
    assert window_factor(4.0, 3) == 4 / 3
    assert [window_factor(4.0, seen) for seen in (0, 4, 8)] == [1.0, 1.0, 1.0]


def test_clip_coefficient_is_torchs() -> None:
    """A norm under the limit is left alone, one above is scaled to it, an unknown or infinite one gives NaN."""
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(2.0, 1.0) == 1.0 / (2.0 + 1e-6)
    assert all(math.isnan(clip_coefficient(*pair)) for pair in [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0)])
