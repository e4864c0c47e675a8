"""GradSlice is used as an array; flags and settings speak."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gradtap.config import Settings
from gradtap.errors import PROBLEMS, GradtapError, UsageError, nearest, problem_of
from gradtap.flags import FLAG_NAMES, names_of
from gradtap.types import GradSlice


def grad(values: Any, **more: Any) -> GradSlice:
    facts = {"name": "w", "steps": (3,), "attempts": (1,), "dtype_captured": "bfloat16", "complete": True}
    return GradSlice(**(facts | {"values": values, "flags": (), "factor": (1.0,)} | more))


def test_a_gradient_is_used_as_an_array() -> None:
    """NumPy functions, operators, indexing, len, and torch without a copy."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    g = grad(values)
    assert np.linalg.norm(g) == np.linalg.norm(values)
    assert np.array_equal(2 * g - g, values) and np.array_equal(g @ values.T, values @ values.T)
    assert g[1, 2] == 5 and len(g) == 2 and g.shape == (2, 3) and g.dtype == np.float32
    tensor = torch.from_dlpack(g)
    tensor[0, 0] = 7.0
    assert values[0, 0] == 7.0, "torch looks at the same memory"
    assert np.asarray(g) is values and np.array(g, dtype=np.float64).dtype == np.float64


def test_its_repr_says_what_is_known() -> None:
    """Name, step, the captured dtype and the flags; a stack names its first steps."""
    text = repr(grad(np.zeros(2, np.float32), flags=("untouched",), complete=False))
    assert "w at step 3" in text and "bfloat16" in text and "untouched" in text and "not complete" in text
    assert "1, 2, 3, ..." in repr(grad(np.zeros((4, 2)), steps=(1, 2, 3, 4)))


def test_flags_have_names() -> None:
    """Each bit has one name; a bit of a newer writer is shown, not dropped."""
    assert len(set(FLAG_NAMES.values())) == len(FLAG_NAMES)
    assert names_of(1 | 8) == ("inexact-unscale", "untouched")
    assert names_of(1 << 40) == ("bit-40",) and names_of(0) == ()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CAPACITY", "12"),
        ("MAX_TIME", "0"),
        ("CAPACITY", "many"),
        ("CAPACITY", "-4"),
        ("FSYNC", "always"),
        ("FSYNC", "every=0"),
        ("SHARD_BYTES", "1024"),
        ("CHUNK_BYTES", "0"),
        ("CHUNK_BYTES", "1e6"),
        ("SLAB_BYTES", "-1"),
        ("BUFFER_BYTES", "-1"),
        ("ATTACH_TIMEOUT", "0"),
        ("ATTACH_TIMEOUT", "inf"),
        ("CLOSE_TIMEOUT", "-1"),
        ("FOLLOW_INTERVAL", "0.0"),
        ("FOLLOW_INTERVAL", "nan"),
        ("HEARTBEAT", "soon"),
        ("LOCK_STALE", "5"),
        ("OPEN_FILES", "7"),
    ],
)
def test_a_bad_setting_is_named(variable: str, value: str) -> None:
    """Variable, value, and what is allowed."""
    with pytest.raises(UsageError, match=f"^GRADTAP_{variable} is .*(must be|allowed are) ") as caught:
        Settings.from_environment({f"GRADTAP_{variable}": value})
    shown = str(caught.value).split(";")[0]
    assert value in shown or shown.endswith(str(float(value)))


def test_settings_are_checked_however_they_are_made() -> None:
    """A number of the wrong kind is refused at construction too; the smallest allowed values are taken."""
    for wrong in ({"open_files": 8.0}, {"capacity": True}, {"heartbeat": "10"}):
        with pytest.raises(UsageError, match=f"GRADTAP_{next(iter(wrong)).upper()}"):
            Settings(**wrong)  # type: ignore[arg-type]
    Settings(capacity=1, max_time=1, shard_bytes=64, chunk_bytes=64, slab_bytes=64, buffer_bytes=0, open_files=8)


def test_an_unknown_variable_is_refused() -> None:
    """With the nearest name, or all of them; variables of others, and the shell completion's own, are left alone."""
    with pytest.raises(UsageError, match="GRADTAP_BUFER_BYTES='1' .*did you mean GRADTAP_BUFFER_BYTES"):
        Settings.from_environment({"GRADTAP_BUFER_BYTES": "1"})
    with pytest.raises(UsageError, match="GRADTAP_ZZZZZZZZZZZZZZZZZZZZZZZ.*known are GRADTAP_CAPACITY, .*OPEN_FILES"):
        Settings.from_environment({"GRADTAP_ZZZZZZZZZZZZZZZZZZZZZZZ": "1"})
    assert Settings.from_environment({"_GRADTAP_COMPLETE": "x", "GRADTAPE": "y", "gradtap_x": "z"}) == Settings()


def test_settings_come_from_the_environment() -> None:
    """Numbers and texts; what is not set is the default."""
    settings = Settings.from_environment({"GRADTAP_CAPACITY": "64", "GRADTAP_FSYNC": "each"})
    assert settings.capacity == 64 and settings.fsync_every == 1 and settings.max_time == Settings().max_time
    assert Settings(fsync="none").fsync_every == 0 and Settings(fsync="every=7").fsync_every == 7


def test_every_error_has_an_exit_code() -> None:
    """Each class of the tree leads to a problem, and each is a builtin that a user would catch."""
    seen = [GradtapError]
    for cls in seen:
        seen += cls.__subclasses__()
        assert 1 <= problem_of(cls("x")).exit_code <= 10
        assert cls is GradtapError or len(cls.__mro__) > len(GradtapError.__mro__) + 1
    assert len(PROBLEMS) <= len(seen)


def test_near_names() -> None:
    """A typo leads to the name; nonsense to nothing."""
    assert "weight" in nearest("wieght", ["weight", "bias"])
    assert nearest("zzz", ["weight"]) == ""
