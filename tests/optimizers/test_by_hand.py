"""One step and more of every optimizer against numbers computed by hand.

Two clients, f1 = (x - 1)^2 / 2 and f2 = (x + 1)^2, from x = 0 with rate 0.1 and two full-gradient steps each. Every
fault that other libraries were found to have in these places moves these numbers.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedfactor
from fedfactor.data.clients import FederatedData
from fedfactor.methods import FedAMP, Method
from fedfactor.optimizers import FedAdam, FedDyn, FedProx, Optimizer, Scaffold
from fedfactor.protocol.context import Context
from fedfactor.protocol.optimizer import Step
from fedfactor.protocol.states import HeldTensors
from fedfactor.server.result import Result


class Point(nn.Module):
    """A model that is one number."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([start]))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.x


@dataclass(frozen=True)
class Quadratic(Method):
    """Loss (a / 2)(x - b)^2 with a and b in the data."""

    def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        a, b = batch[0].unbind(1)
        return (a / 2 * (network.x - b) ** 2).mean()


def clients(*pairs: tuple[float, float], copies: tuple[int, ...] | None = None) -> FederatedData:
    copies = copies or (1,) * len(pairs)
    rows = [pair for pair, count in zip(pairs, copies, strict=True) for _ in range(count)]
    edges = torch.tensor((0, *copies)).cumsum(0)
    parts = [torch.arange(int(a), int(b)) for a, b in itertools.pairwise(edges)]
    return FederatedData((torch.tensor(rows, dtype=torch.float64), torch.zeros(len(rows), dtype=torch.long)), parts)


TWO = clients((1.0, 1.0), (2.0, -1.0))


def run(optimizer: Optimizer | str = "fedavg", rounds: int = 1, data: FederatedData = TWO, **settings: Any) -> Result:
    chosen: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 10,
        "lr": 0.1,
        "dtype": "float64",
        "evaluate_clients": "none",
    }
    chosen.update(settings)
    model = chosen.pop("model", Point())
    return fedfactor.simulate(
        model, data, method=chosen.pop("method", Quadratic()), optimizer=optimizer, rounds=rounds, **chosen
    )


def x(result: Result) -> float:
    return float(result.server.tensors["x"])


def state(result: Result, client: int) -> float:
    from fedfactor.protocol.message import decode

    data = result.federation.store.read("client", client)
    assert data is not None
    return float(decode(data).tensors["optimizer/x"])


def test_fedavg() -> None:
    assert x(run()) == pytest.approx(-0.085)


def test_fedavg_weights_by_examples() -> None:
    """y = (.19, -.36), weighted 3 : 1."""
    assert x(run(data=clients((1.0, 1.0), (2.0, -1.0), copies=(3, 1)))) == pytest.approx((3 * 0.19 - 0.36) / 4)


def test_local_steps_are_torchs_own_sgd() -> None:
    """Momentum and weight decay over several steps of one client, against torch.optim.SGD, to the bit."""
    one = clients((1.0, 1.0))
    found = x(run(data=one, epochs=7, momentum=0.9, weight_decay=0.1, lr=0.05))
    point = Point().double()
    sgd = torch.optim.SGD(point.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, fused=True)
    for _ in range(7):
        sgd.zero_grad()
        (0.5 * (point.x - 1) ** 2).mean().backward()
        sgd.step()
    assert found == float(point.x.detach())


def test_fedprox_has_a_squared_term_with_a_gradient() -> None:
    assert x(run(FedProx(mu=1.0))) == pytest.approx(-0.08)
    assert x(run(FedProx(mu=0.0))) == x(run())


