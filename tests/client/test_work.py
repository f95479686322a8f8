"""The client's own step."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedfactor
from fedfactor.client.work import batches
from fedfactor.data.clients import FederatedData
from fedfactor.engines import Pool
from fedfactor.methods import Method
from fedfactor.protocol.context import Context
from fedfactor.protocol.message import decode
from fedfactor.protocol.settings import Capacities, Training
from fedfactor.protocol.setup import Setup
from fedfactor.registry import create
from fedfactor.rng import derive, seeded, torch_rng
from fedfactor.runs.simulate import simulate
from fedfactor.task import Task
from tests.helpers.quadratic import Point, clients, state, x
from tests.helpers.quadratic import run as quadratic
from tests.helpers.tiny import METHODS, OPTIMIZERS, Tiny, data, run


def setup(training: Training) -> Setup:
    fedavg = create("methods", "fedavg"), create("optimizers", "fedavg"), create("codecs", "float32")
    return Setup(Task(nn.Identity, data()), *fedavg, training)


@pytest.mark.parametrize(("examples", "sizes"), [(25, [10, 10, 5]), (20, [10, 10]), (21, [10, 11]), (7, [7])], ids=str)
def test_an_epoch_is_every_example_once_the_last_smaller_batch_included(examples: int, sizes: list[int]) -> None:
    both = torch.arange(float(examples)), torch.arange(examples)
    found = list(batches(setup(Training(batch_size=10)), both, 2, torch.Generator().manual_seed(0)))
    assert [len(y) for _, y in found] == 2 * sizes
    first, second = (torch.cat([y for _, y in half]).tolist() for half in (found[: len(sizes)], found[len(sizes) :]))
    assert sorted(first) == sorted(second) == list(range(examples)) and first != second
    assert all(torch.equal(x, y.float()) for x, y in found)


class Words(nn.Module):
    """Means of word vectors, and a classifier."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.fc = nn.Embedding(20, 4, sparse=sparse), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.table(x).mean(1))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sparse_gradients_of_an_embedding_are_gradients_like_others(optimizer: str) -> None:
    rng = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(20, (12, 5), generator=rng), torch.randint(3, (12,), generator=rng)
    words = FederatedData((inputs, targets), [torch.arange(6), torch.arange(6, 12)])
    settings = {"rounds": 2, "lr": 0.1, "batch_size": 3, "momentum": 0.9, "weight_decay": 0.01, "max_grad_norm": 1.0}
    dense, sparse = (simulate(Words(sparse), words, optimizer=optimizer, **settings) for sparse in (False, True))
    assert sparse.summary["weights_sha256"] == dense.summary["weights_sha256"]


def test_a_last_batch_of_one_joins_the_one_before() -> None:
    result = fedfactor.simulate(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)),
        (data().train[0][:42], data().train[1][:42]),
        clients=2,
        batch_size=20,
        rounds=1,
    )
    assert result.summary["totals"]["failures"] == 0


def test_local_steps_are_torchs_own_sgd() -> None:
    """Momentum and weight decay over several steps of one client, against torch.optim.SGD, to the bit."""
    one = clients((1.0, 1.0))
    found = x(quadratic(data=one, epochs=7, momentum=0.9, weight_decay=0.1, lr=0.05))
    point = Point().double()
    sgd = torch.optim.SGD(point.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, fused=True)
    for _ in range(7):
        sgd.zero_grad()
        (0.5 * (point.x - 1) ** 2).mean().backward()
        sgd.step()
    assert found == float(point.x.detach())


ONE = clients((1.0, 1.0))
"""One client with f = (x - 1)^2 / 2 and one batch per epoch."""


def stepped(optimizer: torch.optim.Optimizer, point: Point, rates: list[float]) -> float:
    """Take a step for each learning rate with an optimizer of torch, and return x."""
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        (0.5 * (point.x - 1) ** 2).mean().backward()
        optimizer.step()
    return float(point.x.detach())


