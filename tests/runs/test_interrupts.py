"""Ctrl-C: the first one waits for the next commit, the second one does not."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest

from fedfactor.runs.interrupts import Stop, each, resume_command


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_ctrl_c_stops_at_the_next_commit() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with Stop(said.append) as stop:
        stop.listen({"event": "start"})
        stop.listen({"event": "committed", "round": 0})
        press()
        assert stop.asked and "stopping when this round is committed" in said[0]
        stop.listen({"event": "answered", "round": 1})
        stop.listen({"event": "round", "round": 1})
        assert stop.round == 0
        with pytest.raises(KeyboardInterrupt):
            stop.listen({"event": "committed", "round": 1})
        assert stop.round == 1 and len(said) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_ctrl_c_stops_immediately() -> None:
    with Stop() as stop:
        stop.listen({"event": "resumed", "round": 4})
        press()
        with pytest.raises(KeyboardInterrupt):
            press()
        assert stop.round == 4


def test_all_listeners_hear_all_events_in_order() -> None:
    heard: list[tuple[str, str]] = []
    listen = each(lambda event: heard.append(("a", event["event"])), lambda event: heard.append(("b", event["event"])))
    listen({"event": "start"})
    listen({"event": "committed"})
    assert heard == [("a", "start"), ("b", "start"), ("a", "committed"), ("b", "committed")]


@pytest.mark.parametrize(
    "words", [["run", "my recipe.toml", "--out", "o"], ["run", "demo", "--resume"], ["run", "$HOME/x.toml"]], ids=str
)
def test_the_command_that_resumes_is_one_that_a_shell_understands(words: list[str]) -> None:
    expected = ["fedfactor", *words, *([] if "--resume" in words else ["--resume"])]
    assert shlex.split(resume_command(["/usr/lib/python3/fedfactor/__main__.py", *words])) == expected


def test_a_program_that_is_not_on_the_path_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "venv" / "fedfactor"
    assert resume_command([str(program), "run", "demo"]) == "venv/fedfactor run demo --resume"
