"""FjORD: ordered dropout by batch, statistics a width, one set of weights."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedfactor.methods import FjORD, Participant
from fedfactor.methods.nested import Nested
from fedfactor.nn.state import tensors_of, weights_sha256
from fedfactor.protocol.plan import Reply, pull
from tests.helpers.folding import folded
from tests.helpers.networks import Text
from tests.helpers.tiny import run, task


def seen(tensors: dict[str, torch.Tensor], width: str) -> int:
    """How many batches (a mean over the holders) the norms of a width have seen, on the server."""
    return int(tensors[f"buffers_of.{width}.bn1/num_batches_tracked" if width else "widest.bn1.num_batches_tracked"])


def test_every_batch_trains_one_width_that_the_client_can_carry() -> None:
    """Four batches an epoch, twenty epochs: the widths of a client share them, each about as often."""
    settings = {"rounds": 1, "cohort": 1, "epochs": 20}
    alone = run(FjORD(levels=(0.25, 0.75)), capacities={1.0: 1.0}, **settings).server.tensors
    counts = [seen(alone, width) for width in ("", "0_75", "0_25")]
    assert sum(counts) == 80 and min(counts) > 15
    weak = run(FjORD(levels=(0.25, 0.75)), capacities={0.5: 1.0}, **settings).server.tensors
    assert seen(weak, "0_25") + seen(weak, "0_5") == 80 and seen(weak, "") == seen(weak, "0_75") == 0
    assert min(seen(weak, "0_25"), seen(weak, "0_5")) > 25


def test_two_clients_by_hand() -> None:
    """Capacities 1/2 and 1 with 1 and 3 examples: held by both, by one; statistics only by who has the width."""

    def build(width: float) -> nn.Module:
        return nn.Sequential(nn.Linear(1, int(4 * width), bias=False), nn.BatchNorm1d(int(4 * width), affine=False))

    method = FjORD().bind(task(), [1.0, 0.5])
    server = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(method.network(build, 1.0)).items()}
    replies = []
    for capacity, samples, value in ((0.5, 1, 1.0), (1.0, 3, 5.0)):
        network = method.network(build, capacity)
        plan = method.plan(server, Participant(0, capacity, 0), network, None)
        down = pull(server, plan)
        up = {name: tensor + torch.tensor(value, dtype=tensor.dtype) for name, tensor in down.items()}
        replies.append(Reply(0, capacity, samples, plan, down, up, {}))
    mean, held = folded(method, server, replies)
    assert mean["widest.0.weight"].flatten().tolist() == [4.0, 4.0, 5.0, 5.0]
    assert held["widest.0.weight"].flatten().tolist() == [2, 2, 1, 1]
    # Level 1/2 is the first client's widest and the second one's narrower network.
    assert mean["buffers_of.0_5.1/running_mean"].tolist() == [4.0, 4.0] and held["buffers_of.0_5.1/running_mean"] == 2
    assert mean["widest.1.running_mean"].tolist() == [5.0] * 4 and held["widest.1.running_mean"] == 1


def test_overwriting_from_large_to_small_is_the_mean_over_holders() -> None:
    """The aggregation as its authors have it: for p from large to small, [:p, :p] = mean over p_max >= p by data."""
    rng = torch.Generator().manual_seed(0)
    levels, server = [1.0, 0.75, 0.5], {"widest.w": torch.randn(4, 4, generator=rng)}

    class Square(nn.Module):
        def __init__(self, width: float) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(int(4 * width), int(4 * width)))

    method, replies = FjORD().bind(task(), levels), []
    for capacity, samples in ((0.5, 2), (1.0, 1), (0.75, 5), (0.75, 1)):
        plan = method.plan(server, Participant(0, capacity, 0), method.network(Square, capacity), None)
        down = pull(server, plan)
        trained = {"widest.w": torch.randn(down["widest.w"].shape, generator=rng)}
        replies.append(Reply(0, capacity, samples, plan, down, trained, {}))
    expected = server["widest.w"].clone()
    for level in levels:
        n, able = int(4 * level), [reply for reply in replies if reply.capacity >= level]
        total = sum(reply.samples for reply in able)
        expected[:n, :n] = sum(reply.tensors["widest.w"][:n, :n] * reply.samples / total for reply in able)
    mean, _ = folded(method, server, replies)
    torch.testing.assert_close(mean["widest.w"], expected)


def test_distillation_by_its_definition() -> None:
    """The widest network's cross entropy plus the drawn one's divergence from it; gradients add up."""
    setup = run(FjORD(), rounds=0).federation.setup
    method = FjORD(distill=True).bind(task(), [1.0, 0.5])
    network = setup.network(1.0)
    assert isinstance(network, Nested)
    x, y = (part[:8] for part in setup.task.data.of(0))
    ctx = SimpleNamespace(task=setup.task, capacity=1.0)
    drawn = set()
    for seed in range(6):
        torch.manual_seed(seed)
        level = [1.0, 0.5][int(torch.randint(2, ()))]
        torch.manual_seed(seed)
        twin = copy.deepcopy(network)
        loss = method.objective(network, (x, y), ctx)  # type: ignore[arg-type]
        full, small = twin(x), twin.at(level, x)
        soft = -(full.detach().softmax(1) * small.log_softmax(1)).sum(1).mean()  # cross entropy: the same gradient
        entropy = -(full.softmax(1) * full.log_softmax(1)).sum(1).mean().detach()
        torch.testing.assert_close(loss, setup.task.loss(full, (x, y)) + soft - entropy)
        for model, value in ((network, loss), (twin, setup.task.loss(full, (x, y)) + soft)):
            model.zero_grad()
            value.backward()
        torch.testing.assert_close(network.widest.conv2.weight.grad, twin.widest.conv2.weight.grad)
        drawn.add(level)
    assert drawn == {1.0, 0.5}


def test_options_act_and_passes_are_counted() -> None:
    plain, taught = run(FjORD()), run(FjORD(distill=True))
    assert plain.summary["weights_sha256"] != taught.summary["weights_sha256"]
    costs, setup = plain.federation.costs, plain.federation.setup
    full, half = (costs._forward(setup, level)[0] for level in (1.0, 0.5))
    assert half < full
    assert costs.macs(1.0) == (full + half) / 2 and costs.macs(0.5) == half
    assert taught.federation.costs.macs(1.0) == full + (full + half) / 2


def test_with_one_width_it_is_fedavg() -> None:
    plain, nested = run("fedavg"), run(FjORD(), capacities={1.0: 1.0})
    own = {name.removeprefix("widest."): tensor for name, tensor in nested.server.tensors.items()}
    assert weights_sha256(own) == weights_sha256(plain.server.tensors)


def test_what_is_deployed_is_one_plain_network_of_that_width() -> None:
    result = run(FjORD(), capacities={1.0: 0.5, 0.5: 0.5}, rounds=3)
    half = result.model_at(0.5)
    assert half.fc.in_features == 16 and not any(isinstance(module, Nested) for module in half.modules())
    server = result.server.tensors
    assert torch.equal(half.conv2.weight, server["widest.conv2.weight"][:8, :4])
    assert torch.equal(half.bn1.running_mean, server["buffers_of.0_5.bn1/running_mean"])
    assert not torch.equal(half.bn1.running_mean, server["widest.bn1.running_mean"][:4])
    with pytest.raises(ValueError, match=r"statistics of the widths 1, 0\.5, not of 0\.25"):
        result.model_at(0.25)


def test_gates_are_sliced_within_each_gate() -> None:
    result, start = (run(FjORD(), model=Text, capacities={0.5: 1.0}, rounds=n) for n in (1, 0))
    name = "widest.lstm.weight_hh_l0"
    moved = (result.server.tensors[name] != start.server.tensors[name]).any(1)
    assert moved.view(4, 8).tolist() == [[True] * 4 + [False] * 4] * 4


def test_levels_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="levels must lie in"):
        FjORD(levels=(0.0, 0.5))
