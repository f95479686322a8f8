"""FedHM: the SVD goes out, composed changes come back."""

from __future__ import annotations

import math

import pytest
import torch

from fedfactor.methods import FedHM
from fedfactor.nn import factor_weights
from fedfactor.plan import Reply, whole_plan
from tests.conformance.tiny import run


def reply(capacity: float, **tensors: torch.Tensor) -> Reply:
    reference = {name.replace("__", "."): torch.zeros_like(tensor) for name, tensor in tensors.items()}
    return Reply(
        0, capacity, 1, whole_plan(reference), reference, {n.replace("__", "."): t for n, t in tensors.items()}, {}
    )


def test_weights_are_a_softmax_of_the_capacities() -> None:
    """The paper's formula with tau = 5 for capacities 1, 1/2, 1/4, 1/8: .277, .251, .239, .233."""
    replies = [reply(capacity) for capacity in (1.0, 0.5, 0.25, 0.125)]
    weights = FedHM(tau=5.0).weights(replies)
    shares = [weight / sum(weights) for weight in weights]
    assert shares == [pytest.approx(x, abs=5e-4) for x in (0.277, 0.251, 0.239, 0.233)]
    assert set(FedHM(tau=math.inf).weights(replies)) == {1.0}


def test_low_rank_clients_get_the_leading_components() -> None:
    result = run(FedHM(), rounds=0)
    setup, server = result.federation.setup, result.server.tensors
    small = setup.network(0.5)
    assert set(factor_weights(small)) == {"conv2", "hidden"}  # conv1 is the first layer, fc the classifier
    view = setup.method.prepare(server, {0.5: small, 1.0: setup.network(1.0)})
    u, s, vh = torch.linalg.svd(server["hidden.weight"])
    rank = 16
    best = (u[:, :rank] * s[:rank]) @ vh[:rank]
    torch.testing.assert_close(view["hidden.u"] @ view["hidden.v"], best, rtol=1e-2, atol=1e-3)


def test_two_clients_by_hand() -> None:
    """One dense client changes W by 2, one of rank 1 by u v: the mean of both is added to the server."""
    networks = run(FedHM(rho=0), rounds=0).federation.setup.network
    small = networks(0.5)
    layer = factor_weights(small)["hidden"]
    shapes = {name: factor.shape for name, factor in layer.factors.items()}
    server = {"hidden.weight": torch.ones(32, 256)}
    dense = reply(1.0, hidden__weight=torch.full((32, 256), 2.0))
    low = reply(0.5, hidden__u=torch.full(shapes["u"], 0.5), hidden__v=torch.full(shapes["v"], 0.25))
    method = FedHM()
    composed = 0.5 * 0.25 * shapes["v"][0]

    def only_hidden(capacity: float) -> torch.nn.Module:
        holder = torch.nn.Module()
        if capacity < 1:
            holder.hidden = layer
        return holder

    mean, held = method.aggregate(server, server, [dense, low], only_hidden)
    torch.testing.assert_close(mean["hidden.weight"], torch.full((32, 256), 1 + (2 + composed) / 2))
    assert held["hidden.weight"] == 2
    literal, _ = FedHM(literal=True).aggregate(server, server, [dense, low], only_hidden)
    torch.testing.assert_close(literal["hidden.weight"], torch.full((32, 256), (2 + composed) / 2))


def test_what_truncation_cut_off_stays_on_the_server_unless_literal() -> None:
    start = run(FedHM(), rounds=0).server.tensors["hidden.weight"]
    kept = run(FedHM(), epochs=0, capacities={0.25: 1.0}).server.tensors["hidden.weight"]
    torch.testing.assert_close(kept, start)
    erased = run(FedHM(literal=True), epochs=0, capacities={0.25: 1.0}).server.tensors["hidden.weight"]
    assert int(torch.linalg.matrix_rank(erased, rtol=1e-4)) == 8 < int(torch.linalg.matrix_rank(start, rtol=1e-4))


def test_frobenius_decay_takes_the_place_of_weight_decay_on_factors() -> None:
    network = run(FedHM(), rounds=0).federation.setup.network(0.5)
    decays = {name: FedHM().decays(name, network) for name, _ in network.named_parameters()}
    assert not decays["hidden.u"] and not decays["conv2.v"] and decays["hidden.bias"] and decays["fc.weight"]
    assert all(FedHM(frobenius=False).decays(name, network) for name in decays)
    settings = {"weight_decay": 0.1, "capacities": {0.5: 1.0}}
    assert (
        run(FedHM(), **settings).summary["weights_sha256"]
        != run(FedHM(frobenius=False), **settings).summary["weights_sha256"]
    )