def test_fedprox_holds_rows_of_a_table_to_where_they_started() -> None:
    """Rows 0 and 1 of an embedding, loss row 0 - row 1 with a gradient of (1, -1): steps of -.1 (g + mu (w - w0)).

    w0 - .1, then w0 - .1 - .1 (1 - .1) = w0 - .19; an anchor that moved along would give w0 - .2.
    """

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 1)
            self.table.weight = nn.Parameter(torch.tensor([[0.5], [0.25], [4.0]]))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.table(torch.tensor([0, 1]))

    @dataclass(frozen=True)
    class Difference(Method):
        def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
            first, second = network(batch[0]).flatten()
            return first - second

    result = run(FedProx(mu=1.0), model=Rows(), method=Difference())
    assert result.server.tensors["table.weight"].flatten().tolist() == pytest.approx([0.31, 0.44, 4.0])


def test_scaffold_two_rounds_so_that_the_control_variates_act() -> None:
    one = run(Scaffold())
    assert x(one) == pytest.approx(-0.085)
    assert (state(one, 0), state(one, 1)) == (pytest.approx(-0.95), pytest.approx(1.8))
    assert float(one.server.optimizer["c"]["x"]) == pytest.approx(0.425)
    two = run(Scaffold(), rounds=2)
    assert x(two) == pytest.approx(-0.1535, abs=5e-5)
    assert (state(two, 0), state(two, 1)) == (
        pytest.approx(-1.0995, abs=5e-5),
        pytest.approx(1.7845, abs=5e-5),
    )
    assert float(two.server.optimizer["c"]["x"]) == pytest.approx(0.3425, abs=5e-5)


def test_the_servers_step_scales_the_mean_change_and_not_the_model() -> None:
    assert x(run(Scaffold(server_lr=0.5), model=Point(1.0))) == pytest.approx(1 + 0.5 * ((1 + 0.28) / 2 - 1))


def test_scaffold_finds_the_optimum_that_fedavg_misses() -> None:
    assert x(run(Scaffold(), rounds=200)) == pytest.approx(-1 / 3, abs=1e-3)
    assert x(run(rounds=200)) != pytest.approx(-1 / 3, abs=1e-3)


def test_scaffold_divides_by_the_population_and_keeps_its_invariant() -> None:
    """c - mean(c_i) stays 0, also when one of three clients sits out: dividing by the cohort would break it.

    So would control variates that start as the model's weights, which are not zero here.
    """
    data = clients((1.0, 1.0), (2.0, -1.0), (1.0, 3.0))
    result = run(Scaffold(), rounds=3, data=data, cohort=2, model=Point(1.0))
    kept = [state(result, c) if result.federation.store.read("client", c) else 0.0 for c in range(3)]
    assert float(result.server.optimizer["c"]["x"]) == pytest.approx(sum(kept) / 3)


def test_scaffold_uses_the_rate_of_the_round_and_counts_steps() -> None:
    """With a decaying rate c_i still is the mean gradient along the path: at a fixed point of x it equals f_i'."""
    from fedfactor.protocol.settings import Schedule

    result = run(Scaffold(), rounds=300, schedule=Schedule("exponential", decay=0.995))
    assert x(result) == pytest.approx(-1 / 3, abs=2e-2)
    assert state(result, 0) == pytest.approx(-4 / 3, abs=5e-2)


def test_scaffold_is_stable_with_momentum() -> None:
    settings = {"epochs": 10, "lr": 0.005, "momentum": 0.9}
    assert x(run(Scaffold(), rounds=300, **settings)) == pytest.approx(-1 / 3, abs=1e-2)


def test_feddyn_two_rounds() -> None:
    one = run(FedDyn(alpha=0.1))
    assert x(one) == pytest.approx(-0.169)
    assert (state(one, 0), state(one, 1)) == (pytest.approx(-0.0189), pytest.approx(0.0358))
    assert float(one.server.optimizer["h"]["x"]) == pytest.approx(0.00845)
    two = run(FedDyn(alpha=0.1), rounds=2)
    assert x(two) == pytest.approx(-0.327221, abs=1e-6)
    assert float(two.server.optimizer["h"]["x"]) == pytest.approx(0.012136, abs=1e-6)


