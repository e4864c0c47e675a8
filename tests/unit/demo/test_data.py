from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gradtap.demo.data import BATCH, CONTEXT, batch, text
from gradtap.errors import GradtapError


def test_a_batch_is_a_pure_function_of_its_arguments() -> None:
    """The same arguments give the same bytes, in any order of calls."""
    first = batch(3, 1, 0, 7)
    batch(4, 0, 1, 7)
    assert np.array_equal(batch(3, 1, 0, 7), first)
    assert first.shape == (BATCH, CONTEXT + 1)
    assert first.dtype == np.int64
    assert first.min() >= 0
    assert first.max() <= 255


@pytest.mark.parametrize("other", [(4, 1, 0, 7), (3, 0, 0, 7), (3, 1, 1, 7), (3, 1, 0, 8)])
def test_each_argument_of_a_batch_matters(other: tuple[int, int, int, int]) -> None:
    """Another step, micro-batch, rank or seed gives other bytes."""
    assert not np.array_equal(batch(*other), batch(3, 1, 0, 7))


def test_the_text_is_the_sources_in_the_order_of_their_names(tmp_path: Path) -> None:
    """Whatever order the file system lists them in, and only .py files."""
    for name, letter in (("b.py", "b"), ("a.py", "a"), ("c.txt", "c")):
        (tmp_path / name).write_text(letter * CONTEXT)
    assert text(tmp_path).tobytes() == b"a" * CONTEXT + b"b" * CONTEXT


def test_a_python_without_sources_is_said_so(tmp_path: Path) -> None:
    """A stripped standard library names the folder instead of training on nothing."""
    with pytest.raises(GradtapError, match=str(tmp_path)):
        text(tmp_path)
