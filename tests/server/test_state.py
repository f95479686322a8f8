"""The server's state between rounds, and the hashes that identify it."""

from __future__ import annotations

import hashlib

import torch

from fedfactor.nn.state import weights_sha256
from fedfactor.protocol.message import joined
from fedfactor.protocol.states import receipt
from fedfactor.server.state import Server, private_sha256
from fedfactor.server.store import MemoryStore
from tests.helpers.folding import commit


def test_the_hash_of_all_states_is_the_same_of_their_receipts() -> None:
    whole, held = MemoryStore(), MemoryStore()
    states = {1: b"one", 3: b"three"}
    commit(whole, 1, {"client": states, "server": {2: b"two"}}, b"", {})
    receipts = {client: receipt(hashlib.sha256(state).hexdigest()) for client, state in states.items()}
    commit(held, 1, {"client": receipts, "server": {2: b"two"}}, b"", {})
    assert private_sha256(whole) == private_sha256(held)
    text = "".join(
        f"{section}:{client}:{hashlib.sha256(state).hexdigest()}\n"
        for section, client, state in (("client", 1, b"one"), ("client", 3, b"three"), ("server", 2, b"two"))
    )
    assert private_sha256(whole) == hashlib.sha256(text.encode()).hexdigest()
    commit(held, 2, {"client": {3: receipt(hashlib.sha256(b"other").hexdigest())}}, b"", {})
    assert private_sha256(whole) != private_sha256(held)


def test_a_server_survives_being_written() -> None:
    server = Server(
        3,
        {"fc.weight": torch.randn(2, 3), "norm.count": torch.tensor(7)},
        {"m": {"fc.weight": torch.ones(2, 3)}, "empty": {}},
        {"bytes_up": 12.0},
        {0.1: {"norm": torch.randn(2, 4)}, 1.0: {"norm": torch.zeros(2, 4)}},
    )
    again = Server.from_bytes(joined(server.to_parts()), {"round": 3, "totals": {"bytes_up": 12.0}})
    assert (again.round, again.totals) == (3, {"bytes_up": 12.0})
    assert weights_sha256(again.tensors) == weights_sha256(server.tensors)
    assert list(again.optimizer) == ["empty", "m"] and again.optimizer["empty"] == {}
    assert torch.equal(again.optimizer["m"]["fc.weight"], torch.ones(2, 3))
    assert again.statistics.keys() == {0.1, 1.0}, "capacities to the bit"
    assert torch.equal(again.statistics[0.1]["norm"], server.statistics[0.1]["norm"])


def test_the_hash_of_weights_tells_names_types_shapes_and_bits_apart() -> None:
    weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2, 3)}
    same = {"b": torch.zeros(3, 2).t(), "a": torch.tensor([1.0, 2.0], requires_grad=True)}
    assert weights_sha256(same) == weights_sha256(weights)
    others: list[dict[str, torch.Tensor]] = [
        {**weights, "a": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {**weights, "b": torch.zeros(3, 2)},
        {**weights, "b": -torch.zeros(2, 3)},
        {"a": weights["a"], "c": weights["b"]},
    ]
    assert len({weights_sha256(one) for one in [weights, *others]}) == 5
