"""What the demo says at its end: one dictionary (schema gradtap.demo/1), and the same for people. No torch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import zarr
from rich.console import Console

import gradtap
from gradtap.cli.output import console, number, size
from gradtap.cli.pictures import heatmap
from gradtap.demo.options import Options
from gradtap.errors import CaptureError

SCHEMA = "gradtap.demo/1"


def session_names(store: str) -> frozenset[str]:
    """Names of the sessions in a store; none where there is no store yet."""
    folder = Path(store) / "sessions"
    return frozenset(path.name for path in folder.iterdir()) if folder.is_dir() else frozenset()


def build_report(
    options: Options, before: frozenset[str], facts: dict[str, Any], check: dict[str, Any], *, train_seconds: float
) -> dict[str, Any]:
    """Everything worth saying, as JSON values. `before`: the sessions that the store held when training began.

    Raises `CaptureError` where training left no complete capture, and what `gradtap.open` raises.
    """
    session, steps = captured(options, before)
    run = gradtap.open(options.store)
    stored = [spec for spec in run.params if spec.stored]
    sizes = [path.stat().st_size for path in session.rglob("*") if path.is_file()]
    raw = len(steps) * sum(spec.numel * 4 for spec in stored)
    norms = run.norms(steps=steps)
    return {
        "schema": SCHEMA,
        "store": options.store,
        "session": session.name,
        "sessions": len(session_names(options.store)),
        "engine": options.engine,
        "stage": options.stage if options.engine == "deepspeed" else None,
        "processes": options.world,
        "device": facts.get("device"),
        "seed": options.seed,
        "loss": {"first": facts.get("first_loss"), "last": facts.get("loss")},
        "steps": {"asked": options.steps, "captured": len(steps), "first": steps[0], "last": steps[-1]},
        "parameters": {
            "stored": len(stored),
            "elements": sum(spec.numel for spec in stored),
            "frozen": [spec.name for spec in run.params if spec.status == "frozen"],
            "tied": {spec.name: list(spec.aliases) for spec in stored if spec.aliases},
        },
        "bytes": {"raw": raw, "stored": sum(sizes), "ratio": round(raw / sum(sizes), 4), "files": len(sizes)},
        "norms": {
            "params": list(norms.params),
            "steps": [int(step) for step in norms.steps],
            "l2": norms.values.tolist(),
        },
        "seconds": {"train": round(train_seconds, 3), "check": check.get("seconds")},
        "check": _complete(check, options, steps),
        "warnings": facts.get("warnings", []),
        "next": next_commands(options.store, session, steps[-1]),
    }


def captured(options: Options, before: frozenset[str]) -> tuple[Path, list[int]]:
    """The folder of the session that this demo wrote, and the steps that every rank committed in it."""
    fresh = sorted(session_names(options.store) - before)
    if not fresh:
        raise CaptureError(
            f"training ended and {options.store} holds no new session, so nothing was captured; "
            "look at the warnings above, then try an empty folder: gradtap demo --store PATH"
        )
    session = Path(options.store) / "sessions" / fresh[-1]
    group = zarr.open_group(session / "gradients.zarr", mode="r")
    numbers: Any = group["_step"]
    steps = [int(step) for step in numbers[:] if step >= 0]
    if not steps:
        raise CaptureError(
            f"training ended and session {session.name} of {options.store} holds no complete capture; "
            f"see why with: gradtap verify {shlex.quote(options.store)}"
        )
    return session, steps


def next_commands(store: str, session: Path, step: int) -> list[str]:
    """Commands to try, with the real path; each runs as it stands."""
    path, name = shlex.quote(store), "blocks.0.up.weight"
    group = zarr.open_group(session / "gradients.zarr", mode="r")
    array = f"zarr.open_group({str(session / 'gradients.zarr')!r}, mode='r')[{_whole_array(group)!r}]"
    # Not -1: the arrays of a session that was not closed are longer than what it captured.
    numbers: Any = group["_step"]
    capture = [int(number) for number in numbers[:]].index(step)
    return [
        f"gradtap info {path}",
        f"gradtap ls {path}",
        f"gradtap steps {path}",
        f"gradtap show {path} {step} {name}",
        f"gradtap verify {path}",
        f'python -c "import gradtap; print(gradtap.open({store!r}).grad({name!r}, {step}))"',
        f'python -c "import zarr; print({array}[{capture}])"',
    ]


def show_report(report: dict[str, Any], screen: Console | None = None) -> None:
    """Print the report for people, on standard output or on `screen`."""
    out = console() if screen is None else screen
    norms, check = report["norms"], report["check"]
    for line in (*_headline(report), ""):
        out.print(line, markup=False, soft_wrap=True)
    title = "L2 norm of each gradient: parameters by depth, steps from left to right"
    out.print(heatmap(norms["l2"], norms["params"], norms["steps"], title))
    out.print()
    out.print(
        "check held" if check["held"] else "check did not hold", style="bold green" if check["held"] else "bold red"
    )
    for line in (*_findings(check), "", "try next:", *(f"  {command}" for command in report["next"])):
        out.print(line, markup=False, soft_wrap=True)


def _headline(report: dict[str, Any]) -> list[str]:
    steps, parameters, sizes, loss = report["steps"], report["parameters"], report["bytes"], report["loss"]
    engine = f"DeepSpeed ZeRO-{report['stage']}" if report["stage"] else report["engine"]
    tied = ", ".join(" = ".join((name, *others)) for name, others in parameters["tied"].items())
    return [
        f"{report['store']}, session {report['session']}",
        f"  {steps['captured']} of {steps['asked']} steps captured; {engine} under Accelerate, "
        f"{report['processes']} process(es) on {report['device']}, {report['seconds']['train']:.0f} s",
        f"  {parameters['stored']} parameters, {parameters['elements']:,} elements each step; "
        f"frozen: {', '.join(parameters['frozen']) or 'none'}; tied: {tied or 'none'}",
        f"  gradients {size(sizes['raw'])}; on disk {size(sizes['stored'])} in {sizes['files']} files, summaries and "
        f"ledger included: {sizes['ratio']:.2f} to 1",
        f"  loss {number(loss['first'])} -> {number(loss['last'])}",
        *(f"  {warning}" for warning in report["warnings"]),
    ]


def _findings(check: dict[str, Any]) -> list[str]:
    lines = []
    for step in check["steps"]:
        error, name = step["largest_error"], step["largest_name"]
        said = "nothing to compare" if error is None else f"largest relative error {error:.1e} ({name})"
        lack = "".join(f"; {kind}: {', '.join(step[kind])}" for kind in ("missing", "unexpected") if step[kind])
        lines.append(f"  step {step['step']}: {step['parameters']} parameters, {said}{lack}")
    if "tolerance" in check:
        lines.append(f"  computed again in one process of plain torch (float64); tolerance {check['tolerance']:g}")
    return [*lines, *(f"  {line}" for line in check.get("problem", "").splitlines())]


def _complete(check: dict[str, Any], options: Options, steps: list[int]) -> dict[str, Any]:
    # An earlier session of the same store may hold the step, so the comparison alone would not notice its absence.
    absent = [step for step in options.checked_steps if step not in steps]
    if not absent:
        return check
    return check | {"held": False, "problem": f"not captured in this session: steps {', '.join(map(str, absent))}"}


def _whole_array(group: zarr.Group) -> str:
    # A parameter cut between two owners has an array for each ("name@start"), and arrays of facts begin with "_".
    names = sorted(name for name, _ in group.arrays())
    return next(name for name in names if "@" not in name and not name.startswith("_"))