def test_feddyn_nearly_solves_its_local_problem_with_many_steps() -> None:
    """Exact local solutions with alpha = 1 are (1/2, -2/3), so x = -1/6, then -1/4."""
    assert x(run(FedDyn(alpha=1.0), epochs=400)) == pytest.approx(-1 / 6, abs=1e-6)
    assert x(run(FedDyn(alpha=1.0), epochs=400, rounds=2)) == pytest.approx(-1 / 4, abs=1e-6)


def test_feddyn_divides_by_the_population_when_a_client_sits_out() -> None:
    """h is the mean of all clients' g_i, those that never took part counting as zero."""
    data = clients((1.0, 1.0), (2.0, -1.0), (1.0, 3.0))
    result = run(FedDyn(alpha=1.0), rounds=3, data=data, cohort=2)
    kept = [state(result, c) if result.federation.store.read("client", c) else 0.0 for c in range(3)]
    assert float(result.server.optimizer["h"]["x"]) == pytest.approx(sum(kept) / 3)


@pytest.mark.parametrize("codec", ["fedpaq", "float16", "int8"])
def test_feddyn_measures_what_the_server_decodes(codec: str) -> None:
    result = run(FedDyn(alpha=1.0), rounds=4, codec=codec)
    assert float(result.server.optimizer["h"]["x"]) == pytest.approx(
        (state(result, 0) + state(result, 1)) / 2, abs=1e-12
    )


def test_top_k_feeds_its_remainder_back_over_rounds() -> None:
    """Two weights, one sent a round: what the first round leaves out goes up with the second's change."""
    from fedfactor.protocol.codecs import TopK

    data = clients((1.0, 1.0))
    model = nn.Module()
    model.x = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    model.forward = lambda inputs: inputs.sum() * model.x.sum()  # type: ignore[method-assign]

    @dataclass(frozen=True)
    class Two(Method):
        def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
            return -(network.x * torch.tensor([1.0, 0.6], dtype=torch.float64)).sum()  # constant gradient (-1, -.6)

    settings: dict[str, Any] = {"data": data, "model": model, "method": Two(), "codec": TopK(share=0.5), "epochs": 1}
    assert run(rounds=1, **settings).server.tensors["x"].tolist() == pytest.approx([0.1, 0.0])
    # second round: changes (.1, .06) plus remainder (0, .06) are (.1, .12), and the second is larger
    assert run(rounds=2, **settings).server.tensors["x"].tolist() == pytest.approx([0.1, 0.12])


def test_feddyn_finds_the_optimum() -> None:
    assert x(run(FedDyn(alpha=1.0), rounds=300)) == pytest.approx(-1 / 3, abs=1e-3)


def test_fedadam_starts_v_at_tau_squared_and_corrects_no_bias() -> None:
    """Mean changes -.3 then -.1 from x = 1: one client that lands there in one step."""
    optimizer = FedAdam(server_lr=0.01, beta1=0.9, beta2=0.99, tau=1e-3)
    weights = {"x": torch.tensor([1.0], dtype=torch.float64)}
    moments = optimizer.start(weights)
    for change, expected in ((-0.3, 0.99032773), (-0.1, 0.97894161)):
        weights, moments = optimizer.step(Step(weights, {"x": weights["x"] + change}, {"x": 1}, moments, [], 1))
        assert float(weights["x"]) == pytest.approx(expected, abs=5e-9)


def test_fedadam_leaves_alone_what_nobody_held() -> None:
    optimizer = FedAdam()
    weights = {"x": torch.tensor([1.0, 1.0])}
    moments = {"m": {"x": torch.tensor([5.0, 5.0])}, "v": {"x": torch.tensor([1.0, 1.0])}}
    mean, held = {"x": torch.tensor([2.0, 1.0])}, {"x": torch.tensor([1.0, 0.0])}
    new, after = optimizer.step(Step(weights, mean, held, moments, [], 1))
    assert new["x"][0] != 1 and new["x"][1] == 1 and after["m"]["x"][1] == 5


