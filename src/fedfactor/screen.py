"""What a person sees on the terminal while a run goes on and when it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from fedfactor.profile import Recorder


class Progress:
    """A bar a run on a terminal, a line a round elsewhere, nothing when quiet."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self._console, self._quiet = console, quiet
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        self._bars = Bars(*columns, console=console, disable=quiet or not console.is_terminal)

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def start(self, name: str, rounds: int) -> Callable[[dict[str, Any]], None]:
        """Return a listener for the events of a run of so many rounds."""
        task = self._bars.add_task(escape(name), total=rounds, note="")

        def listen(event: dict[str, Any]) -> None:
            if event["event"] != "round" or self._quiet:
                return
            note = line(event)
            self._bars.update(task, completed=event["round"], note=note)
            if not self._console.is_terminal:
                self._console.print(f"{name}: round {event['round']}/{rounds}, {note}", highlight=False, markup=False)

        return listen

    def steps(self, name: str) -> Steps:
        """Return a bar for many small steps whose number is not known yet."""
        return Steps(self._bars, self._console, self._quiet, name)


class Steps:
    """A bar of small steps, with a note after every larger one."""

    def __init__(self, bars: Bars, console: Console, quiet: bool, name: str) -> None:
        self._bars, self._console, self._quiet, self._name = bars, console, quiet, name
        self._task = bars.add_task(escape(name), total=None, note="")

    def start(self, total: int) -> None:
        """Say how many steps there will be."""
        self._bars.update(self._task, total=total)

    def step(self) -> None:
        """Count one."""
        self._bars.advance(self._task)

    def note(self, text: str) -> None:
        """Tell of something that is done: beside the bar, or as a line where there is none."""
        self._bars.update(self._task, note=escape(text))
        if not self._quiet and not self._console.is_terminal:
            self._console.print(f"{self._name}: {text}", highlight=False, markup=False)


def line(event: dict[str, Any]) -> str:
    """Say in a few words how a round went."""
    words = [f"loss {event['loss']:.3f}"]
    if "global" in event:
        words += [f"accuracy {scores['accuracy']:.3f} at {level}" for level, scores in event["global"].items()]
    elif "selected_after" in event:
        words.append(f"clients' accuracy {event['selected_after']['accuracy']:.3f}")
    words.append(f"{(event['totals']['bytes_down'] + event['totals']['bytes_up']) / 1e6:.1f} MB")
    if event["failures"]:
        words.append(f"{len(event['failures'])} failed: {event['failures'][0]['reason'][:60]}")
    return ", ".join(words)


def results(found: Mapping[str, Mapping[str, Any]], papers: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the closing table: accuracy in per cent, bytes, and how many times fewer than the largest run's."""
    table = Table("run", "accuracy", "best", "test data", "MB", "ratio", "failed", "seconds")
    printed = any(paper.keys() & {"accuracy", "accuracy_at"} for paper in papers.values())
    if printed:
        table.add_column("paper's accuracy")
    largest = max(summary["bytes_up"] + summary["bytes_down"] for summary in found.values())
    for name, summary in found.items():
        size = summary["bytes_up"] + summary["bytes_down"]
        row = [
            escape(name),
            _number(summary["final_accuracy"]),
            _number(summary["best_accuracy"]),
            MEASURED.get(summary["accuracy_of"], "-"),
            f"{size / 1e6:.2f}",
            f"{largest / size:.1f}x" if size else "-",
            f"{summary['failures']:.0f}",
            f"{summary['seconds']:.0f}",
        ]
        table.add_row(*row, *([_beside(papers[name], summary)] if printed else []))
    return table


def where_time_went(name: str, recorder: Recorder) -> Table:
    """Return the profile of a run: seconds by what was done; every column adds up to the wall time."""
    columns = ["server's process"] + ([f"a worker (mean of {len(recorder.workers)})"] if recorder.workers else [])
    table = Table(f"seconds of {escape(name)}", *columns)
    for what, seconds in recorder.rows().items():
        parts = [part for part in seconds if part is not None]
        table.add_row(what, *[f"{part:.3f} ({part / recorder.wall:.0%})" for part in parts])
    table.add_row("all", *[f"{recorder.wall:.3f}" for _ in columns])
    return table


def _beside(paper: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return what the paper prints; where it prints a figure a capacity, ours beside each."""
    if "accuracy_at" not in paper:
        return str(paper.get("accuracy", "-"))
    ours = summary["measured"].get("global", {}).get("at", {})
    return "\n".join(
        f"{level}: {value} (here {_number(ours.get(level))})" for level, value in paper["accuracy_at"].items()
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


MEASURED = {"all": "clients", "global": "central", "selected_after": "trained"}
"""On whose test data: all clients' own, the central set, or that of the round's clients after training."""
