"""Each finding on a ledger that shows it, and its silence on a twin that is like it but sound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradtap
from gradtap.flags import JOINED_LATE, LATE_TOUCH, NONFINITE
from gradtap.query.audit import Finding, report
from tests.support.synthetic import MODEL, SMALL, Job

Steps = list[dict[str, Any]]
ZERO2 = {"engine": "deepspeed-zero2"}
OFFLOAD = {"engine": "deepspeed-zero2", "engine_settings": {"cpu_offload": True}}
ZERO3 = {"engine": "deepspeed-zero3"}
SKIP = {"state": "skipped-overflow", "clip_coef": math.nan}
FULL = {"micro_seen": 4, "accum_engine": 4, "accum_loop": 4, "divisor": 4.0}
LEFT = "mlp.bias"
AT = [p.name for p in MODEL].index(LEFT)


def late(micro: int = 1) -> dict[str, Any]:
    """A step that reaches one parameter with a later micro-batch."""
    touched = np.array([0 if p.stored else -1 for p in MODEL], np.int32)
    touched[AT] = micro
    return {"touched": touched, "flags": LATE_TOUCH}


def recorded(tmp_path: Path, steps: Steps, **job: Any) -> Job:
    """A run of these steps; a step may have its own number."""
    made = Job(run=tmp_path / "run.gradtap", world=1, settings=SMALL, kind="whole", **job)
    for number, facts in enumerate(steps, 1):
        made.step(**({"step": number} | facts))
    made.close()
    return made


def found(tmp_path: Path, steps: Steps, **job: Any) -> dict[str, Finding]:
    """Its findings by code."""
    made = recorded(tmp_path, steps, **job)
    with gradtap.open(made.run) as run:
        return {each.code: each for each in run.findings}


CASES: list[tuple[str, Mapping[str, Any], Steps, tuple[int, int, int], dict[str, Any]]] = [
    ("accumulation-mismatch", ZERO2, [{}, {**FULL, "accum_loop": 2}], (1, 2, 2), {"ratio": 2.0}),
    (
        "double-division",
        ZERO2,
        [{**FULL, "divisor": 16.0, "factor": 4.0}] * 3,
        (3, 1, 3),
        {"stored_over_mean": 0.25, "factor": 4.0},
    ),
    ("double-accumulation", ZERO2, [{**FULL, "micro_seen": 16}], (1, 1, 1), {"micro_seen": 16, "accum_engine": 4}),
    (
        "update-without-accumulation",
        {},
        [{**FULL, "micro_seen": 1, "factor": 4.0}] * 5,
        (5, 1, 5),
        {"stored_over_mean": 0.25},
    ),
    (
        "ragged-window",
        {},
        [FULL, {**FULL, "micro_seen": 3, "factor": 4 / 3}, FULL, {**FULL, "micro_seen": 1, "factor": 4.0}],
        (2, 2, 4),
        {"micro_seen": 3, "divisor": 4.0, "stored_over_mean": 0.75},
    ),
    ("lost-micro-batches", ZERO2, [{**FULL, "micro_seen": 7}], (1, 1, 1), {"over": 3}),
    ("stale-gradient", ZERO3, [{}, {"untouched": [LEFT]}, {}], (1, 2, 2), {"total": 1}),
    ("stale-gradient", OFFLOAD, [{}, {}, late()], (1, 3, 3), {"parameters": {LEFT: {"untouched": 0, "late": 1}}}),
    ("skipped-steps", {}, [{"ended": SKIP}, {}, {}, {"ended": SKIP}], (2, 1, 4), {"rate": 0.5, "of": 4}),
    ("nonfinite", {}, [{}, {"flags": NONFINITE}], (1, 2, 2), {"parameter": None}),
    ("halved-on-scale-growth", ZERO2, [{"loss_scale": 4.0, "k": 2}, {"loss_scale": 8.0, "k": 3}], (1, 1, 1), {}),
    ("unscaled-never-scaled", {}, [{"loss_scale": 256.0, "k": 0}] * 2, (2, 1, 2), {"loss_scale": 256.0, "k": 0}),
    ("counter-drift", {}, [{}, {}, {"step": 9}], (1, 2, 2), {"step": 2}),
    (
        "scheduler-drift",
        {},
        [{"ended": SKIP, "learning_rates": (0.1, 0.1)}, {"learning_rates": (0.1, 0.2)}],
        (1, 1, 1),
        {"learning_rate": [0.1, 0.1]},
    ),
]


@pytest.mark.parametrize(("code", "job", "steps", "where", "evidence"), CASES, ids=[case[0] for case in CASES])
def test_it_is_found(
    tmp_path: Path, code: str, job: dict[str, Any], steps: Steps, where: tuple[int, int, int], evidence: dict[str, Any]
) -> None:
    """The fault has its code, where it was seen, evidence from the ledger, a cause and a cure."""
    finding = found(tmp_path, steps, **job)[code]
    assert (finding.count, finding.first, finding.last) == where
    assert {name: finding.evidence[name] for name in evidence} == evidence
    assert finding.severity in ("info", "warning", "error") and finding.cause and finding.cure


TWINS: list[tuple[str, Mapping[str, Any], Steps]] = [
    ("a right set-up", ZERO2, [FULL, FULL]),
    ("counts differ but the loop divides itself", ZERO2, [{**FULL, "accum_loop": 1, "divisor": 1.0}]),
    (
        "one micro-batch, divided by one",
        {},
        [{"micro_seen": 1, "accum_engine": 1, "accum_loop": 1, "divisor": 1.0}] * 3,
    ),
    ("a loop that counts by itself", {}, [{"micro_seen": 4, "accum_engine": 1, "accum_loop": 1, "divisor": 1.0}] * 3),
    ("attached within a window", {}, [{**FULL, "micro_seen": 1, "flags": JOINED_LATE, "factor": math.nan}, FULL]),
    (
        "several backwards where the loop says when",
        {**ZERO2, "engine_settings": {"managed_gradient_accumulation": False}},
        [{**FULL, "micro_seen": 7}],
    ),
    ("untouched where buffers are cleared", ZERO2, [{}, {"untouched": [LEFT]}]),
    ("untouched before it was ever reached", ZERO3, [{"untouched": [LEFT]}] * 3),
    ("reached late where nothing old is there", ZERO3, [{"untouched": [LEFT]}, late()]),
    ("reached late where nothing is added", ZERO3, [{}, {**late(), "flags": 0}]),
    ("a scale that grows under torch", {}, [{"loss_scale": 4.0, "k": 2}, {"loss_scale": 8.0, "k": 3}]),
    ("a scale that never moves", ZERO2, [{"loss_scale": 4.0, "k": 2}] * 3),
    ("a scale that is no power of two", {}, [{"loss_scale": 3000.0, "k": 12, "factor": 4096 / 3000}] * 2),
    ("a rate that moves at an applied step", {}, [{"learning_rates": (0.1, 0.1)}, {"learning_rates": (0.2, 0.1)}]),
    ("a run that begins late", {}, [{"step": 700}, {"step": 701}]),
]


@pytest.mark.parametrize(("job", "steps"), [twin[1:] for twin in TWINS], ids=[twin[0] for twin in TWINS])
def test_its_twin_is_silent(tmp_path: Path, job: dict[str, Any], steps: Steps) -> None:
    """What is sound has no finding at all."""
    assert found(tmp_path, steps, **job) == {}


def test_skipped_overflows_are_not_called_nonfinite(tmp_path: Path) -> None:
    """A loss scale that overflowed and was skipped is one finding, with nothing said of its infinities."""
    codes = found(tmp_path, [{"flags": NONFINITE, "ended": SKIP}, {}])
    assert set(codes) == {"skipped-steps"}


class Broken(Job):
    """Two parameters of step 2 hold NaN and infinities."""

    def gradient(self, param: int, step: int) -> Any:
        """As of any job but for these."""
        values = super().gradient(param, step)
        if step == 2 and self.params[param].name in ("embed.weight", "mlp.weight"):
            values[:2] = np.nan, np.inf
        return values


def test_the_first_parameter_that_is_not_finite_is_named(tmp_path: Path) -> None:
    """Backward comes to the model's last parameters first; the counts are those of its statistics."""
    job = Broken(run=tmp_path / "run.gradtap", world=2)
    job.steps([1, 2, 3]).close()
    with gradtap.open(job.run) as run:
        (finding,) = run.findings
    assert (finding.code, finding.first, finding.count) == ("nonfinite", 2, 1)
    assert finding.evidence["parameter"] == "mlp.weight"
    assert (finding.evidence["nan"], finding.evidence["inf"], finding.evidence["parameters"]) == (1, 1, 2)


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_parts_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """However small the parts in which the ledger is read, the findings are the same."""
    single = {**FULL, "micro_seen": 1, "factor": 4.0}
    steps: Steps = [{"loss_scale": 2.0**k, "k": k} for k in (1, 1, 2, 2)]
    steps += [FULL, single, single, single, FULL, single, FULL, {**FULL, "untouched": [LEFT]}, FULL]
    job = recorded(tmp_path, steps, **ZERO3)
    with gradtap.open(job.run) as run:
        whole = run.findings
        monkeypatch.setattr(report, "ROWS", rows)
        monkeypatch.setattr(report, "LEAST", 1)
        assert run.findings == whole
    assert {f.code: f.count for f in whole} == {
        "update-without-accumulation": 3, "ragged-window": 1, "halved-on-scale-growth": 1, "stale-gradient": 1,
    }  # fmt: skip


