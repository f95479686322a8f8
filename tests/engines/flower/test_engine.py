"""The engine on a grid: the same bits as in one process, whatever nodes and servers do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedfactor import load
from fedfactor.engines.flower.adapter import pack, unpack
from fedfactor.engines.flower.engine import MOST_UNANSWERED
from fedfactor.protocol.coding import sections
from fedfactor.protocol.message import Message as Wire
from fedfactor.protocol.message import decode, encode
from fedfactor.protocol.states import RECEIPT, Elsewhere
from fedfactor.registry import entries
from fedfactor.runs.directory import RunError, left_out
from fedfactor.runs.execute import run as run_inline
from fedfactor.runs.recipe import Recipe
from fedfactor.server.result import Result
from tests.helpers.grid import FIRST_ID, Deployment, Tamper, kind_of, outcome, recipe

NAMED = ("fedavg", "fedpara", "pfedpara", "flanc", "fedhm", "prism", "feddecomp")


def short(method: str) -> Recipe:
    """Three rounds of four clients; of methods that no promise names, two rounds of three."""
    return recipe(method, train={} if method in NAMED else {"rounds": 2, "cohort": 3})


@pytest.mark.parametrize("method", list(entries("methods")))
def test_same_bits_as_inline(method: str, tmp_path: Path) -> None:
    chosen = short(method)
    deployed = Deployment(tmp_path, chosen)
    expected = outcome(run_inline(chosen))
    assert outcome(deployed.serve()) == expected
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["private_sha256"] == expected["private_sha256"] and summary["failures"] == 0


def test_states_of_optimizers_and_codecs_stay_on_the_nodes_too(tmp_path: Path) -> None:
    chosen = recipe("pfedpara", optimizer={"name": "scaffold"}, codec={"name": "topk"}, evaluate={"clients": "all"})
    assert outcome(Deployment(tmp_path, chosen).serve()) == outcome(run_inline(chosen))


def test_the_state_of_a_clients_optimizer_stays_on_its_node(tmp_path: Path) -> None:
    kept = recipe("fedper", train={"optimizer": {"name": "adamw", "keep_state": True}, "lr": 0.01})
    fresh = recipe("fedper", train={"optimizer": {"name": "adamw"}, "lr": 0.01})
    deployed = Deployment(tmp_path, kept)
    expected = outcome(run_inline(kept))
    assert outcome(deployed.serve()) == expected != outcome(run_inline(fresh))
    answers = [data for message in deployed.grid.pulled if (data := unpack(message.content)[0]) is not None]
    assert answers and {part for data in answers for part in sections(decode(data).tensors)} == {"model"}


def test_answers_are_pulled_while_jobs_are_sent_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So neither the SuperLink nor the server holds the answers of a whole cohort."""
    deployed, waiting = Deployment(tmp_path, recipe("fedavg", train={"rounds": 1}), poll=1e-6), list[int]()
    push = deployed.grid.push_messages

    def counted(messages: Iterable[Message]) -> list[str]:
        waiting.append(len(deployed.grid._replies))
        return push(messages)

    monkeypatch.setattr(deployed.grid, "push_messages", counted)
    deployed.serve()
    assert waiting[-4:] == [0] * 4


def test_a_message_is_one_array_and_the_counted_bytes(tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, recipe("pfedpara"))
    totals = deployed.serve().summary["totals"]
    down, up = 0, 0
    for messages, way in ((deployed.grid.pushed, "down"), (deployed.grid.pulled, "up")):
        for message in messages:
            data, _ = unpack(message.content)
            if message.metadata.message_type == "query":
                assert data is None
                continue
            assert [len(record) for record in message.content.array_records.values()] == [1]
            assert data is not None
            size = 0 if decode(data).kind in ("store", "stored") else len(data)  # not a part of training
            down, up = (down + size, up) if way == "down" else (down, up + size)
    assert (down, up) == (totals["bytes_down"], totals["bytes_up"])


