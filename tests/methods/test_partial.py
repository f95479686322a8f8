"""FedPer, FedRep, FedBN and LG-FedAvg: which part stays, in which order the parts train, how the rest is averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fedfactor
from fedfactor.data.clients import FederatedData
from fedfactor.methods import FedBN, FedPer, FedRep, LGFedAvg, Method
from fedfactor.protocol.context import Context
from fedfactor.protocol.message import decode
from fedfactor.protocol.plan import Reply, whole_plan
from fedfactor.server.result import Result
from tests.helpers.folding import folded
from tests.helpers.tiny import Recording, Tiny, run


def kept(result: Result, client: int) -> dict[str, Tensor]:
    state = decode(result.federation.store.read("client", client) or b"").tensors
    return {name.removeprefix("kept/"): tensor for name, tensor in state.items()}


class Product(nn.Module):
    """A body b and a head h; the toy loss is 1/2 (h b - 1)^2."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.fc = nn.Parameter(torch.tensor(1.0)), nn.ParameterDict({"h": nn.Parameter(torch.tensor(0.5))})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.b * self.fc["h"]


class Toy:
    """Puts the toy loss in place of the task's."""

    def objective(self, network: Product, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        return 0.5 * (network.fc["h"] * network.b - 1) ** 2


@dataclass(frozen=True)
class ToyRep(Toy, FedRep):  # type: ignore[misc]
    pass


@dataclass(frozen=True)
class ToyPer(Toy, FedPer):  # type: ignore[misc]
    pass


def toy(method: Method, **settings: object) -> tuple[float, float]:
    """Run one client for one round and return its head and the server's body."""
    data = FederatedData((torch.ones(2, 2), torch.zeros(2, dtype=torch.long)), [torch.arange(2)])
    result = fedfactor.simulate(Product, data, method=method, rounds=1, lr=0.1, **settings)  # type: ignore[arg-type]
    return float(kept(result, 0)["fc.h"]), float(result.server.tensors["b"])


def test_fedrep_trains_the_head_first_and_fedper_both_at_once() -> None:
    """h = 1/2 + .1 (1/2) = .55 in both; then b = 1 + .1 (.45)(.55) = 1.02475, or b = 1 + .1 (1/2)(1/2) = 1.025."""
    assert toy(ToyRep(), epochs=2) == pytest.approx((0.55, 1.02475), abs=1e-6)
    assert toy(ToyPer(), epochs=1) == pytest.approx((0.55, 1.025), abs=1e-6)


def test_a_frozen_head_is_moved_by_neither_momentum_nor_decay() -> None:
    head, body = toy(ToyRep(head_epochs=0), epochs=3, momentum=0.9, weight_decay=0.1)
    assert head == 0.5 and body != 1.0
    head, body = toy(ToyRep(head_epochs=3), epochs=3, momentum=0.9, weight_decay=0.1)
    assert head != 0.5 and body == 1.0


def test_fedreps_epochs() -> None:
    assert [phase.epochs for phase in FedRep().phases(Tiny(), 5)] == [4, 1]
    assert [phase.epochs for phase in FedRep(head_epochs=2).phases(Tiny(), 5)] == [2, 3]
    with pytest.raises(ValueError, match="set two, or head_epochs = 0 or 1"):
        run("fedrep", epochs=1)


def replies(name: str, values: Sequence[float], samples: Sequence[int]) -> list[Reply]:
    plan, zero = whole_plan([name]), {name: torch.zeros(())}
    return [
        Reply(client, 1.0, count, plan, zero, {name: torch.tensor(value)}, {})
        for client, (value, count) in enumerate(zip(values, samples, strict=True))
    ]


@pytest.mark.parametrize(
    ("method", "mean"), [(FedPer(), 1.75), (FedRep(), 1.5), (FedBN(), 1.5), (LGFedAvg(), 1.5)], ids=str
)
def test_bodies_1_and_2_of_one_and_three_examples(method: Method, mean: float) -> None:
    server = {"b": torch.zeros(())}
    found, _ = folded(method, server, replies("b", [1.0, 2.0], [1, 3]))
    assert float(found["b"]) == pytest.approx(mean)


class Nested(nn.Module):
    """Batch norms whose names do not say so, three deep, and a layer whose name does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(64, 12))
        self.deep = nn.ModuleDict({"down": nn.Sequential(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12)))})
        self.bn_like = nn.Linear(12, 12)
        self.norm = nn.SyncBatchNorm(12, affine=False)
        self.fc = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.bn_like(self.deep["down"](self.stem(x))).relu())


def test_fedbn_finds_batch_norms_by_type_however_deep_and_whatever_they_are_called() -> None:
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    wanted = {f"deep.down.0.1.{name}" for name in names} | {f"norm.{name}" for name in names[2:]}
    assert FedBN().private_names(Nested()) == wanted
    engine = Recording()
    result = run("fedbn", model=Nested, engine=engine)
    sent = {name.removeprefix("model/") for message in engine.up for name in decode(message).tensors}
    assert sent == set(Nested().state_dict()) - wanted
    first, second = (kept(result, client) for client in result.history[1]["cohort"][:2])
    assert not torch.equal(first["deep.down.0.1.running_mean"], second["deep.down.0.1.running_mean"])
    assert not torch.equal(first["deep.down.0.1.weight"], second["deep.down.0.1.weight"])


def test_fedbn_without_batch_norms_is_refused() -> None:
    with pytest.raises(ValueError, match="the model has none"):
        run("fedbn", model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


def test_lg_fedavg_keeps_the_first_layers_or_whatever_is_not_listed() -> None:
    engine = Recording()
    result = run("lg_fedavg", engine=engine)
    assert {name for message in engine.up for name in decode(message).tensors} == {"model/fc.weight", "model/fc.bias"}
    bodies = [kept(result, client)["conv1.weight"] for client in result.history[1]["cohort"][:2]]
    assert not torch.equal(*bodies)
    assert set(run(LGFedAvg(shared=("conv1", "conv2"))).server.tensors) == {
        "conv1.weight",
        "conv1.bias",
        "conv2.weight",
    }
    with pytest.raises(ValueError, match="no layer 'classifier' to share; its layers are conv1"):
        run(LGFedAvg(shared=("classifier",)))
    with pytest.raises(ValueError, match="that is fedavg"):
        run(LGFedAvg(shared=("conv1", "bn1", "conv2", "bn2", "hidden", "fc")))
