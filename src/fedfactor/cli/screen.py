"""The live screen during a run, and the tables at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedfactor.profile import Recorder
from fedfactor.report.values import joules, span
from fedfactor.server.events import privacy_line, start_line
from fedfactor.server.result import RANKING
from fedfactor.task import ACCURACY, LOSS, Decider

Event = dict[str, Any]
BLOCKS = "▁▂▃▄▅▆▇█"
TREND = 24
"""Number of measurements that the small bars show."""
RECENT = 20
"""Number of rounds whose mean time predicts the remaining time."""


class Progress:
    """Shows progress: a live screen on a terminal, otherwise one line per round; nothing when quiet."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self._console, self._quiet = console, quiet
        self._runs: list[Watched] = []  # not finished yet
        self._notice = ""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        self._shown = console.is_terminal and not quiet
        self._bars = Bars(*columns, console=console, disable=not self._shown)
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._picture)

    def __enter__(self) -> Progress:
        if self._shown:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._live.stop()

    def start(self, name: str, rounds: int) -> Callable[[Event], None]:
        """Return a listener for the events of a run with this many rounds."""
        run = Watched(name, rounds)
        self._runs.append(run)

        def listen(event: Event) -> None:
            run.hear(event)
            if not self._quiet:
                for text in event.get("warnings", ()):
                    self._console.print(Text(f"{name}: warning: {text}", "yellow"), soft_wrap=True)
                if words := start_line(event):
                    self._say(f"{name}: {words}")
            if self._shown and run.done and run in self._runs:
                self._runs.remove(run)
                self._console.print(run.closing())  # stays above the live screen
            if self._quiet or self._shown:
                return
            if self._notice:
                self._say(self._notice)
                self._notice = ""
            if event["event"] == "round":
                words = f"{name}: round {event['round']}/{rounds}, {line(event, run.dense, run.decider)}"
                left = f", {clock(run.left)} left" if run.left and not run.done else ""
                self._say(words + left)

        return listen

    def _say(self, words: str) -> None:
        """Print one line without wrapping: other programs may read it."""
        self._console.print(words, highlight=False, markup=False, soft_wrap=True)

    def notice(self, words: str) -> None:
        """Show a notice: below the live screen at once, otherwise before the next line."""
        self._notice = words

    def steps(self, name: str) -> Steps:
        """Return a progress bar for many small steps whose number is not known yet."""
        return Steps(self._bars, self._console, self._quiet, name)

    def _picture(self) -> RenderableType:
        running = [run.panel() for run in self._runs]
        notice = [Text(self._notice, "yellow")] if self._notice else []
        return Group(*running, *([self._bars.get_renderable()] if self._bars.tasks else []), *notice)


