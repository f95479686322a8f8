"""Moves of the base: what a client gets that has missed rounds, and that all come to the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedfactor import Tune
from fedfactor.methods import FedExLora, FLoRA, Method
from fedfactor.protocol.coding import sections
from fedfactor.protocol.message import BadMessage, Message, decode, encode, joined
from fedfactor.protocol.moves import Moves, caught_up, moved
from fedfactor.protocol.plan import Tensors
from fedfactor.server.state import Server
from tests.helpers.tiny import Recording, Tiny, run


def low_rank(round: int, rank: int = 1) -> Tensors:
    """Return a move of a 6 x 10 layer; its factors of rank 1 have 16 numbers."""
    rng = torch.Generator().manual_seed(round)
    return {"fc.u": torch.randn(6, rank, generator=rng), "fc.v": torch.randn(rank, 10, generator=rng)}


def after(rounds: int) -> Moves:
    moves = Moves()
    for round in range(1, rounds + 1):
        moves = moves.then(round, low_rank(round))
    return moves


def sent(moves: Moves, since: int) -> Tensors:
    return sections(moves.since(since)).get("moves", {})


def content(part: Tensors) -> Message:
    return decode(part["message"].numpy().data)


def test_a_client_gets_the_moves_that_it_has_missed() -> None:
    part = sent(after(3), 1)
    assert content(part).kind == "moves" and content(part).fields == {"since": 1, "until": 3}
    assert set(content(part).tensors) == {"2/fc.u", "2/fc.v", "3/fc.u", "3/fc.v"}
    assert sent(after(3), 3) == {}, "nothing was missed"
    assert sent(Moves(), 0) == {}


def test_many_missed_moves_cost_no_more_than_their_sum() -> None:
    moves = after(9)
    assert [*moves.log] == [7, 8, 9], "60 numbers in the sum, 16 in each move"
    assert set(content(sent(moves, 6)).tensors) == {f"{n}/fc.{factor}" for n in (7, 8, 9) for factor in "uv"}
    whole = content(sent(moves, 5))
    assert whole.fields == {"since": 0, "until": 9} and set(whole.tensors) == {"9/fc.w"}


def test_all_clients_come_to_the_same_bits_whatever_they_had() -> None:
    """Also from bytes at an odd address, as in a message with other tensors before it."""
    moves = after(9)
    for since in range(10):
        part = sent(moves, since)
        for shift in (0, 1):
            raw = torch.zeros(len(part.get("message", [])) + shift, dtype=torch.uint8)
            raw[shift:] = part.get("message", raw[shift:])
            had = after(since).total
            found = caught_up(had, {"message": raw[shift:]} if part else {})
            assert found.keys() == moves.total.keys()
            assert torch.equal(found["fc.w"], moves.total["fc.w"])


def test_a_round_without_a_move_is_remembered_in_a_checkpoint() -> None:
    moves = after(2).then(3, {}).then(4, low_rank(4))
    opened = Server.from_bytes(joined(Server(4, {}, {}, moves=moves).to_parts()), {"round": 4, "totals": {}}).moves
    assert [*opened.log] == [*moves.log] == [1, 2, 3, 4] and opened.log[3] == {}
    assert bytes(opened.since(2)["moves/message"].numpy()) == bytes(moves.since(2)["moves/message"].numpy())


def test_another_message_in_their_place_is_refused() -> None:
    other = torch.frombuffer(bytearray(encode(Message("train", {}, {}))), dtype=torch.uint8)
    with pytest.raises(BadMessage, match="got a message of kind train in place of the moves of the base"):
        caught_up({}, {"message": other})


# In a run.


@pytest.mark.parametrize("method", [FedExLora(rank=1), FLoRA(rank=2)], ids=lambda method: method.name)
def test_clients_that_missed_rounds_catch_up_and_the_bytes_count(method: Method) -> None:
    engine = Recording()
    torch.manual_seed(0)
    tune = Tune(("hidden",), train=("fc",))
    result = run(method, model=Tiny(), tune=tune, rounds=5, cohort=2, engine=engine, evaluate_clients="none")
    seen: dict[int, int] = {}
    lengths: dict[int, int] = {}
    for job in map(decode, [message for message in engine.down if decode(message).kind == "train"]):
        client, now = job.fields["client"], job.fields["round"]
        part = sections(job.tensors).get("moves", {})
        if now:
            moves = content(part)
            assert moves.fields == {"since": seen.get(client, 0), "until": now}
            missed = {int(name.partition("/")[0]) for name in moves.tensors}
            assert missed <= {*range(seen.get(client, 0) + 1, now + 1)} and missed
        lengths[now + 1] = lengths.get(now + 1, 0) + len(encode(job))
        seen[client] = now
    assert len(seen) > 2, "cohorts differ, so clients miss rounds"
    assert {e["round"]: e["bytes_down"] for e in result.history if e["event"] == "round"} == lengths
    sums = [Tensors()]
    for round in range(1, 6):
        sums.append(moved(sums[-1], result.server.moves.log[round]))
    for client, now in seen.items():  # the state of a client has the sum up to its last round
        state = result.federation.store.read("client", client)
        kept = sections(decode(state).tensors)["moved"] if state else {}
        assert kept.keys() == sums[now].keys() and all(torch.equal(kept[name], sums[now][name]) for name in kept)


def test_the_factors_of_a_move_have_the_rank_of_the_papers() -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"model": Tiny(), "tune": Tune(("hidden",)), "capacities": None, "rounds": 2}
    moves = {m.name: run(m, **settings).server.moves.log[2] for m in (FedExLora(rank=2), FLoRA(rank=2))}
    # Three clients: FedEx needs one less, because the deviations from a mean sum to zero.
    assert {name: tuple(move["hidden.v"].shape) for name, move in moves.items()} == {
        "fedex_lora": (4, 256),
        "flora": (6, 256),
    }
