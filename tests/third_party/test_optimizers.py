"""FedAvg, FedProx, FedAdam and SCAFFOLD, several rounds of them, against flwr and pfl.

Three clients with different labels and numbers of examples train a small network with full batches, so nothing is
random and all libraries have to compute the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from torch import Tensor, nn

import fedfactor
from fedfactor.data.clients import FederatedData
from fedfactor.optimizers import FedAdam, FedProx, Scaffold
from fedfactor.protocol.context import Context
from fedfactor.protocol.plan import Tensors
from tests.helpers.grid import FIRST_ID, LocalGrid

pytestmark = pytest.mark.third_party

ROUNDS, EPOCHS, LR = 4, 3, 0.5
SIZES = (4, 7, 9)
GENERATOR = torch.Generator().manual_seed(1)
INPUTS = torch.randn(sum(SIZES), 3, generator=GENERATOR, dtype=torch.float64)
LABELS = (INPUTS.sum(1) + torch.repeat_interleave(torch.tensor([-1, 0, 1]), torch.tensor(SIZES)) > 0).long()
PARTS = torch.arange(sum(SIZES)).split(SIZES)
ADAM = FedAdam(server_lr=0.03, beta1=0.9, beta2=0.99, tau=1e-3)
FLOWERS_ADAM = {"eta": ADAM.server_lr, "beta_1": ADAM.beta1, "beta_2": ADAM.beta2, "tau": ADAM.tau}
LATE = 10**6
"""A round after which the corrections of the moments' bias are 1."""


class Net(nn.Sequential):
    """Two layers, always with the same start; `loss` and `metrics` are what pfl asks for."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        generator = torch.Generator().manual_seed(2)
        for parameter in self.double().parameters():
            nn.init.normal_(parameter, generator=generator)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        from pfl.metrics import Weighted

        return {"loss": Weighted(float(self.loss(x, y).detach()), 1)}


def ours(optimizer: Any = "fedavg", rounds: int = ROUNDS) -> Tensors:
    result = fedfactor.simulate(
        Net(), FederatedData((INPUTS, LABELS), PARTS), optimizer=optimizer, rounds=rounds, epochs=EPOCHS, lr=LR,
        batch_size=max(SIZES), dtype="float64", evaluate_clients="none",
    )  # fmt: skip
    return dict(result.server.tensors)


def close(found: Tensors, expected: Mapping[str, Tensor], tolerance: float) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.allclose(found[name], expected[name], tolerance, tolerance) for name in found)


# flwr


class Nodes(LocalGrid):
    """Clients that train with plain PyTorch, as Flower leaves it to its users."""

    def __init__(self) -> None:
        super().__init__([{} for _ in SIZES], {})

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message, node: int) -> Message:
        start = message.content["arrays"].to_torch_state_dict()
        mu = float(message.content["config"].get("proximal-mu", 0.0))
        rows, net = PARTS[node - FIRST_ID], Net()
        net.load_state_dict(start)
        steps = torch.optim.SGD(net.parameters(), lr=LR)
        for _ in range(EPOCHS):
            steps.zero_grad()
            # Squared, as in the formula of flower.FedProx. The example below that formula leaves the square out.
            distance = sum((weight - start[name]).square().sum() for name, weight in net.named_parameters())
            (net.loss(INPUTS[rows], LABELS[rows]) + mu / 2 * distance).backward()
            steps.step()
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(rows)})}
        return Message(RecordDict(content), reply_to=message)


def with_flower(strategy: flower.FedAvg, rounds: int = ROUNDS) -> Tensors:
    nodes = Nodes()
    result = strategy.start(nodes, ArrayRecord(Net().state_dict()), num_rounds=rounds)
    assert len(nodes.pulled) == rounds * len(SIZES)
    return dict(result.arrays.to_torch_state_dict())


EXACT = 1e-12


def test_fedavg_is_flowers() -> None:
    assert close(ours(), with_flower(flower.FedAvg(fraction_evaluate=0.0)), EXACT)


def test_fedprox_is_flowers() -> None:
    found = with_flower(flower.FedProx(fraction_evaluate=0.0, proximal_mu=0.7))
    assert close(ours(FedProx(mu=0.7)), found, EXACT)
    assert not close(ours(), found, 0.01)


class LateAdam(flower.FedAdam):
    """Flower's FedAdam with v_0 = tau^2, in rounds so late that its correction of the bias is 1."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        if self.v_t is None:
            self.v_t = {name: (0 * x + self.tau**2).numpy() for name, x in Net().state_dict().items()}
        return super().aggregate_train(LATE + server_round, replies)


def test_fedadam_is_flowers_without_its_bias_correction_and_with_our_v0() -> None:
    assert close(ours(ADAM), with_flower(LateAdam(fraction_evaluate=0.0, **FLOWERS_ADAM)), EXACT)