def test_no_private_tensor_leaves_a_node(tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, recipe("pfedpara"))
    result = deployed.serve()
    private = set(result.federation.setup.kept(1.0))
    assert private
    for message in deployed.grid.pulled:
        data, fields = unpack(message.content)
        assert set(fields) <= {"state", "seconds", "fedfactor", "client", "capacity", "facts", "samples", "base"}
        if data is not None:
            assert not private & set(sections(decode(data).tensors).get("model", {}))
    kept = [path for path in (deployed.run_dir / "checkpoint" / "client").rglob("*.*") if path.is_file()]
    assert len(kept) == 4 and all(path.read_bytes().startswith(RECEIPT) and path.stat().st_size == 72 for path in kept)
    with pytest.raises(Elsewhere, match="on the client's own device"):
        result.client_model(0)
    with pytest.raises(RunError, match="client 0: the private state is on the client's own device"):
        load(deployed.run_dir).private(0)


def test_a_run_of_one_machine_cannot_move_to_flower_with_its_states(tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, recipe("pfedpara"))
    run_inline(recipe("pfedpara", train={"rounds": 1}), tmp_path / "run")
    deployed = Deployment(tmp_path, recipe("pfedpara"))
    (tmp_path / "run" / "recipe.toml").write_text(recipe("pfedpara").to_toml())
    with pytest.raises(ValueError, match="started on one machine"):
        deployed.serve()


# Stopped and carried on.


class Stop(BaseException):
    """The server is killed."""


def stopping(deployed: Deployment, what: str, after: int) -> None:
    """Have the server end at its n-th push or pull."""
    original, count = getattr(deployed.grid, what), [0]

    def stop(messages: Iterable[Any]) -> Any:
        count[0] += 1
        if count[0] > after:
            raise Stop
        return original(messages)

    setattr(deployed.grid, what, stop)


def test_a_server_killed_anywhere_carries_on_to_the_same_bits(tmp_path: Path) -> None:
    chosen = recipe("pfedpara", train={"rounds": 2, "cohort": 3}, evaluate={"clients": "all"})
    expected, landed = outcome(run_inline(chosen)), 0
    for what, after in [("push_messages", n) for n in (0, 5, 8, 12)] + [("pull_messages", n) for n in (2, 3)]:
        folder = tmp_path / f"{what}-{after}"
        folder.mkdir()
        deployed = Deployment(folder, chosen)
        usual = deployed.grid.push_messages, deployed.grid.pull_messages
        stopping(deployed, what, after)
        with pytest.raises(Stop):
            deployed.serve()
        landed += 1
        deployed.grid.push_messages, deployed.grid.pull_messages = usual  # type: ignore[method-assign]
        assert outcome(deployed.serve()) == expected, (what, after)
    assert landed == 6


def built_on(deployed: Deployment, node: int) -> list[str]:
    """Return the states that the jobs of a node named."""
    jobs = [m for m in deployed.grid.pushed if kind_of(m) == "train" and m.metadata.dst_node_id == node]
    return [unpack(job.content)[1]["state"] for job in jobs]


def test_a_node_that_was_killed_before_it_answered_does_the_round_again_from_the_state_before(tmp_path: Path) -> None:
    chosen = recipe("pfedpara", train={"rounds": 3})
    deployed = Deployment(tmp_path, chosen, deadline=0.3)
    dropped = []

    def killed_once(message: Message, reply: Message) -> Message | None:
        if decode(unpack(message.content)[0] or b"").fields["round"] == 1 and not dropped:
            dropped.append(unpack(reply.content)[1]["state"])
            return None
        return reply

    deployed.grid.tamper[FIRST_ID + 2] = killed_once
    result = deployed.serve()
    failures = {event["round"]: event["failures"] for event in result.history if event["event"] == "round"}
    assert failures == {1: [], 2: [{"client": 2, "reason": "did not answer within 0.3 seconds"}], 3: []}
    bases = built_on(deployed, FIRST_ID + 2)
    assert bases[0] == "" and bases[1] == bases[2] != dropped[0], (
        "round 3 builds on round 1, not on what was not accepted"
    )
    left = sorted(path.name for path in next((tmp_path / "node-2").iterdir()).joinpath("client-2").iterdir())
    assert [name.partition(".")[0] for name in left if name[0].isdigit()] == ["1", "3"], (
        "the state before and the last; the rejected one is gone"
    )