def test_sessions_are_looked_at_apart(tmp_path: Path) -> None:
    """A scale that is higher in the next session did not grow, and its first step is no jump."""
    for step, k in ((1, 2), (9, 5)):
        job = Job(run=tmp_path / "run.gradtap", world=1, engine="deepspeed-zero2")
        job.step(step, k=k, loss_scale=2.0**k)
        job.close()
    with gradtap.open(tmp_path / "run.gradtap") as run:
        assert run.findings == ()


def test_the_answer_says_what_it_cannot_tell(tmp_path: Path) -> None:
    """Rows are the findings, the gravest first, and each fault that is not judged in full names the missing fact."""
    job = recorded(tmp_path, [{"ended": SKIP}, {**FULL, "accum_loop": 2}, {}], **ZERO2)
    with gradtap.open(job.run) as run:
        body = run.audit().body()
        assert [row["code"] for row in body["findings"]] == ["accumulation-mismatch", "skipped-steps"]
    assert (body["schema"], body["steps"], body["first"], body["last"]) == ("gradtap.audit/1", 3, 1, 3)
    assert "replica_crc" in body["not_judged"]["rank-disagreement"]


def test_a_long_walk_reads_little_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are asked for in parts, never whole, so that memory does not grow with the run."""
    job = recorded(tmp_path, [{}] * 9)
    asked: list[int] = []
    with gradtap.open(job.run) as run:
        ledger = run.ledger
        original: Callable[[str, int, int], Any] = ledger.part

        def part(name: str, start: int, stop: int) -> Any:
            asked.append(stop - start)
            return original(name, start, stop)

        monkeypatch.setattr(type(ledger), "part", lambda self, name, start, stop: part(name, start, stop))
        monkeypatch.setattr(report, "ROWS", 2)
        assert run.findings == ()
    assert asked and max(asked) <= 4
