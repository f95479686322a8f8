"""Clients one after another in this process."""

from __future__ import annotations

import pytest
import torch

from fedfactor.engines import Inline, Job
from fedfactor.protocol.message import decode
from fedfactor.protocol.setup import Setup
from tests.helpers.tiny import run


def jobs(*clients: int) -> tuple[Inline, list[Job], Setup]:
    start = run(rounds=0)
    federation, server = start.federation, start.server
    cohort = [federation.dispatch.participant(client, 0) for client in clients]
    return (
        Inline(),
        list(federation.dispatch.jobs("train", server, server.tensors, cohort, federation.store)),
        federation.setup,
    )


def test_a_client_that_fails_does_not_affect_the_others() -> None:
    engine, asked, setup = jobs(3, 1, 2)
    asked[1] = Job(1, [b"no message"], None)
    first, failed, last = engine.run(setup, asked)
    assert (first.client, failed.client, last.client) == (3, 1, 2)
    assert failed.reply is None and failed.failure.startswith("BadMessage: a header of")
    assert decode(first.reply or b"").fields["client"] == 3 and decode(last.reply or b"").fields["client"] == 2
    assert first.seconds > 0


@pytest.mark.parametrize("broken_off", [False, True])
def test_one_thread_while_it_runs_and_the_callers_afterwards(broken_off: bool) -> None:
    engine, asked, setup = jobs(0, 1)
    torch.set_num_threads(2)
    try:
        running = engine.run(setup, asked)
        next(running)
        assert torch.get_num_threads() == 1
        if broken_off:
            running.close()
        else:
            list(running)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