def test_three_steps_of_adamw_by_hand() -> None:
    x_, m, v = 0.0, 0.0, 0.0
    for t in (1, 2, 3):
        g = x_ - 1
        x_ -= 0.01 * 0.1 * x_
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        x_ -= 0.01 * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.95**t)) + 1e-8)
    adamw = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    assert x(quadratic(data=ONE, epochs=3, lr=None, local_optimizer=adamw)) == pytest.approx(x_, rel=1e-12)


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "rmsprop", "torch.optim:NAdam"])
def test_a_kept_state_continues_where_the_last_round_ended(name: str) -> None:
    """Two rounds of two steps are four steps of one optimizer of torch; without the state, each round begins anew."""
    options: dict[str, Any] = {"momentum": 0.9} if name == "sgd" else {}
    settings = {"data": ONE, "rounds": 2, "epochs": 2, "lr": 0.05}
    kept = x(quadratic(local_optimizer={"name": name, "keep_state": True, **options}, **settings))
    fresh = x(quadratic(local_optimizer={"name": name, **options}, **settings))
    classes = {"sgd": "SGD", "adam": "Adam", "adagrad": "Adagrad", "rmsprop": "RMSprop"}
    cls = getattr(torch.optim, classes.get(name, "NAdam"))
    point = Point().double()
    assert kept == pytest.approx(stepped(cls(point.parameters(), lr=0.05, **options), point, [0.05] * 4), rel=1e-9)
    point = Point().double()
    for _ in range(2):
        expected = stepped(cls(point.parameters(), lr=0.05, **options), point, [0.05] * 2)
    assert fresh == pytest.approx(expected, rel=1e-9) and fresh != pytest.approx(kept, rel=1e-6)


def test_a_step_uses_the_mean_of_its_batches_and_the_last_group_counts_its_own() -> None:
    """Seven equal batches in groups of three are three steps; a sum, or a last group divided by three, is not."""
    two = x(quadratic(data=ONE, epochs=3))
    result = quadratic(data=ONE, epochs=7, accumulate=3)
    assert x(result) == pytest.approx(two, rel=1e-12)
    assert x(quadratic(data=ONE, epochs=None, local_steps=3, accumulate=3)) == pytest.approx(two, rel=1e-12)


def test_the_rate_falls_within_a_round() -> None:
    rates = [0.1 * (1 + math.cos(math.pi * step / 3)) / 2 for step in range(3)]
    point = Point().double()
    expected = stepped(torch.optim.SGD(point.parameters(), lr=0.1, momentum=0.9), point, rates)
    found = quadratic(data=ONE, epochs=None, local_steps=3, momentum=0.9, local_schedule="cosine")
    assert x(found) == pytest.approx(expected, rel=1e-12)


@dataclass(frozen=True)
class Slope(Method):
    """Loss b x: its gradient is b everywhere."""

    def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        return (batch[0][:, 1] * network.x).mean()