@dataclass(eq=False)
class Watched:
    """What the events so far say about a run."""

    name: str
    rounds: int
    round: int = 0
    dense: float = 0.0
    """Bytes that dense FedAvg would have sent in the same rounds; 0 if unknown."""
    last: Event = field(default_factory=dict)
    """Event of the last round."""
    decider: Decider = ACCURACY
    """The metric that is shown."""
    measured: list[tuple[int, float]] = field(default_factory=list)
    """Measured rounds with their scores."""
    answered: int = 0
    failed: int = 0
    of: int = 0
    _apiece: float = 0.0
    _seconds: list[float] = field(default_factory=list)
    _since: float = field(default_factory=time.monotonic)

    def hear(self, event: Event) -> None:
        """Update from an event."""
        if event["event"] == "start":
            self._apiece, self.decider = event.get("dense_bytes", 0), Decider.read(event)
        elif event["event"] == "resumed":
            for past in event["past"]:
                self.hear(past)
            self.round = event["round"]
        elif event["event"] == "answered":
            self.of = event["of"]
            if event["failure"] is None:
                self.answered += 1
            else:
                self.failed += 1
        elif event["event"] == "round":
            self._round(event)

    def _round(self, event: Event) -> None:
        self.round, self.last = event["round"], event
        self.answered = self.failed = 0
        self.dense += self._apiece * len(event["cohort"])
        self._seconds = [*self._seconds, event["seconds"]][-RECENT:]
        self._since = time.monotonic()
        key = next((key for key in RANKING if key in event), None)
        if key is not None:
            self.measured.append((event["round"], self.decider.of(event[key])))

    @property
    def done(self) -> bool:
        """Whether the last round is finished, or the last one that fits the privacy budget."""
        return self.round >= self.rounds or "stopped" in self.last.get("privacy", {})

    @property
    def left(self) -> float | None:
        """Remaining seconds if rounds take as long as the last ones; `None` before the first."""
        if not self._seconds:
            return None
        one = sum(self._seconds) / len(self._seconds)
        begun = min(one, time.monotonic() - self._since) if self.answered + self.failed else 0.0
        return max(0.0, (self.rounds - self.round) * one - begun)

    def panel(self) -> Panel:
        """Draw the current state of the run."""
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column(ratio=1)
        bar = Table.grid(padding=(0, 2))
        left = "" if self.left is None else f"{clock(self.left)} left"
        bar.add_row(f"{self.round}/{self.rounds}", ProgressBar(self.rounds, self.round, width=30), left)
        rows.add_row("round", bar)
        rows.add_row(self.decider.name, self._score())
        rows.add_row("traffic", traffic(self.last["totals"], self.dense) if self.last else "nothing yet")
        rows.add_row("clients", self._clients())
        if "clock" in self.last:
            rows.add_row("fleet", fleet_time(self.last))
        if "privacy" in self.last:
            rows.add_row("privacy", privacy_line(self.last["privacy"]))
        return Panel(rows, title=escape(self.name), title_align="left")

    def closing(self) -> Text:
        """Say in a line how the run ended."""
        score = f"{self.decider.name} {self.decider.number(self.measured[-1][1])}, " if self.measured else ""
        spent = f", {privacy_line(self.last['privacy'])}" if "privacy" in self.last else ""
        return Text(
            f"{self.name}: {self.round} rounds, {score}{traffic(self.last.get('totals', {}), self.dense)}{spent}"
        )

    def _score(self) -> Text:
        if not self.measured:
            return Text("not measured yet")
        (round, now), best = self.measured[-1], max(self.measured, key=lambda point: self.decider.goodness(point[1]))
        words = Text(self.decider.number(now))
        if len(self.measured) > 1:
            change = now - self.measured[-2][1]
            style = {True: "green", False: "red"}[self.decider.goodness(change) > 0] if change else "dim"
            arrow = "▲" if change > 0 else "▼" if change < 0 else "="
            words.append(f" {arrow} {change:+.3f}" if self.decider.is_share else f" {arrow} {change:+.3g}", style)
        words.append(f" in round {round}, best {self.decider.number(best[1])} in round {best[0]}  ")
        return words.append(bars([score for _, score in self.measured[-TREND:]]), "cyan")

    def _clients(self) -> Text:
        if self.of and self.answered + self.failed:
            words = Text(f"round {self.round + 1}: {self.answered} of {self.of} done, ")
            words.append(f"{self.failed} failed", "red" if self.failed else "")
            return words.append(", measuring" if self.answered + self.failed == self.of else "")
        if not self.last:
            return Text("none has answered yet")
        failed, asked = len(self.last["failures"]), len(self.last["cohort"])
        done = f"{asked - failed} of {asked} done"
        if "buffered" in self.last:  # these clients need not have started in this round
            done = f"{len(self.last['buffered']['clients'])} replies used"
        words = Text(f"round {self.round}: {done}, ")
        words.append(f"{failed} failed", "red" if failed else "")
        return words.append(f", {self.last['totals']['failures']} in all so far")


def traffic(totals: Mapping[str, float], dense: float) -> str:
    """Return the bytes sent so far beside those of dense FedAvg, as text."""
    size = totals.get("bytes_down", 0) + totals.get("bytes_up", 0)
    if not dense:
        return in_bytes(size)
    if not size:
        return f"nothing sent; dense FedAvg {in_bytes(dense)}"
    return f"{in_bytes(size)}, dense FedAvg {in_bytes(dense)} ({dense / size:.1f}x)"


def fleet_time(event: Event) -> str:
    """Return the simulated time and energy so far, and what the last round took, as text."""
    totals, clock = event["totals"], event["clock"]
    energy = f", {joules(totals['simulated_joules'])}" if "simulated_joules" in totals else ""
    late = f", {clock['late']} late" if clock["late"] else ""
    return f"{span(totals['simulated_seconds'])} simulated{energy} (this round {span(clock['seconds'])}{late})"


