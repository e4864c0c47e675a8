from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradtap.cli import watch
from gradtap.cli.app import main
from gradtap.cli.live import Screen
from gradtap.cli.news import News, following
from gradtap.cli.places import asking
from gradtap.types import StepOutcome
from tests.support.synthetic import Job


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[int]:
    """The steps that a watch prints."""
    assert main(["watch", *words, "--jsonl"]) == 0
    return [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()]


def test_a_closed_run_is_told_and_ends(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last complete steps, then the reason to end, without a wait."""
    assert lines(capsys, str(store)) == [1, 2, 3, 5, 6]
    assert lines(capsys, str(store), "--last", "2") == [5, 6]
    assert lines(capsys, str(store), "--last", "0") == []
    # More than there are, in a run shorter than twice as many.
    assert lines(capsys, str(store), "--last", "7") == [1, 2, 3, 5, 6]
    assert main(["watch", str(store)]) == 0
    out, err = capsys.readouterr()
    assert [line.split("step ")[1].split()[0] for line in out.splitlines()] == ["1", "2", "3", "5", "6"]
    assert "untouched" in out.splitlines()[-1]
    assert "the run is closed" in err


def test_json_lines_have_a_schema(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json each line is an object that names its schema."""
    assert main(["watch", str(store), "--json", "--last", "1"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["schema"], body["step"]) == ("gradtap.watch/1", 6)


def news_of(job: Job, acts: list[Any], **options: Any) -> list[list[int]]:
    """The steps of each piece of news, while something happens at each look."""
    todo: Iterator[Any] = iter(acts)

    def sleep(_: float) -> None:
        # Once the run has ended there is one look more.
        next(todo, lambda: None)()

    with asking(str(job.run)) as place:
        return [[row["step"] for row in news.rows] for news in following(place, 1, sleep=sleep, **options)]


def test_new_steps_come_once_until_the_run_is_closed(tmp_path: Path) -> None:
    """Each complete step once, a dropped one never, and what was published at the very end too."""
    job = Job(run=tmp_path / "r.gradtap").steps([1, 2])
    job.wait_published(2)

    def more(*steps: int, dropped: tuple[int, ...] = ()) -> Any:
        def act() -> None:
            for step in steps:
                job.step(step, dropped=dropped)
            job.flush()

        return act

    def end() -> None:
        more(6)()
        job.close()

    found = news_of(job, [more(3), more(4, dropped=(0,)), more(5), end], last=1)
    assert found[0] == [2]
    assert [step for rows in found[1:] for step in rows] == [3, 5, 6]


def test_a_step_is_told_with_its_outcome(tmp_path: Path) -> None:
    """Whether a step was applied is known when the next begins, or at the end: until then its line waits."""
    job = Job(run=tmp_path / "r.gradtap").steps([1])
    job.step(2, outcome=False)
    job.wait_published(2)

    def next_one() -> None:
        for recorder in job.recorders:
            recorder.outcome(2, StepOutcome(state="applied"))
        job.step(3, outcome=False)
        job.flush()

    assert news_of(job, [lambda: None, next_one, job.close], last=5) == [[1], [2], [3]]


def test_it_ends_after_so_many_new_steps(tmp_path: Path) -> None:
    """Those that were there do not count, and no more are shown than were asked for."""
    job = Job(run=tmp_path / "r.gradtap", world=1, kind="whole").steps([1])
    job.wait_published(1)

    def more() -> None:
        job.steps([2, 3, 4])
        job.flush()

    try:
        assert news_of(job, [more], most=2, last=5) == [[1], [2, 3]]
    finally:
        job.close()


def test_a_resumed_training_is_followed_from_its_own_first_step(tmp_path: Path) -> None:
    """A second session that goes back records steps again: they are new."""
    path = tmp_path / "r.gradtap"
    Job(run=path, world=1, kind="whole").steps(range(1, 9)).kill()
    job = Job(run=path, world=1, kind="whole").steps([5])
    job.wait_published(1)

    def end() -> None:
        job.steps([6, 7])
        job.close()

    assert news_of(job, [end], last=1) == [[8], [6, 7], []]


def test_a_run_that_is_not_there_yet_may_be_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --wait it is exit code 3; with it the run is followed once it is there, and the wait is told once."""
    path = tmp_path / "later.gradtap"
    assert main(["watch", str(path)]) == 3
    capsys.readouterr()

    def sleep(_: float) -> None:
        if len(slept := [*naps, 1]) == 2:
            Job(run=path, world=1, kind="whole").steps([1]).close()
        naps[:] = slept

    naps: list[int] = []
    monkeypatch.setattr(watch.time, "sleep", sleep)
    assert main(["watch", str(path), "--wait", "--jsonl"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["step"] == 1
    assert err.count("waiting") == 1


def test_an_interval_of_nothing_is_refused(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So is one that is no number."""
    for text in ("0", "-1", "nan"):
        assert main(["watch", str(store), "--interval", text]) == 2
        assert "interval" in capsys.readouterr().err
    assert main(["watch", str(store), "--json", "--jsonl"]) == 2


def row(step: int, norm: float | None = 1.0) -> dict[str, Any]:
    """A row of a step."""
    more = {"attempt": 1, "complete": True, "record": "committed", "time": 1e9 + step, "stored_bytes": 10}
    return {"step": step, "norm": norm, "state": "applied", "flags": [], **more}


def test_the_picture_fits_its_terminal() -> None:
    """Never more lines than the screen has, and none wider: else a terminal would scroll and flicker."""
    screen = Screen("runs/a")
    console = Console(file=io.StringIO(), width=60, height=20, force_terminal=True)
    for count in (0, 1, 500):
        screen.add(News(rows=[row(step, None if step == 3 else step) for step in range(count)], state="live"))
        with console.capture() as captured:
            console.print(screen)
        shown = captured.get().splitlines()
        assert len(shown) < 20
        assert "runs/a: live" in shown[0]
    assert "norm" in shown[1]
    assert " 499 " in shown[-1]


def test_a_terminal_gets_the_picture(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the table is drawn in place of lines."""
    screen = Console(file=io.StringIO(), width=80, height=30, force_terminal=True)
    monkeypatch.setattr(watch, "console", lambda: screen)
    assert main(["watch", str(store)]) == 0
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "closed" in text and "step  attempt" in text and "5 steps" in text