@pytest.mark.parametrize(
    "settings",
    [
        {"local_optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}},
        {"local_optimizer": {"name": "sgd", "momentum": 0.9, "dampening": 0.5}},
        {"momentum": 0.9, "local_schedule": "cosine"},
        {"accumulate": 2},
        {"epochs": None, "local_steps": 3, "accumulate": 2},
    ],
    ids=str,
)
def test_scaffold_knows_how_far_the_steps_went(settings: dict[str, Any]) -> None:
    """With a constant gradient, c_i is this gradient, whatever the steps are."""
    result = quadratic("scaffold", data=clients((1.0, 3.0)), method=Slope(), **{"epochs": 5, **settings})
    assert state(result, 0) == pytest.approx(3.0, rel=1e-12)


def test_mixed_precision_is_autocast_around_the_loss() -> None:
    """Against a loop of torch, to the bit; the weights stay in float32, and the result is not that of full precision."""
    small, settings = FederatedData(data().train, [torch.arange(40)]), {"rounds": 1, "cohort": 1, "capacities": None}
    result = run(data=small, precision="bf16-mixed", **settings)
    with seeded(derive(5, "init")):
        network = Tiny()
    sgd = torch.optim.SGD(network.parameters(), lr=0.05, fused=True)
    for inputs, targets in batches(setup(Training(batch_size=10)), small.of(0), 1, torch_rng(5, "batches", 0, 0)):
        sgd.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(network(inputs), targets)
        loss.backward()
        sgd.step()
    found = result.server.tensors
    assert found["fc.weight"].dtype == torch.float32
    assert all(torch.allclose(found[name], value, rtol=0, atol=1e-7) for name, value in network.state_dict().items())
    full = run(data=small, **settings).server.tensors["fc.weight"]
    assert not torch.allclose(found["fc.weight"], full, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_with_other_steps(method: str) -> None:
    """Adam, mixed precision, a cosine within the round, two steps of two batches."""
    steps = {"local_steps": 2, "accumulate": 2, "local_schedule": "cosine", "precision": "bf16-mixed"}
    result = run(method, epochs=None, rounds=1, local_optimizer="adam", lr=0.001, **steps)
    assert result.summary["totals"]["failures"] == 0
    one = run(method, epochs=2, rounds=1).summary["totals"]["macs"]  # eight batches of each client
    assert result.summary["totals"]["macs"] == one / 2


def test_half_an_epoch_costs_half() -> None:
    costs = {epochs: run(epochs=epochs, rounds=1).summary["totals"]["macs"] for epochs in (0.5, 1, 1.5)}
    assert costs[0.5] == costs[1] / 2 == costs[1.5] / 3


KEPT = {"local_optimizer": {"name": "adamw", "keep_state": True}, "lr": 0.01, "rounds": 4, "epochs": 0.75}


@pytest.mark.parametrize("settings", [{}, {"method": "fedper", "codec": "topk"}, {"method": "pufferfish"}], ids=str)
def test_kept_states_are_the_same_on_every_engine_and_after_a_break(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = run(**KEPT, **settings)
    held = decode(whole.federation.store.read("client", whole.federation.store.clients("client")[0]) or b"").tensors
    assert {name.split("/")[1] for name in held if name.startswith("local/")} == {"step", "exp_avg", "exp_avg_sq"}
    hashes = [whole.summary[key] for key in ("weights_sha256", "private_sha256")]
    for workers in (1, 2) if settings.get("method") == "fedper" else ():
        with Pool(workers) as pool:
            pooled = run(**KEPT, **settings, engine=pool).summary
        assert [pooled["weights_sha256"], pooled["private_sha256"]] == hashes
    for rounds in (1, 3, 4):
        resumed = run(**{**KEPT, "rounds": rounds}, **settings, directory=tmp_path).summary
    assert [resumed["weights_sha256"], resumed["private_sha256"]] == hashes
    assert run(**{**KEPT, "local_optimizer": "adamw"}, **settings).summary["weights_sha256"] != hashes[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "scaffold", "local_optimizer": "adam"}, "scaffold assumes that clients take steps of SGD, but"),
        ({"optimizer": "feddyn", "local_optimizer": "adam"}, "feddyn assumes that clients take steps of SGD, but"),
        ({"method": create("methods", "fedpara", jacobian=0.1), "local_optimizer": "adam"}, "fedpara assumes that"),
        ({"optimizer": "scaffold", "local_optimizer": {"name": "sgd", "momentum": 0.9, "keep_state": True}}, "scaffold assumes that momentum starts anew"),
        ({"method": "fedhm", **KEPT}, "keep_state keeps tensors, but the basis of fedhm changes each round"),
        ({"method": "fedrolex", **KEPT}, "keep_state keeps tensors, but fedrolex trains other weights in each round"),
        ({"method": "heterofl", "capacities": Capacities({1.0: 0.5, 0.5: 0.5}, dynamic=True), **KEPT}, "set capacities.dynamic = false"),
    ],
)  # fmt: skip
def test_steps_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**settings)