def test_flowers_fedadam_starts_v_at_zero_and_corrects_bias_for_one_round_too_many() -> None:
    """Both exponents are the round plus one, where Kingma and Ba have the round itself."""
    start, mean = Net().state_dict(), ours(rounds=1)
    eta = ADAM.server_lr * (1 - ADAM.beta2**2) ** 0.5 / (1 - ADAM.beta1**2)
    expected = {}
    for name, x in start.items():
        change = mean[name] - x
        m, v = (1 - ADAM.beta1) * change, (1 - ADAM.beta2) * change**2
        expected[name] = x + eta * m / (v.sqrt() + ADAM.tau)
    found = with_flower(flower.FedAdam(fraction_evaluate=0.0, **FLOWERS_ADAM), rounds=1)
    assert close(found, expected, EXACT)
    assert not close(found, ours(ADAM, rounds=1), 0.001)


# pfl


ROUNDED = 1e-6
"""pfl rounds the clients' changes to float32."""


def with_pfl(
    algorithm: str,
    rounds: int = ROUNDS,
    *,
    adam: bool = False,
    late: bool = False,
    by_user: bool = False,
    negated: bool = False,
    **params: Any,
) -> Tensors:
    """Run an algorithm of pfl.

    Args:
        algorithm: fedavg, fedprox or scaffold.
        rounds: Number of rounds.
        adam: The server's optimizer is Adam, which makes averaging FedAdam.
        late: Adam starts with v_0 = tau^2 and after so many steps that its correction of the bias is 1.
        by_user: All clients have equal weight.
        negated: Clients report x - y instead of y - x, and the server takes this into account.
        params: Further parameters of the algorithm.
    """
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints, WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.algorithm.fedprox import FedProx, FedProxParams
    from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    class Model(PyTorchModel):
        def get_model_difference(self, *args: Any, **options: Any) -> Any:
            change = super().get_model_difference(*args, **options)
            return change.apply_elementwise(torch.neg) if negated else change

    net = Net()
    central: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=1.0, maximize=negated)
    if adam:
        central = torch.optim.Adam(net.parameters(), ADAM.server_lr, (ADAM.beta1, ADAM.beta2), ADAM.tau)
    if late:
        for x in net.parameters():
            v = torch.full_like(x, ADAM.tau**2)
            central.state[x] = {"step": torch.tensor(float(LATE)), "exp_avg": torch.zeros_like(x), "exp_avg_sq": v}

    def user(number: int) -> Dataset:
        return Dataset([INPUTS[PARTS[number]], LABELS[PARTS[number]]], user_id=str(number))

    data = FederatedDataset(user, get_user_sampler("minimize_reuse", list(range(len(SIZES)))))
    kind, kind_of_params = {
        "fedavg": (FederatedAveraging, NNAlgorithmParams),
        "fedprox": (FedProx, FedProxParams),
        "scaffold": (SCAFFOLD, SCAFFOLDParams),
    }[algorithm]
    kind().run(
        kind_of_params(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,
            train_cohort_size=len(SIZES),
            val_cohort_size=0,
            **params,
        ),
        SimulatedBackend(data, data, [WeightByUser() if by_user else WeightByDatapoints()]),
        Model(net, torch.optim.SGD, central),
        NNTrainHyperParams(local_num_epochs=EPOCHS, local_learning_rate=LR, local_batch_size=None),
        NNEvalHyperParams(local_batch_size=None),
    )
    return net.state_dict()


def test_fedavg_is_pfls() -> None:
    assert close(ours(), with_pfl("fedavg"), ROUNDED)


def test_fedprox_is_pfls() -> None:
    assert close(ours(FedProx(mu=0.7)), with_pfl("fedprox", mu=0.7), ROUNDED)


def test_fedadam_is_pfls_without_bias_correction_and_with_our_v0() -> None:
    assert close(ours(ADAM), with_pfl("fedavg", adam=True, late=True), ROUNDED)
    assert not close(ours(ADAM), with_pfl("fedavg", adam=True), 0.001)


def scaffold(rounds: int = ROUNDS, **options: Any) -> Tensors:
    from pfl.data.user_state import InMemoryUserStateStorage

    return with_pfl(
        "scaffold",
        rounds,
        by_user=True,
        population=len(SIZES),
        use_gradient_as_control_variate=False,
        user_state_storage=InMemoryUserStateStorage(),
        **options,
    )


def test_scaffold_is_pfls_with_its_sign_mended() -> None:
    assert close(ours(Scaffold()), scaffold(negated=True), ROUNDED)


@dataclass(frozen=True)
class Opposite(Scaffold):
    """SCAFFOLD with the correction subtracted instead of added."""

    def correct(self, parameters: Mapping[str, nn.Parameter], ctx: Context) -> None:
        before = {name: parameter.grad.clone() for name, parameter in parameters.items()}
        super().correct(parameters, ctx)
        for name, parameter in parameters.items():
            parameter.grad.neg_().add_(before[name], alpha=2)


def test_pfls_scaffold_corrects_in_the_wrong_direction_from_the_second_round() -> None:
    """c_i takes (y - x) / (K eta) where the paper's option II has (x - y) / (K eta)."""
    assert close(ours(Scaffold(), rounds=1), scaffold(rounds=1), ROUNDED)
    assert not close(ours(Scaffold(), rounds=2), scaffold(rounds=2), 0.01)
    assert close(ours(Opposite()), scaffold(), ROUNDED)
