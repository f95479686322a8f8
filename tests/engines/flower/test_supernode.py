"""The SuperNode that looks for messages more often after it has answered one."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

import pytest

from fedfactor.engines.flower import supernode

LOOP = import_module("flwr.supernode.start_client_internal")


def test_flowers_loop_sleeps_as_we_expect_and_uses_nothing_else_of_time() -> None:
    assert re.findall(r"\btime\.(\w+\(.*?\))", inspect.getsource(LOOP)) == ["sleep(3)", "sleep(0.5)", "sleep(0.5)"]


def test_pauses_double_up_to_flowers_own_and_start_again_after_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    monkeypatch.setattr(supernode.time, "sleep", slept.append)
    pauses = supernode.Pauses()
    for seconds in (3, 3, 3, 3, 3, 3, 3, 0.5, 0.5, 3, 3):
        pauses.sleep(seconds)
    assert slept == [0.1, 0.2, 0.4, 0.8, 1.6, 3, 3, 0.1, 0.1, 0.1, 0.2]


def test_the_script_runs_flowers_loop_with_these_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOOP, "time", LOOP.time)  # put back after the test
    started = list[object]()
    command = import_module("flwr.supernode.cli.flower_supernode")
    monkeypatch.setattr(command, "flower_supernode", lambda: started.append(LOOP.time))
    supernode.main()
    assert isinstance(started[0], supernode.Pauses)
