"""From the engine's bits to the stored value: exact widening, then times a power of two. Nothing else is changed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtap.errors import UsageError

CAPTURED_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float64": np.dtype(np.float64),
}
"""How values of each captured dtype lie in host memory."""

_FAR = 5000
"""Beyond this power of two every finite value of every dtype becomes zero or infinite: more makes no difference."""


def restore(values: NDArray[Any], dtype: str, k: int) -> tuple[NDArray[Any], int]:
    """Stored values `values * 2**-k` of a captured piece, and how many of them the scaling could not hold exactly.

    `values` is 1-D, of the dtype that `CAPTURED_DTYPES` gives for `dtype` (bfloat16 as uint16 bits). The answer is
    float32, float64 for float64. For `k == 0` it holds the very bits (signalling NaNs of float16 become quiet), and
    for float32 and float64 it *is* `values`, not a copy. Inexact are results that are rounded to a subnormal or to
    zero, or overflow to infinity; a NaN is never inexact. Results are rounded once, to nearest even.

    Raises `UsageError` for an unknown dtype, or values that are not 1-D of that dtype.
    """
    wide = _widen(values, dtype)
    if k == 0:
        return wide, 0
    k = max(-_FAR, min(_FAR, k))
    with np.errstate(all="ignore"):
        if wide.dtype == np.float64:
            return _scale_by_exponent(wide, k)
        # Within this range 2**-k and 2**k are normal float32, so the product is rounded once and can be undone.
        return _scale_by_product(wide, k) if abs(k) <= 126 else _scale_through_double(wide, k)


def _widen(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    held = CAPTURED_DTYPES.get(dtype)
    if held is None:
        raise UsageError(f"captured dtype is {dtype!r}; allowed are {', '.join(CAPTURED_DTYPES)}")
    if values.dtype != held or values.ndim != 1:
        raise UsageError(f"values of {dtype} are {values.dtype} {values.shape}; they must be 1-D {held}")
    if dtype == "bfloat16":
        bits = values.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    if dtype == "float16":
        # A signalling NaN raises the invalid flag when it is widened.
        with np.errstate(invalid="ignore"):
            return values.astype(np.float32)
    return values


def _scale_by_product(wide: NDArray[Any], k: int) -> tuple[NDArray[Any], int]:
    result = wide * np.float32(2.0**-k)
    return result, _differing(result * np.float32(2.0**k), wide)


def _scale_through_double(wide: NDArray[Any], k: int) -> tuple[NDArray[Any], int]:
    # float32 spans 2**-149 to 2**128, so with |k| up to 600 the double product is exact, and beyond 300 the result
    # no longer depends on k.
    double = wide.astype(np.float64)
    exact = double * 2.0 ** -max(-600, min(600, k))
    result = exact.astype(np.float32)
    # The first count is zero but where this thread takes subnormals for zeros: then widening has lost them.
    return result, _differing(double.astype(np.float32), wide) + _differing(result.astype(np.float64), exact)


def _scale_by_exponent(wide: NDArray[Any], k: int) -> tuple[NDArray[Any], int]:
    result = np.ldexp(wide, -k)
    return result, _differing(np.ldexp(result, k), wide)


def _differing(left: NDArray[Any], right: NDArray[Any]) -> int:
    # Bits, not values: with denormals-are-zero set in this thread, a lost subnormal would compare equal to zero.
    kind = np.uint32 if left.dtype == np.float32 else np.uint64
    differs = left.view(kind) != np.ascontiguousarray(right).view(kind)
    count = int(np.count_nonzero(differs))
    if count:
        count -= int(np.count_nonzero(np.isnan(right[differs])))
    return count
