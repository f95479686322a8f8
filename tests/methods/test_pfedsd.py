"""pFedSD: the loss by hand, the teacher's mode, who is whose teacher, what is used."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedfactor.methods import PFedSD
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.message import decode
from fedfactor.task import Task
from tests.helpers.tiny import Recording, data, run

TASK = Task(nn.Identity(), data())


def test_the_loss_by_hand() -> None:
    """o_w = (1, 0), o_v = (2, 0), y = 0, lambda = .5, tau = 3: .313262 + .5 (9) .0128543."""
    network, x = nn.Linear(1, 2, bias=False), torch.ones(1, 1)
    network.weight = nn.Parameter(torch.tensor([[1.0], [0.0]]))
    ctx = SimpleNamespace(kept={"weight": torch.tensor([[2.0], [0.0]])}, task=TASK)
    loss = PFedSD(strength=0.5, temperature=3.0).objective(network, (x, torch.tensor([0])), ctx)  # type: ignore[arg-type]
    assert float(loss.detach()) == pytest.approx(0.371106, abs=1e-6)
    loss.backward()
    assert network.weight.grad is not None
    assert network.weight.grad.flatten().tolist() == pytest.approx([-0.386221, 0.386221], abs=1e-6)


class Dropped(nn.Module):
    """Batch norm and dropout, so that a teacher in training mode would show."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.fc = nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.norm(x)))


def test_the_teacher_is_in_evaluation_mode_and_outside_the_graph() -> None:
    torch.manual_seed(0)
    network, teacher = Dropped(), Dropped()
    x, y = 5 + torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    kept = {
        name: tensor.clone().requires_grad_(tensor.is_floating_point()) for name, tensor in tensors_of(teacher).items()
    }
    ctx = SimpleNamespace(kept=kept, task=TASK)
    with torch.random.fork_rng():
        loss = PFedSD(strength=2.0, temperature=3.0).objective(network.train(), (x, y), ctx)  # type: ignore[arg-type]
    loss.backward()
    assert all(tensor.grad is None for tensor in kept.values()) and network.fc.weight.grad is not None
    moved = network.norm.running_mean.clone()
    network.norm.reset_running_stats()
    with torch.random.fork_rng():
        student = network(x)
    soft, wanted = ((logits / 3).log_softmax(1) for logits in (student, teacher.eval()(x).detach()))
    expected = F.cross_entropy(student, y) + 2.0 * 9 * F.kl_div(soft, wanted, reduction="batchmean", log_target=True)
    torch.testing.assert_close(loss, expected)
    assert network.training and torch.equal(network.norm.running_mean, moved)  # once a batch, by the student


def test_the_first_round_is_plain_and_later_ones_are_not() -> None:
    settings = {"cohort": 6, "evaluate_clients": "none"}
    assert (
        run("pfedsd", rounds=1, **settings).summary["weights_sha256"]
        == run("fedavg", rounds=1, **settings).summary["weights_sha256"]
    )
    assert run("pfedsd", **settings).summary["weights_sha256"] != run("fedavg", **settings).summary["weights_sha256"]
    neutral = run(PFedSD(strength=0.0), **settings)
    for name, tensor in run("fedavg", **settings).server.tensors.items():
        torch.testing.assert_close(neutral.server.tensors[name], tensor)


def test_the_teachers_pass_is_counted() -> None:
    once, twice = (run(method, rounds=1, capacities=None).history[-1]["macs"] for method in ("fedavg", "pfedsd"))
    assert twice == 2 * once


def test_norm_statistics_are_averaged_with_the_weights() -> None:
    start, result = run("pfedsd", rounds=0), run("pfedsd")
    assert not torch.equal(start.server.tensors["bn1.running_mean"], result.server.tensors["bn1.running_mean"])


def test_a_client_uses_its_own_last_model_and_a_newcomer_the_global_one() -> None:
    engine = Recording()
    result = run("pfedsd", rounds=1, engine=engine)
    cohort = result.history[1]["cohort"]
    sent = {decode(reply).fields["client"]: decode(reply).tensors for reply in engine.up}
    for client in range(6):
        own = result.client_model(client).state_dict()
        expected = (
            {n.removeprefix("model/"): t for n, t in sent[client].items()}
            if client in cohort
            else result.server.tensors
        )
        assert all(torch.equal(own[name], expected[name]) for name in own)
    assert torch.equal(result.model.fc.weight, result.server.tensors["fc.weight"])


def test_all_clients_are_measured_with_the_models_they_use() -> None:
    result = run("pfedsd", rounds=1, evaluate_clients="all", cohort=6)
    event, task = result.history[-1], result.federation.setup.task
    own = [task.evaluate(result.client_model(client), task.data.own_test(client))["accuracy"] for client in range(6)]  # type: ignore[arg-type]
    assert event["all"]["each"] == pytest.approx(own)
    after = dict(zip(event["cohort"], event["selected_after"]["each"], strict=True))
    assert [after[client] for client in range(6)] == pytest.approx(own)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be above 0"):
        PFedSD(temperature=0.0)
