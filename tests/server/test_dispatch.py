"""Jobs to clients and their replies: order, counted bytes, and replies that nobody asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fedfactor.engines import Done, Inline, Job
from fedfactor.protocol.message import decode
from fedfactor.protocol.setup import Setup
from fedfactor.server.dispatch import LONGEST_REASON, Answers, Failure
from fedfactor.testing.federation import Recording
from tests.helpers.tiny import run

COHORT = [4, 1, 3]


@dataclass(frozen=True)
class Changing(Inline):
    """An engine that changes the list of all answers."""

    change: Callable[[list[Done]], list[Done]]

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        yield from self.change(list(super().run(setup, jobs)))


def trained(engine: Inline, events: list[dict[str, Any]] | None = None) -> Answers:
    """Train the cohort for one round from the start."""
    start = run(rounds=0, engine=engine)
    federation, server = start.federation, start.server
    cohort = [federation.dispatch.participant(client, 0) for client in COHORT]
    listen = events.append if events is not None else lambda event: None
    return federation.dispatch.train(server, server.tensors, cohort, federation.store, lambda who: -who.client, listen)


def test_answers_are_in_the_order_of_the_cohort() -> None:
    """`trained` estimates that jobs of smaller numbers take longest: they start first."""
    engine, events = Recording(), list[dict[str, Any]]()
    answers = trained(engine, events)
    assert [decode(message).fields["client"] for message in engine.down] == sorted(COHORT)
    assert [event["client"] for event in events] == sorted(COHORT)
    assert [reply.client for reply in answers.replies] == [report["client"] for report in answers.reports] == COHORT
    reverse = trained(Changing(lambda done: done[::-1]))
    assert [reply.client for reply in reverse.replies] == COHORT
    for ours, theirs in zip(reverse.replies, answers.replies, strict=True):
        assert all(ours.tensors[name].equal(theirs.tensors[name]) for name in theirs.tensors)


def test_bytes_are_the_lengths_of_the_messages() -> None:
    engine = Recording()
    answers = trained(engine)
    assert answers.bytes_down == sum(map(len, engine.down)) > 0
    assert answers.bytes_up == sum(map(len, engine.up)) > 0
    assert answers.busy > 0 and answers.failures == [] and answers.late == 0


def test_a_failure_names_the_client_and_the_tensor() -> None:
    def lie(done: list[Done]) -> list[Done]:
        return [replace(one, reply=bytes(one.reply)[:-4] + b"\xff" * 4) if one.client == 1 else one for one in done]  # type: ignore[arg-type]

    answers = trained(Changing(lie))
    (failure,) = answers.failures
    assert failure.client == 1 and failure.reason.startswith("training diverged: upload: 'hidden.weight' holds NaN")
    assert [reply.client for reply in answers.replies] == [4, 3] and set(answers.states) <= {4, 3}
    assert len(Failure(1, "x" * 1000).reason) == LONGEST_REASON


def test_late_and_second_answers_are_dropped() -> None:
    def late(done: list[Done]) -> list[Done]:
        return [replace(done[0], reply=b"of an earlier round", late=True), *done, replace(done[0], reply=b"again")]

    answers = trained(Changing(late))
    assert answers.late == 1 and [reply.client for reply in answers.replies] == COHORT
    assert answers.failures == [Failure(1, "was not asked in this round, or answered twice")]


def test_a_foreign_reply_is_rejected() -> None:
    answers = trained(Changing(lambda done: [done[0], replace(done[0], client=3), done[2]]))
    assert [failure.client for failure in answers.failures] == [3]
    assert "expected one of kind trained for {'client': 3" in answers.failures[0].reason


def test_an_answer_from_someone_not_asked_is_counted_and_ignored() -> None:
    answers = trained(Changing(lambda done: [*done, replace(done[0], client=77)]))
    assert [reply.client for reply in answers.replies] == COHORT
    assert [failure.client for failure in answers.failures] == [77]


def test_a_client_that_does_not_answer_is_a_failure() -> None:
    answers = trained(Changing(lambda done: [replace(done[0], reply=None, failure="out of memory"), done[1]]))
    assert answers.failures == [Failure(4, "did not answer"), Failure(1, "out of memory")]


def test_the_longest_jobs_come_first() -> None:
    engine = Recording()
    run("heterofl", engine=engine, rounds=1, cohort=6, evaluate_every=0, evaluate_clients="none")
    jobs = [message for message in map(decode, engine.down) if message.kind == "train"]
    sizes = [job.fields["capacity"] for job in jobs]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 2


def test_evaluations_without_a_valid_reply_are_an_error() -> None:
    start = run(rounds=0, engine=Changing(lambda done: [replace(one, reply=b"") for one in done]))
    dispatch, store = start.federation.dispatch, start.federation.store
    with pytest.raises(RuntimeError, match="no client sent a valid reply to a job of kind 'evaluate'"):
        dispatch.gather("evaluate", "evaluated", start.server, [dispatch.participant(0, 0)], store)