def test_fedadam_averages_batch_statistics_instead_of_stepping_them() -> None:
    from tests.helpers.tiny import run as tiny

    adam, plain = tiny(optimizer="fedadam", rounds=1), tiny(rounds=1)
    for name in ("bn1.running_mean", "bn1.running_var", "bn1.num_batches_tracked"):
        assert torch.equal(adam.server.tensors[name], plain.server.tensors[name])


def test_fedpaq_sends_the_model_as_float16() -> None:
    """y = (.19, -.36) rounded to float16 each, then averaged."""
    expected = float(torch.tensor([0.19, -0.36]).half().double().mean())
    assert x(run(codec="fedpaq")) == pytest.approx(expected, abs=1e-12)


def test_fedamp_by_hand() -> None:
    """w = (0, 0) and (1, 1), sigma 2, alpha .5, lambda 1: u1 = (.09197, .09197), a step from w1 (.218394, .018394)."""
    method = FedAMP(strength=1.0, alpha=0.5, sigma=2.0)
    held = {0: {"x": torch.zeros(2, dtype=torch.float64)}, 1: {"x": torch.ones(2, dtype=torch.float64)}}
    from fedfactor.methods import Participant

    for client, expected in ((0, 0.09197), (1, 0.90803)):
        u = method.download({}, Participant(client, 1.0, 0), {}, held, Point())["x"]
        assert u.tolist() == pytest.approx([expected] * 2, abs=5e-6)
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    u1 = method.download({}, Participant(0, 1.0, 0), {}, held, Point())["x"]
    network = nn.Module()
    network.x = nn.Parameter(w.detach().clone())

    target = torch.tensor([2.0, 0.0], dtype=torch.float64)
    task = SimpleNamespace(loss=lambda outputs, y: ((network.x - target) ** 2).sum() / 2)
    ctx = SimpleNamespace(task=task, down={"x": u1}, round=0)
    network.forward = lambda inputs: inputs  # type: ignore[method-assign]
    method.objective(network, (w, w), ctx).backward()  # type: ignore[arg-type]
    stepped = network.x.detach() - 0.1 * network.x.grad
    assert stepped.tolist() == pytest.approx([0.218394, 0.018394], abs=1e-6)


def test_fedamp_decays_alpha_by_rounds() -> None:
    method = FedAMP()
    assert [method.alpha_of(r) for r in (0, 29, 30, 60)] == [1e4, 1e4, pytest.approx(1e3), pytest.approx(1e2)]


def test_fedamp_two_rounds_through_the_loop() -> None:
    """Both clients start at 0; round 1 is local; round 2 starts from each one's own w and is pulled towards u."""

    @dataclass(frozen=True)
    class QuadraticAMP(FedAMP):
        def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
            a, b = batch[0].unbind(1)
            pull = self.strength / (2 * self.alpha_of(ctx.round)) * (network.x - ctx.down["x"]) ** 2
            return (a / 2 * (network.x - b) ** 2).mean() + pull.sum()

    method = QuadraticAMP(strength=1.0, alpha=0.5, sigma=2.0)
    one = run(rounds=1, method=method, epochs=1)
    held = [float(HeldTensors(one.federation.store, "server")[c]["x"]) for c in range(2)]
    assert held == pytest.approx([0.1, -0.2])  # x - .1 (x - 1), and x - .2 (x + 1)
    two = run(rounds=2, method=method, epochs=1)
    attention = 0.5 * math.exp(-(0.3**2) / 2) / 2
    u = [0.1 + attention * (-0.2 - 0.1), -0.2 + attention * (0.1 + 0.2)]
    expected = [0.1 - 0.1 * ((0.1 - 1) + 2 * (0.1 - u[0])), -0.2 - 0.1 * (2 * (-0.2 + 1) + 2 * (-0.2 - u[1]))]
    held = [float(HeldTensors(two.federation.store, "server")[c]["x"]) for c in range(2)]
    assert held == pytest.approx(expected)
    assert x(two) == 0.0  # the server's tensors are where all start, and stay so
