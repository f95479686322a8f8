"""Buffered rounds by real arrival, on a grid whose replies come in the order that a test gives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message

from fedfactor.engines.flower.adapter import pack, unpack
from fedfactor.protocol.message import Message as Wire
from fedfactor.protocol.message import decode, encode
from fedfactor.runs.execute import run as run_inline
from fedfactor.runs.recipe import Recipe
from fedfactor.server.replies import QuorumLost
from fedfactor.server.result import Result
from tests.helpers.deployment import events
from tests.helpers.grid import FIRST_ID, Deployment, kind_of, outcome, recipe


def buffered(method: str = "fedavg", steps: int = 3, **sections: Any) -> Recipe:
    """Four clients, all of which train at any time; the server takes a step after each two replies."""
    capacities = {"levels": [1.0], "shares": [1.0]}
    given = {"rounds": {"mode": "buffered", "buffer": 2}, "capacities": capacities, "evaluate": {"clients": "none"}}
    return recipe(method, **{**given, **sections, "train": {"rounds": steps, **sections.get("train", {})}})


class Killed(BaseException):
    """The server is killed."""


class Ordered(Deployment):
    """A deployment whose training replies arrive in a given order of clients; after the last, the server is killed."""

    def __init__(self, folder: Path, chosen: Recipe, order: Iterable[int], **settings: Any) -> None:
        # Nobody is asked while jobs are sent, which takes longer here than training.
        super().__init__(folder, chosen, **{"poll": 5.0, **settings})
        self.order = list(order)
        self._pull = self.grid.pull_messages
        self.grid.pull_messages = self._pull_in_order  # type: ignore[method-assign]

    def _pull_in_order(self, message_ids: Iterable[str]) -> list[Message]:
        (number,) = message_ids
        asked = next(message for message in self.grid.pushed if message.metadata.message_id == number)
        if kind_of(asked) == "train":
            if not self.order:
                raise Killed
            if self.order[0] != asked.metadata.dst_node_id - FIRST_ID:
                return []
            self.order.pop(0)
        return self._pull([number])

    def jobs(self) -> list[tuple[int, int, str]]:
        """Return client, round and private state of each training job that was sent, in order."""
        sent = [unpack(message.content) for message in self.grid.pushed if kind_of(message) == "train"]
        found = [(decode(data or b"").fields, fields["state"]) for data, fields in sent]
        return [(job["client"], job["round"], state) for job, state in found]


def rounds_of(result: Result) -> list[dict[str, Any]]:
    return [event for event in result.history if event["event"] == "round"]


def adding(amount: float) -> Any:
    """Replace what a client has learned: each of its numbers grows by an amount."""

    def tamper(message: Message, reply: Message) -> Message:
        (job, _), (data, fields) = unpack(message.content), unpack(reply.content)
        download, upload = decode(job or b""), decode(data or b"")
        moved = {n: t + amount if t.is_floating_point() else t for n, t in download.tensors.items()}
        upload.fields["samples"] = 10
        return Message(pack(encode(Wire(upload.kind, upload.fields, moved)), fields), reply_to=message)

    return tamper


def test_replies_count_in_the_order_of_their_arrival_and_old_ones_less(tmp_path: Path) -> None:
    """Client n adds n + 1 to each weight. All start in round 1; the rest follows from who answers."""
    deployed = Ordered(tmp_path, buffered(), [2, 0, 3, 2, 1, 0])
    for client in range(4):
        deployed.grid.tamper[FIRST_ID + client] = adding(client + 1.0)
    result = deployed.serve()
    events = [event["buffered"] for event in rounds_of(result)]
    assert [(event["clients"], event["ages"]) for event in events] == [
        ([2, 0], [0, 0]),
        ([3, 2], [1, 0]),  # client 3 started before the server's first step
        ([1, 0], [2, 1]),
    ]
    assert [event["training"] for event in events] == [[1, 3], [0, 1], [2, 3]]
    assert all(len(event["seconds"]) == 2 and min(event["seconds"]) >= 0 for event in events)
    jobs = deployed.jobs()
    started = [sorted(client for client, round, _ in jobs if round == now) for now in range(3)]
    assert started == [[0, 1, 2, 3], [0, 2], [2, 3]]
    change = (3 + 1) / 2 + (4 / math.sqrt(2) + 3) / 2 + (2 / math.sqrt(3) + 1 / math.sqrt(2)) / 2
    first = result.federation.first
    for name in ("conv1.weight", "fc.bias"):
        moved = result.server.tensors[name] - first[name]
        assert moved.flatten().tolist() == pytest.approx([change] * moved.numel(), abs=1e-4)
    assert [len(event["cohort"]) for event in rounds_of(result)] == [4, 2, 2]
    assert result.summary["failures"] == 0


def test_a_client_that_answers_is_replaced_before_the_server_steps(tmp_path: Path) -> None:
    one = buffered(steps=1, rounds={"mode": "buffered", "concurrency": 2, "buffer": 2})
    first, second, third, _ = one.rounds.cohort_of(one.training.seed, 0, 4)
    deployed = Ordered(tmp_path, one, [second, third])
    event = rounds_of(deployed.serve())[0]
    assert [client for client, _, _ in deployed.jobs()] == [first, second, third]
    assert event["buffered"]["clients"] == [second, third] and event["buffered"]["training"] == [first]


@pytest.mark.parametrize("method", ["fedavg", "pfedpara"])
def test_a_full_buffer_of_all_clients_is_a_synchronous_round(method: str, tmp_path: Path) -> None:
    """Private states included: a receipt is committed with the step that uses the reply."""
    full = buffered(method, rounds={"mode": "buffered", "buffer": 4}, evaluate={"clients": "all"})
    synchronous = buffered(method, rounds={}, evaluate={"clients": "all"})
    found, expected = outcome(Deployment(tmp_path, full).serve()), outcome(run_inline(synchronous))
    for event in found["events"][1:]:
        assert event.pop("buffered")["ages"] == [0] * 4
    assert found == expected


def test_clients_are_measured_while_others_train(tmp_path: Path) -> None:
    """All are asked for their scores; those that trained in this step have measured their own model too."""
    one = buffered("fedper", evaluate={"clients": "all", "every": 2})
    events = rounds_of(Ordered(tmp_path, one, [2, 0, 3, 2, 1, 0]).serve())
    assert [event.get("all", {}).get("who") for event in events] == [None, [0, 1, 2, 3], [0, 1, 2, 3]]
    assert [event.get("selected_after", {}).get("who") for event in events] == [None, [3, 2], [1, 0]]


def test_a_resumed_run_forgets_what_was_on_its_way_and_counts_nothing_twice(tmp_path: Path) -> None:
    """Killed in the second step, when it had used a reply of client 3 that was not committed."""
    deployed = Ordered(tmp_path, buffered("pfedpara"), [2, 0, 3])
    with pytest.raises(Killed):
        deployed.serve()
    before = len(deployed.jobs())
    deployed.order = [3, 1, 0, 2]
    result = deployed.serve()
    events = rounds_of(result)
    assert [(event["buffered"]["clients"], event["buffered"]["ages"]) for event in events] == [
        ([2, 0], [0, 0]),
        ([3, 1], [0, 0]),
        ([0, 2], [1, 1]),
    ]
    again = {client: (round, state) for client, round, state in deployed.jobs()[before : before + 4]}
    assert {round for round, _ in again.values()} == {1}, "all start again, from the committed model"
    assert again[1] == again[3] == (1, "") and again[0][1] and again[2][1], "and from the committed states"
    totals = result.summary["totals"]
    assert totals["bytes_up"] == sum(event["bytes_up"] for event in events) and totals["failures"] == 0


def test_a_node_that_is_lost_is_replaced_and_its_state_stays(tmp_path: Path) -> None:
    """Client 3 gets a job, and its node is gone before it answers; later it is back."""
    deployed = Ordered(tmp_path, buffered("pfedpara", steps=4), [3, 0, 3, 1, 2, 0, 1, 3, 2])
    lost = []

    def lose(message: Message, reply: Message) -> Message:
        if deployed.jobs()[-1][1] == 1 and not lost:
            lost.append(unpack(reply.content)[1]["state"])
            return Message(Error(5, "Node unavailable"), reply_to=message)
        return reply

    deployed.grid.tamper[FIRST_ID + 3] = lose
    events = rounds_of(deployed.serve())
    assert [event["failures"] for event in events] == [
        [], [{"client": 3, "reason": "the node was lost: Node unavailable"}], [], []
    ]  # fmt: skip
    assert [event["buffered"]["clients"] for event in events] == [[3, 0], [1, 2], [0, 1], [3, 2]]
    states = [state for client, _, state in deployed.jobs() if client == 3]
    assert states[0] == "" and states[1] == states[2] != "" and lost[0] not in states


def test_a_client_has_the_deadline_from_its_own_job_and_its_late_reply_is_dropped(tmp_path: Path) -> None:
    """Client 1 is silent, until its deadline has passed and it has got another job; meanwhile, the others go on."""
    deployed = Deployment(tmp_path, buffered(steps=100), deadline=0.2)
    silent, grid = FIRST_ID + 1, deployed.grid
    grid.delay[silent] = math.inf

    def wake(message: Message, reply: Message) -> Message:
        if len([one for one in grid.pushed if kind_of(one) == "train" and one.metadata.dst_node_id == silent]) == 2:
            grid._due = dict.fromkeys(grid._due, 0.0)
            grid.delay = {}
        return reply

    def end(message: Message, reply: Message) -> Message:
        if any("late" in event for event in events(deployed.run_dir)):
            raise Killed
        return reply

    grid.tamper = {silent: wake, FIRST_ID: end}
    with pytest.raises(Killed):
        deployed.serve()
    found = events(deployed.run_dir)
    failures = [failure for event in found for failure in event["failures"]]
    assert failures == [{"client": 1, "reason": "did not answer within 0.2 seconds"}]
    failed = next(place for place, event in enumerate(found) if event["failures"])
    assert all(1 in event["buffered"]["training"] for event in found[:failed])
    assert [event.get("late", 0) for event in found].count(1) == 1 and failed < len(found) - 1
    assert all(age <= 1 for event in found for age in event["buffered"]["ages"]), (
        "the first job of client 1 is not used"
    )


def test_too_few_valid_replies_end_the_run_with_the_reason(tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, buffered(train={"quorum": 1.0}))
    for client in (0, 1, 3):
        deployed.grid.tamper[FIRST_ID + client] = lambda message, reply: Message(Error(2, "no"), reply_to=message)
    with pytest.raises(QuorumLost, match=r"round 1: 1 of 2 clients sent a valid reply.*the app failed on the node"):
        deployed.serve()


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"rounds": {"mode": "buffered", "buffer": 5}}, "a buffer of 5 replies needs at least as many clients"),
        ({"method": "fedhm"}, "fedhm needs synchronous rounds"),
        ({"aggregation": {"strikes": 2}}, "strikes is for synchronous rounds"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_round(
    sections: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    deployed = Deployment(tmp_path, buffered(**sections))
    with pytest.raises(ValueError, match=reason):
        deployed.serve()
    assert "train" not in map(kind_of, deployed.grid.pushed) and not (deployed.run_dir / "recipe.toml").exists()


def test_without_real_clients_a_fleet_is_needed() -> None:
    with pytest.raises(ValueError, match=r"needs a \[fleet\].* or real clients on Flower"):
        run_inline(buffered())
