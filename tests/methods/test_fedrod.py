"""FedRoD: both losses by hand, which parameters each moves, class counts, one plain layer in the end."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedfactor
from fedfactor.data.clients import FederatedData
from fedfactor.methods import FedRoD
from fedfactor.methods.fedrod import TwoHeads, balanced
from fedfactor.protocol.message import decode
from fedfactor.task import Task
from tests.helpers.tiny import Tiny, data, odd, run


def test_both_losses_by_hand() -> None:
    """N = (3, 1), g = (.2, -.1), h = (.5, 0), y = 1."""
    g, h, y = (
        torch.tensor([[0.2, -0.1]], requires_grad=True),
        torch.tensor([[0.5, 0.0]], requires_grad=True),
        torch.tensor([1]),
    )
    log_counts = torch.tensor([3.0, 1.0]).log()
    generic = F.cross_entropy(balanced(g, log_counts, 1.0), y)
    assert float(generic.detach()) == pytest.approx(1.619304, abs=1e-6)
    (gradient,) = torch.autograd.grad(generic, g)
    assert gradient.flatten().tolist() == pytest.approx([0.801964, -0.801964], abs=1e-6)
    assert float(F.cross_entropy(balanced(g, log_counts, 0.0), y).detach()) == pytest.approx(0.854355, abs=1e-6)
    personal = F.cross_entropy(g.detach() + h, y)
    assert float(personal.detach()) == pytest.approx(1.171101, abs=1e-6)
    (gradient,) = torch.autograd.grad(personal, h)
    assert gradient.flatten().tolist() == pytest.approx([0.689974, -0.689974], abs=1e-6)


class Headed(nn.Module):
    """A body of one linear layer and a head that returns g = (.2, -.1) and h = (.5, 0) on the input (1)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


def headed() -> nn.Module:
    network = FedRoD().network(lambda width: Headed(), 1.0)
    assert isinstance(network, Headed) and isinstance(network.fc, TwoHeads)
    with torch.no_grad():
        network.body.weight.fill_(1.0)
        network.fc.generic.weight.copy_(torch.tensor([[0.2], [-0.1]]))
        network.fc.personal.weight.copy_(torch.tensor([[0.5], [0.0]]))
    return network


def test_the_objective_is_the_sum_of_both_and_moves_each_part_by_its_own_loss() -> None:
    """The body's gradient is that of the generic loss: .801964 (.2) - .801964 (-.1) = .240589."""
    network = headed().train()
    ctx = SimpleNamespace(task=Task(Tiny, data()), labels=torch.tensor([0, 1]), counts=torch.tensor([3, 1]))
    loss = FedRoD().objective(network, (torch.ones(1, 1), torch.tensor([1])), ctx)  # type: ignore[arg-type]
    assert float(loss.detach()) == pytest.approx(1.619304 + 1.171101, abs=1e-6)
    loss.backward()
    gradients = {name: parameter.grad.flatten().tolist() for name, parameter in network.named_parameters()}
    assert gradients["fc.generic.weight"] == pytest.approx([0.801964, -0.801964], abs=1e-6)
    assert gradients["fc.personal.weight"] == pytest.approx([0.689974, -0.689974], abs=1e-6)
    assert gradients["body.weight"] == pytest.approx([0.240589], abs=1e-6)
    assert network.eval()(torch.ones(1, 1)).flatten().tolist() == pytest.approx([0.7, -0.1])


