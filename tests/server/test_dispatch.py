"""Jobs to clients and their replies: order, counted bytes, and replies that nobody asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import Tensor

from fedfactor.engines import Done, Inline, Job
from fedfactor.protocol.message import Bytes, Message, decode
from fedfactor.protocol.plan import Reply
from fedfactor.protocol.setup import Setup
from fedfactor.server import dispatch, replies
from fedfactor.server.dispatch import Exchange
from fedfactor.server.replies import LONGEST_REASON, Answers, Failure
from fedfactor.server.store import Store
from fedfactor.testing.federation import Recording
from tests.helpers.tiny import run

COHORT = [4, 1, 3]
ORDER = [1, 3, 4]


@dataclass(frozen=True)
class Changing(Inline):
    """An engine that changes the list of all answers."""

    change: Callable[[list[Done]], list[Done]]

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        yield from self.change(list(super().run(setup, jobs)))


def trained(
    engine: Inline, events: list[dict[str, Any]] | None = None, store: Store | None = None
) -> tuple[Answers, list[Reply]]:
    """Train the cohort for one round from the start; return the replies as they were folded."""
    start = run(rounds=0, engine=engine)
    federation, server, folded = start.federation, start.server, list[Reply]()
    cohort = [federation.dispatch.participant(client, 0) for client in COHORT]
    listen = events.append if events is not None else lambda event: None
    store = store or federation.store
    longest = lambda who: -who.client  # noqa: E731
    exchange = Exchange(server, server.tensors, store, listen)
    federation.dispatch.train(exchange, cohort, longest, folded.append)
    return exchange.answers, folded


def test_no_reply_is_in_memory_while_another_one_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With early replies on disk, as large ones are."""
    monkeypatch.setattr(replies, "KEPT_BYTES", 0)
    held: list[weakref.ref[Tensor]] = []

    def watched(data: Bytes) -> Message:
        assert not [one for one in held if one() is not None]
        message = decode(data)
        held.extend(map(weakref.ref, message.tensors.values()))
        return message

    monkeypatch.setattr(dispatch, "decode", watched)
    run(engine=Changing(lambda done: [done[2], done[1], done[0], *done[3:]]), rounds=1, cohort=6)
    assert len(held) > 6


def test_replies_are_folded_in_the_order_of_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`trained` estimates that jobs of smaller numbers take longest: they start first, whoever answers first."""
    engine, events = Recording(), list[dict[str, Any]]()
    answers, folded = trained(engine, events)
    assert [decode(message).fields["client"] for message in engine.down] == ORDER
    assert [event["client"] for event in events] == ORDER
    assert [reply.client for reply in folded] == [report["client"] for report in answers.reports] == ORDER
    for kept in (replies.KEPT_BYTES, 0):  # early replies wait in memory, or on disk
        monkeypatch.setattr(replies, "KEPT_BYTES", kept)
        events.clear()
        again, reverse = trained(Changing(lambda done: done[::-1]), events)
        assert [event["client"] for event in events] == ORDER[::-1], "events come when answers do"
        assert again.reports == answers.reports and again.bytes_down == answers.bytes_down
        for ours, theirs in zip(reverse, folded, strict=True):
            assert ours.client == theirs.client and ours.plan == theirs.plan
            for some, others in ((ours.tensors, theirs.tensors), (ours.reference, theirs.reference)):
                assert some.keys() == others.keys() and all(some[name].equal(others[name]) for name in others)


def test_early_replies_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one reply, the others wait on disk, and their encoded bytes are freed."""
    _, (reply, *_) = trained(Inline())
    size = sum(tensor.nbytes for tensor in reply.tensors.values())
    monkeypatch.setattr(replies, "KEPT_BYTES", size)
    order, spooled = list(range(5)), list[int]()
    turns = replies.Turns(
        order, None, lambda client, data: (spooled.append(client), Failure(client, bytes(data).decode()))[1]
    )
    for client in order[:0:-1]:
        turns.put(client, (reply, {"client": client}), str(client).encode())
    assert not list(turns.due()) and spooled == []
    turns.put(0, Failure(0, "died"), b"")
    out = list(turns.due())
    assert [one.reason if isinstance(one, Failure) else one[1]["client"] for one in out] == ["died", "1", "2", "3", 4]
    assert spooled == [1, 2, 3]


@pytest.mark.parametrize(("method", "codec"), [("fedrolex", "float32"), ("prism", "float16"), ("fedcac", "float32")])
def test_what_does_not_fit_in_memory_is_computed_again(
    method: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = run(method, codec=codec)
    monkeypatch.setattr(replies, "KEPT_BYTES", 0)
    again = run(method, codec=codec, engine=Changing(lambda done: done[::-1]))
    assert kept.summary["weights_sha256"] == again.summary["weights_sha256"]


def test_bytes_are_the_lengths_of_the_messages() -> None:
    engine = Recording()
    answers, _replies = trained(engine)
    assert answers.bytes_down == sum(map(len, engine.down)) > 0
    assert answers.bytes_up == sum(map(len, engine.up)) > 0
    assert answers.busy > 0 and answers.failures == [] and answers.late == 0


def test_a_failure_names_the_client_and_the_tensor() -> None:
    def lie(done: list[Done]) -> list[Done]:
        return [replace(one, reply=bytes(one.reply)[:-4] + b"\xff" * 4) if one.client == 1 else one for one in done]  # type: ignore[arg-type]

    answers, replies = trained(Changing(lie))
    (failure,) = answers.failures
    assert failure.client == 1 and failure.reason.startswith("training diverged: upload: 'hidden.weight' holds NaN")
    assert [reply.client for reply in replies] == [3, 4]
    assert len(Failure(1, "x" * 1000).reason) == LONGEST_REASON


def test_late_and_second_answers_are_dropped() -> None:
    def late(done: list[Done]) -> list[Done]:
        return [replace(done[0], reply=b"of an earlier round", late=True), *done, replace(done[0], reply=b"again")]

    answers, replies = trained(Changing(late))
    assert answers.late == 1 and [reply.client for reply in replies] == ORDER
    assert answers.failures == [Failure(1, "was not asked in this round, or answered twice")]


def test_a_foreign_reply_is_rejected() -> None:
    answers, _replies = trained(Changing(lambda done: [done[0], replace(done[0], client=3), done[2]]))
    assert [failure.client for failure in answers.failures] == [3]
    assert "expected one of kind trained for {'client': 3" in answers.failures[0].reason


def test_an_answer_from_someone_not_asked_is_counted_and_ignored() -> None:
    answers, replies = trained(Changing(lambda done: [*done, replace(done[0], client=77)]))
    assert [reply.client for reply in replies] == ORDER
    assert [failure.client for failure in answers.failures] == [77]


def test_a_client_that_does_not_answer_is_a_failure() -> None:
    answers, _replies = trained(Changing(lambda done: [replace(done[0], reply=None, failure="out of memory"), done[1]]))
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