def test_a_node_that_is_away_for_a_round_finds_its_state_again(tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, recipe("pfedpara", train={"rounds": 3}))
    away = FIRST_ID + 1
    original = deployed.grid.get_nodes

    def get_nodes() -> Any:
        journal = deployed.run_dir / "metrics.jsonl"
        done = journal.read_text().count('"event": "round"') if journal.exists() else 0
        deployed.grid.offline = {away} if done == 1 else set()
        return original()

    deployed.grid.get_nodes = get_nodes  # type: ignore[method-assign]
    result = deployed.serve()
    failures = [[(f["client"], f["reason"]) for f in event["failures"]] for event in result.history[1:]]
    assert failures == [[], [(1, "is not connected")], []]
    first, last = built_on(deployed, away)
    assert first == "" and last, "its third round builds on its first"


@pytest.mark.parametrize(("choice", "failed"), [("fail", True), ("restart", False)])
def test_a_state_that_is_gone_is_named_or_replaced_as_asked(choice: str, failed: bool, tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, recipe("pfedpara", train={"rounds": 2}), **{"lost-state": choice})
    rounds = [0]

    def wipe(message: Message, reply: Message) -> Message:
        rounds[0] += 1
        for path in (tmp_path / "node-3").rglob("1.*"):
            path.unlink()
        return reply

    deployed.grid.tamper[FIRST_ID + 3] = wipe
    result = deployed.serve()
    failures = result.history[-1]["failures"]
    assert rounds == [2] and [f["client"] for f in failures] == ([3] if failed else [])
    if failed:
        assert "Lost: the private state" in failures[0]["reason"] and "not in" in failures[0]["reason"]


# Hostile nodes.


def changed(change: Callable[[Wire], Wire]) -> Callable[[Message, Message], Message]:
    """Change what is in an upload and leave all else as it is."""

    def tamper(message: Message, reply: Message) -> Message:
        data, fields = unpack(reply.content)
        return Message(pack(encode(change(decode(data or b""))), fields), reply_to=message)

    return tamper


def with_nan(upload: Wire) -> Wire:
    name = max(upload.tensors)
    return Wire(upload.kind, upload.fields, {**upload.tensors, name: torch.full_like(upload.tensors[name], torch.nan)})


def with_another_shape(upload: Wire) -> Wire:
    return Wire(upload.kind, upload.fields, {**upload.tensors, max(upload.tensors): torch.zeros(3)})


def of_somebody_else(upload: Wire) -> Wire:
    return Wire(upload.kind, {**upload.fields, "client": 0}, upload.tensors)


def content(records: dict[str, Any]) -> Callable[[Message, Message], Message]:
    return lambda message, reply: Message(RecordDict(records), reply_to=message)


def garbage(data: bytes) -> Callable[[Message, Message], Message]:
    return lambda message, reply: Message(pack(data, {"state": "", "seconds": 0.0}), reply_to=message)


def from_another_node(message: Message, reply: Message) -> Message:
    reply.metadata.__dict__["_src_node_id"] = FIRST_ID
    return reply


def state_of_no_hash(message: Message, reply: Message) -> Message:
    data, fields = unpack(reply.content)
    return Message(pack(data, {**fields, "state": "../../etc/passwd"}), reply_to=message)


def time_that_cannot_be(message: Message, reply: Message) -> Message:
    data, fields = unpack(reply.content)
    return Message(pack(data, {**fields, "seconds": float("inf")}), reply_to=message)


def answering_another_message(message: Message, reply: Message) -> Message:
    reply.metadata.__dict__["_reply_to_message_id"] = "0" * 64
    return reply


def damaged(contents: dict[str, bytes]) -> dict[str, bytes]:
    """Objects that are none: what flwr raises when it puts an answer together."""
    return {number: b"\x07" * len(content) for number, content in contents.items()}


