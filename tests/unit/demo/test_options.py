from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradtap.demo.options import Options
from gradtap.errors import UsageError


@pytest.mark.parametrize(
    ("wrong", "value", "allowed"),
    [
        ({"steps": 0}, "0", "1 and up"),
        ({"stage": 3}, "3", "stage 1 or 2"),
        ({"engine": "fsdp"}, "fsdp", "deepspeed, ddp, torch"),
        ({"seed": -1}, "-1", "0 and up"),
        ({"processes": 0}, "0", "1 to 64"),
        ({"processes": 65}, "65", "1 to 64"),
        ({"engine": "torch", "processes": 2}, "2", "--engine ddp"),
        ({"store": ""}, "empty", "runs/demo.gradtap"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value_and_what_is_allowed(
    wrong: dict[str, Any], value: str, allowed: str
) -> None:
    """Each bad option names itself, its value and the values that do."""
    with pytest.raises(UsageError) as caught:
        Options(**wrong)
    assert value in str(caught.value)
    assert allowed in str(caught.value)


def test_the_number_of_processes_follows_the_engine_unless_given() -> None:
    """Two by default, one for plain torch."""
    assert [Options(engine=engine).world for engine in ("deepspeed", "ddp", "torch")] == [2, 2, 1]
    assert Options(processes=3).world == 3


@pytest.mark.parametrize(("steps", "checked"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (30, (1, 15, 30))])
def test_the_first_middle_and_last_step_are_checked_each_once(steps: int, checked: tuple[int, ...]) -> None:
    """Fewer than three steps give fewer checks."""
    assert Options(steps=steps).checked_steps == checked


def test_options_reach_a_child_unchanged(tmp_path: Path) -> None:
    """Saving and loading gives equal options."""
    options = Options(store="a b/c.gradtap", steps=7, processes=3, stage=1, engine="ddp", seed=5, json=True)
    options.save(tmp_path / "options.json")
    assert Options.load(tmp_path / "options.json") == options