def test_a_round_of_two_clients_by_hand() -> None:
    """One linear layer as the head, one step of .5: the generic head moves by balanced softmax, the other alone.

    Clients have labels (0, 0, 1) and (1): the mean of the generic heads counts them 3 : 1.
    """
    x = torch.tensor([[1.0, 0.5], [-1.0, 2.0], [0.3, 1.0], [2.0, -0.5]])
    y = torch.tensor([0, 0, 1, 1])
    parts = [torch.tensor([0, 1, 2]), torch.tensor([3])]
    model = nn.Sequential(OrderedDict(fc=nn.Linear(2, 2, bias=False)))
    settings = {"rounds": 1, "epochs": 1, "batch_size": 4, "lr": 0.5, "evaluate_clients": "none"}
    result = fedfactor.simulate(model, FederatedData((x, y), parts), method="fedrod", **settings)
    g, h = model.fc.weight.detach(), result.federation.setup.kept(1.0)["fc.personal.weight"]
    generic = []
    for client, (rows, counts) in enumerate(zip(parts, ([2.0, 1.0], [0.0, 1.0]), strict=True)):
        inputs, hot = x[rows], F.one_hot(y[rows], 2)
        scores = torch.tensor(counts) * (inputs @ g.T).exp()
        balanced_error = scores / scores.sum(1, keepdim=True) - hot
        generic.append(g - 0.5 * balanced_error.T @ inputs / len(rows))
        scores = (inputs @ (g + h).T).exp()
        personal_error = scores / scores.sum(1, keepdim=True) - hot
        state = decode(result.federation.store.read("client", client) or b"").tensors["kept/fc.personal.weight"]
        torch.testing.assert_close(state, h - 0.5 * personal_error.T @ inputs / len(rows))
    assert torch.equal(generic[1], g)  # of one class alone, balanced softmax learns nothing
    torch.testing.assert_close(result.server.tensors["fc.generic.weight"], (3 * generic[0] + generic[1]) / 4)


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_a_class_the_client_does_not_have_gets_no_gradient() -> None:
    network = FedRoD().network(lambda width: Three(), 1.0)
    ctx = SimpleNamespace(task=Task(Tiny, data()), labels=torch.tensor([0, 2]), counts=torch.tensor([5, 7]))
    loss = FedRoD().objective(network, (torch.randn(4, 2), torch.tensor([0, 2, 2, 0])), ctx)  # type: ignore[arg-type]
    loss.backward()
    assert torch.isfinite(loss)
    gradient = network.fc.generic.weight.grad
    assert not gradient[1].any() and gradient[0].any() and gradient[2].any()


def test_counts_are_of_all_the_clients_examples_whatever_the_batches() -> None:
    """A class with one example, which a pass that drops the last batch may miss, still has a finite loss."""
    labels = data().train[1]
    ones, twos = ((labels == digit).nonzero().flatten() for digit in (1, 2))
    parts = [torch.cat([ones[:20], twos[:1]]), torch.cat([twos[1:20], ones[20:21]])]
    result = run("fedrod", data=FederatedData(data().train, parts, data().central), batch_size=10, cohort=2, rounds=3)
    assert result.summary["totals"]["failures"] == 0


def test_personal_heads_train_and_differ_and_the_server_has_a_generic_model() -> None:
    result = run("fedrod", cohort=6)
    generic, first, second = result.model, result.client_model(0), result.client_model(1)
    assert all(type(model.fc) is nn.Linear for model in (generic, first, second))
    assert torch.equal(generic.fc.weight, result.server.tensors["fc.generic.weight"])
    assert torch.equal(first.hidden.weight, second.hidden.weight)
    assert not torch.equal(first.fc.weight, second.fc.weight)
    assert not torch.equal(first.fc.weight, generic.fc.weight)
    assert "1" in result.history[-1]["global"]


def test_the_generic_part_is_fedavg_with_balanced_softmax() -> None:
    """With gamma = 0 the personal head changes nothing of what is shared."""
    plain, ours = run("fedavg"), run(FedRoD(gamma=0.0))
    for name, tensor in plain.server.tensors.items():
        torch.testing.assert_close(
            ours.server.tensors[name.replace("fc.", "fc.generic.")], tensor, rtol=1e-5, atol=1e-6
        )


def test_a_model_without_that_head_is_refused() -> None:
    with pytest.raises(ValueError, match="no linear layer 'classifier'; its linear layers are hidden, fc"):
        run(FedRoD(head="classifier"), model=Tiny)
    with pytest.raises(ValueError, match="gamma must be at least 0, got -1"):
        FedRoD(gamma=-1.0)
    with pytest.raises(
        ValueError, match="fedrod's balanced loss needs one class per example, which this binary task does not have"
    ):
        run("fedrod", kind="binary", data=odd())