def incomplete(contents: dict[str, bytes]) -> dict[str, bytes]:
    return dict(list(contents.items())[-1:])


ARRAY = ArrayRecord({"message": Array("float32", (1,), "numpy.ndarray", b"\0\0\0\0")})
HOSTILE = {
    "NaN": (changed(with_nan), "NaN, infinity"),
    "wrong shape": (changed(with_another_shape), r"\[3\], expected"),
    "foreign client": (changed(of_somebody_else), "expected one of kind trained for"),
    "another node": (from_another_node, "answered instead of"),
    "garbage": (garbage(b"\x07" * 1000), "header of"),
    "empty": (garbage(b""), "too few"),
    "no fields": (content({}), "its records are not `fields`"),
    "foreign records": (content({"fields": ConfigRecord({}), "bytes": ARRAY}), "stored as 'numpy.ndarray'"),
    "no state": (state_of_no_hash, "SHA-256"),
    "objects that are none": (damaged, "its answer cannot be read"),
    "objects that are missing": (incomplete, "its answer cannot be read"),
    "late": (None, "did not answer within 0.2 seconds"),
    "half sent": (None, "did not answer within 0.2 seconds"),
}
OF_BYTES = (damaged, incomplete)


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run in which one of the nodes never answers."""
    silent = Deployment(tmp_path_factory.mktemp("silent"), recipe("pfedpara", train={"rounds": 2}), deadline=0.2)
    silent.grid.tamper[FIRST_ID + 3] = lambda message, reply: None
    return silent.serve()


@pytest.mark.parametrize("how", list(HOSTILE))
def test_a_hostile_node_is_rejected_and_counted_and_the_model_is_unharmed(
    how: str, without: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper, reason = HOSTILE[how]
    # Nobody is asked while jobs are sent: here a reply is due from when it is first asked for.
    deployed = Deployment(tmp_path, recipe("pfedpara", train={"rounds": 2}), deadline=0.2, poll=10.0)
    liar = FIRST_ID + 3
    if how == "late":
        deployed.grid.delay[liar] = 0.25
    elif how == "half sent":  # Flower waits for the rest within the pull: nobody else may wait with it
        monkeypatch.setattr("fedfactor.engines.flower.adapter.PATIENCE", 0.02)
        deployed.grid.stall[liar] = 0.25  # longer than the deadline, and over within the second round
    elif tamper in OF_BYTES:
        broken = cast(Callable[[dict[str, bytes]], dict[str, bytes]], tamper)
        deployed.grid.damage[liar] = lambda contents: broken(contents) if begun(deployed) else contents
    else:
        deployed.grid.tamper[liar] = cast(Tamper, tamper)
    result = deployed.serve()
    for event in result.history[1:]:
        assert [f["client"] for f in event["failures"]] == [3]
        assert re.search(reason, event["failures"][0]["reason"]), event["failures"]
    assert result.summary["totals"]["failures"] == 2
    for key in ("weights_sha256", "private_sha256"):
        assert result.summary[key] == without.summary[key], "as if the node had not been there"
    assert (result.history[-1].get("late", 0) > 0) == (how in ("late", "half sent"))


def begun(deployed: Deployment) -> bool:
    """Tell whether the nodes have been enrolled."""
    return (deployed.run_dir / "task.json").exists()


def test_what_an_answer_says_of_its_message_counts_for_nothing(tmp_path: Path) -> None:
    chosen = recipe("pfedpara", train={"rounds": 1})
    deployed = Deployment(tmp_path, chosen)
    deployed.grid.tamper[FIRST_ID + 3] = answering_another_message
    assert outcome(deployed.serve()) == outcome(run_inline(chosen))


def test_an_answer_that_cannot_be_read_loses_nobody_elses(tmp_path: Path) -> None:
    """All at once: Flower hands every answer out once only."""
    deployed = Deployment(tmp_path, recipe("pfedpara", train={"rounds": 1, "quorum": 0.25}), deadline=0.5)
    for node in (FIRST_ID, FIRST_ID + 2):
        deployed.grid.damage[node] = lambda contents: damaged(contents) if begun(deployed) else contents
    (event,) = deployed.serve().history[1:]
    assert [failure["client"] for failure in event["failures"]] == [0, 2]


def test_a_superlink_that_is_gone_is_not_the_nodes_fault(tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, recipe(train={"rounds": 1}))
    original = deployed.grid.pull_messages

    def broken(numbers: Iterable[str]) -> Any:
        if begun(deployed):
            raise httpx.ConnectError("nobody there")
        return original(numbers)

    deployed.grid.pull_messages = broken  # type: ignore[method-assign]
    with pytest.raises(httpx.ConnectError, match="nobody there"):
        deployed.serve()


def test_a_client_cannot_claim_to_have_worked_longer_than_it_was_asked_for(tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, recipe(train={"rounds": 1}))
    deployed.grid.tamper[FIRST_ID] = time_that_cannot_be
    assert deployed.serve().history[-1]["link_seconds"]["50"] < 30


def test_a_silent_node_gets_a_few_jobs_and_is_asked_again_once_it_has_answered(tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, recipe("fedavg", train={"rounds": 5}, evaluate={"every": 0}), deadline=0.05)
    silent = FIRST_ID + 3
    deployed.grid.tamper[silent] = lambda message, reply: None
    result = deployed.serve()
    reasons = [failure["reason"] for event in result.history[1:] for failure in event["failures"]]
    assert reasons[:3] == ["did not answer within 0.05 seconds"] * MOST_UNANSWERED
    assert reasons[3:] == ["has not answered its last 3 jobs, and gets no other one until it has"] * 2
    jobs = [message for message in deployed.grid.pushed if message.metadata.dst_node_id == silent]
    assert len([job for job in jobs if kind_of(job) == "train"]) == MOST_UNANSWERED


@pytest.mark.parametrize("how", ["another node", "no fields", "objects that are none"])
def test_answers_that_no_honest_node_sends_are_strikes(how: str, tmp_path: Path) -> None:
    chosen = recipe("fedavg", train={"rounds": 3}, aggregation={"strikes": 2}, evaluate={"every": 0})
    deployed, tamper = Deployment(tmp_path, chosen), HOSTILE[how][0]
    if tamper in OF_BYTES:
        broken = cast(Callable[[dict[str, bytes]], dict[str, bytes]], tamper)
        deployed.grid.damage[FIRST_ID + 3] = lambda contents: broken(contents) if begun(deployed) else contents
    else:
        deployed.grid.tamper[FIRST_ID + 3] = cast(Tamper, tamper)
    result = deployed.serve()
    assert result.summary["totals"]["failures"] == 2 and result.history[-1]["left_out"] == [3]
    assert left_out(deployed.run_dir) == [3]


@pytest.mark.parametrize("data", ["recipe", "nodes"])
def test_a_node_counts_for_no_more_examples_than_it_enrolled_with(data: str, tmp_path: Path) -> None:
    chosen = recipe("fedavg", train={"rounds": 1}, partition={"train_share": 1.0}, evaluate={"every": 0})
    own = {"data": "digits"} if data == "nodes" else {}
    configs = [{"client": i, **own, **({"data-options": f'{{"split_seed": {i}}}'} if own else {})} for i in range(4)]

    def liar(upload: Wire) -> Wire:
        return Wire(upload.kind, {**upload.fields, "samples": 10**6}, upload.tensors)

    found = []
    for lies in (False, True):
        deployed = Deployment(tmp_path / str(lies), chosen, configs=configs, data=data)
        if lies:
            deployed.grid.tamper[FIRST_ID + 3] = changed(liar)
        found.append(deployed.serve().summary["weights_sha256"])
        enrolled = json.loads((deployed.run_dir / "flower.json").read_text())["samples"]
        assert (len(enrolled) == 4 and min(enrolled.values()) > 0) if own else enrolled == {}
    assert found[0] == found[1]