def in_bytes(size: float) -> str:
    """Format a number of bytes in the largest decimal unit in which it is at least 1."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def bars(values: list[float]) -> str:
    """Draw numbers as small bars, scaled from the lowest to the highest."""
    low, high = min(values), max(values)
    step = (high - low) / (len(BLOCKS) - 1) or 1.0
    return "".join(BLOCKS[round((value - low) / step)] for value in values)


class Steps:
    """A progress bar of small steps, with notes in between."""

    def __init__(self, bars: Bars, console: Console, quiet: bool, name: str) -> None:
        self._bars, self._console, self._quiet, self._name = bars, console, quiet, name
        self._task = bars.add_task(escape(name), total=None, note="")

    def start(self, total: int) -> None:
        """Set the total number of steps."""
        self._bars.update(self._task, total=total)

    def step(self) -> None:
        """Count one step."""
        self._bars.advance(self._task)

    def note(self, text: str) -> None:
        """Show a note beside the bar, or as a line if there is no terminal."""
        self._bars.update(self._task, note=escape(text))
        if not self._quiet and not self._console.is_terminal:
            self._console.print(f"{self._name}: {text}", highlight=False, markup=False)


def line(event: Event, dense: float = 0.0, decider: Decider = ACCURACY) -> str:
    """Summarise a round in one line; `dense` is the number of bytes that dense FedAvg would have sent so far."""
    words = [] if event["loss"] is None else [f"loss {event['loss']:.3f}"]
    name = decider.name
    if decider == LOSS:
        words, name = [f"training {word}" for word in words], "test loss"
    if "all" in event:
        words.append(f"{name} {decider.number(decider.of(event['all']))} of all clients")
    if "global" in event:
        words += [
            f"{name} {decider.number(scores[decider.name])} at {level}" for level, scores in event["global"].items()
        ]
    elif "selected_after" in event and "all" not in event:
        words.append(f"clients' {name} {decider.number(decider.of(event['selected_after']))}")
    words.append(traffic(event["totals"], dense))
    if "privacy" in event:
        words.append(privacy_line(event["privacy"]))
    if "clock" in event:
        words.append(fleet_time(event))
    if event["failures"]:
        words.append(f"{len(event['failures'])} failed: {event['failures'][0]['reason'][:60]}")
    return ", ".join(words)


def results(found: Mapping[str, Mapping[str, Any]], papers: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the final table: the deciding metric, bytes, and how many times fewer bytes than the largest run."""
    several, deciders = len(found) > 1, {name: Decider.read(summary) for name, summary in found.items()}
    names = {decider.name for decider in deciders.values()}
    score = names.pop() if len(names) == 1 else "score"
    table = Table("run", score, "best", "test data", "MB", *(["ratio"] if several else []), "failed", "seconds")
    timed = any("simulated_seconds" in summary for summary in found.values())
    if timed:
        table.add_column("time on the fleet")
    private = any("privacy" in summary for summary in found.values())
    if private:
        table.add_column("privacy")
    printed = any(paper.keys() & {"accuracy", "accuracy_at"} for paper in papers.values())
    if printed:
        table.add_column("paper's accuracy")
    largest = max(summary["bytes_up"] + summary["bytes_down"] for summary in found.values())
    for name, summary in found.items():
        size, decider = summary["bytes_up"] + summary["bytes_down"], deciders[name]
        label = f"{decider.name} " if score != decider.name else ""
        row = [
            escape(name),
            *(label + decider.text(summary[f"{when}_{decider.name}"], 1) for when in ("final", "best")),
            MEASURED.get(summary[f"{decider.name}_of"], "-"),
            f"{size / 1e6:.2f}",
            *([f"{largest / size:.1f}x" if size else "-"] if several else []),
            f"{summary['failures']:.0f}",
            f"{summary['seconds']:.0f}",
        ]
        if timed:
            row.append(span(summary["simulated_seconds"]) if "simulated_seconds" in summary else "-")
        if private:
            row.append(privacy_line(summary["privacy"]) if "privacy" in summary else "-")
        table.add_row(*row, *([_beside(papers[name], summary)] if printed else []))
    return table


def where_time_went(name: str, recorder: Recorder) -> Table:
    """Return the profile of a run: seconds per activity. Each column adds up to the wall time."""
    columns = ["server's process"] + ([f"a worker (mean of {len(recorder.workers)})"] if recorder.workers else [])
    table = Table(f"seconds of {escape(name)}", *columns)
    for what, seconds in recorder.rows().items():
        parts = [part for part in seconds if part is not None]
        table.add_row(what, *[f"{part:.3f} ({part / recorder.wall:.0%})" for part in parts])
    table.add_row("all", *[f"{recorder.wall:.3f}" for _ in columns])
    return table


def _beside(paper: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return the paper's accuracy; if it prints one per capacity, with ours beside each."""
    if "accuracy_at" not in paper:
        return str(paper.get("accuracy", "-"))
    ours = summary["measured"].get("global", {}).get("at", {})
    return "\n".join(
        f"{level}: {value} (here {ACCURACY.text(ours.get(level), 1)})" for level, value in paper["accuracy_at"].items()
    )


MEASURED = {"all": "clients", "global": "central", "selected_after": "trained"}
"""Test data of a measurement: of all clients, the central set, or of the round's clients after training."""
