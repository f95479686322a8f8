"""Each promise of `fedfactor.testing` is broken by a method that should break it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfactor import testing
from fedfactor.methods import FedAvg, FedPer, HeteroFL
from fedfactor.protocol.method import Fold, Method, Participant, Traits
from fedfactor.protocol.plan import Reply, whole_plan
from fedfactor.server.dispatch import Dispatch, Exchange
from fedfactor.server.fold import RoundFold
from fedfactor.testing import PROMISES, Promise, check_method
from fedfactor.testing import promises as suite


@dataclass(frozen=True)
class Breaking(FedAvg):
    """A method that is FedAvg, except for what a test changes."""

    memory: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass
class Scaled:
    """A fold whose mean is multiplied by a number."""

    fold: Fold
    by: float

    def add(self, reply: Reply) -> None:
        self.fold.add(reply)

    def result(self) -> Any:
        mean, held = self.fold.result()
        return {name: tensor * self.by for name, tensor in mean.items()}, held


class Infinite(Breaking):
    def objective(self, network: nn.Module, batch: Any, ctx: Any) -> Tensor:
        return super().objective(network, batch, ctx) * float("inf")


class RefusesInSecret(Breaking):
    """Says that it does not go with FedAdam, although it does."""

    def bind(self, task: Any, levels: Any) -> Any:
        return FedAvg()

    def refuses(self, optimizer: Any, codec: Any, training: Any = None) -> str | None:
        return "no FedAdam" if optimizer.name == "fedadam" else None


class FixedCapacity(FedPer):
    """Keeps a layer on the client whose shape depends on the capacity."""

    @property
    def traits(self) -> Traits:
        return Traits(adapts=True)

    def network(self, build: Any, capacity: float) -> nn.Module:
        network: nn.Module = build(1.0)
        network.hidden, network.fc = nn.Linear(256, int(32 * capacity)), nn.Linear(int(32 * capacity), 10)
        return network

    def private_names(self, network: nn.Module) -> set[str]:
        return {"hidden.weight", "hidden.bias", "fc.weight"}


class SaysOne(HeteroFL):
    """Gives weaker clients a smaller network, and says that all train the whole."""

    def trained_capacity(self, capacity: float) -> float:
        return 1.0


class Unseeded(Breaking):
    def objective(self, network: nn.Module, batch: Any, ctx: Any) -> Tensor:
        return super().objective(network, batch, ctx) * (1 + os.urandom(1)[0] / 256)


class Remembering(Breaking):
    """Counts batches in the object itself."""

    def objective(self, network: nn.Module, batch: Any, ctx: Any) -> Tensor:
        self.memory["batches"] = self.memory.get("batches", 0) + 1
        return super().objective(network, batch, ctx) * (1 + self.memory["batches"] % 7)


class RememberingRounds(Breaking):
    """Counts the rounds of a run in the object that `bind` returns."""

    def bind(self, task: Any, levels: Any) -> RememberingRounds:
        return RememberingRounds()

    def fold(self, *arguments: Any) -> Any:
        self.memory["rounds"] = self.memory.get("rounds", 0) + 1
        return Scaled(super().fold(*arguments), self.memory["rounds"])


class Leaking(FedPer):
    def plan(self, view: Any, who: Participant, network: nn.Module, rng: Any) -> Any:
        return whole_plan(view)

    def initial(self, networks: Any) -> Any:
        return Method.initial(FedAvg(), networks)


class DifferentStarts(FedPer):
    def keep(self, network: nn.Module) -> Any:
        return {name: tensor + torch.rand(()) for name, tensor in super().keep(network).items()}


class Shrinking(Breaking):
    def fold(self, *arguments: Any) -> Any:
        return Scaled(super().fold(*arguments), 0.9)


class Peeking(Breaking):
    def objective(self, network: nn.Module, batch: Any, ctx: Any) -> Tensor:
        return super().objective(network, batch, ctx) * (2 + ctx.task.data.central[0].mean())


class Deceiving(Breaking):
    def deploy(self, server: Any, network: nn.Module, capacity: float, kept: Any) -> nn.Module:
        model = super().deploy(server, network, capacity, kept)
        torch.nn.init.zeros_(model.fc.weight)
        return model


class Strange(nn.Sequential):
    """A layer of somebody's own."""


class NotPlain(Breaking):
    def deploy(self, server: Any, network: nn.Module, capacity: float, kept: Any) -> nn.Module:
        return Strange(super().deploy(server, network, capacity, kept))


BROKEN: list[tuple[Promise, type[Method], str]] = [
    (
        suite.runs_or_is_refused_with_every_optimizer_and_codec,
        Infinite,
        "0 of 3 clients sent a valid reply.*the training loss must be a finite number, got nan",
    ),
    (suite.runs_or_is_refused_with_every_optimizer_and_codec, RefusesInSecret, "runs although refuses.. says 'no Fe"),
    (suite.runs_when_capacities_change_every_round, FixedCapacity, "the values given are"),
    (
        suite.runs_when_capacities_change_every_round,
        SaysOne,
        r"trained_capacity.. says 1 of networks of different sizes",
    ),
    (suite.gives_the_same_bits_for_the_same_seed, Unseeded, "some random number does not come from the run's seed"),
    (suite.shares_no_memory_with_its_clients, Remembering, "the method object carries state"),
    (suite.resumes_to_the_same_bits, RememberingRounds, "differs from one that was never interrupted in its weights"),
    (suite.never_sends_private_tensors, Leaking, "message holds the private fc"),
    (suite.starts_private_tensors_alike, DifferentStarts, "has another fc.* before any training"),
    (suite.changes_nothing_without_training, Shrinking, "optimizer .*: .* changed without training"),
    (suite.learns_nothing_from_test_data, Peeking, "the result of training depends on the test data"),
    (suite.deploys_what_was_trained, Deceiving, "computes something else than its network"),
    (suite.deploys_what_was_trained, NotPlain, "holds .*Strange.*Traits.plain says otherwise"),
]


@pytest.mark.parametrize(("promise", "broken", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_promise_is_noticed(promise: Promise, broken: type[Method], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        promise(broken())


def test_an_update_of_a_failing_client_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No method can store an update of a client that failed: the server does the storing."""
    add = RoundFold.add

    def hasty(fold: Any, reply: Reply) -> None:
        add(fold, reply)
        for client in range(testing.federation.CLIENTS):
            fold._store.stage(1, "server", client, b"")

    monkeypatch.setattr(RoundFold, "add", hasty)
    with pytest.raises(AssertionError, match="the server remembers an update of client"):
        suite.loses_only_the_update_of_a_failing_client(FedAvg())


def test_wrong_counts_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No method can miscount: the server does the counting."""
    train = Dispatch.train

    def miscounting(self: Dispatch, exchange: Exchange, *arguments: Any) -> None:
        train(self, exchange, *arguments)
        exchange.answers.bytes_up -= 1

    monkeypatch.setattr(Dispatch, "train", miscounting)
    with pytest.raises(AssertionError, match=r"bytes were sent up, \d+ were reported"):
        suite.counts_the_bytes_that_are_sent(FedAvg())


def test_every_promise_is_broken_by_something() -> None:
    by_the_server = {suite.counts_the_bytes_that_are_sent, suite.loses_only_the_update_of_a_failing_client}
    assert {promise for promise, _, _ in BROKEN} | by_the_server == set(PROMISES)
    assert all(promise.__doc__ for promise in PROMISES)


def test_a_method_is_checked_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [suite.gives_the_same_bits_for_the_same_seed, suite.changes_nothing_without_training]
    monkeypatch.setattr(suite, "PROMISES", (*kept, suite.learns_nothing_from_test_data))
    check_method("fedavg")
    check_method(FedAvg())
    with pytest.raises(
        AssertionError, match=r"Shrinking\(\) breaks 1 of 3 promises:\n- changes_nothing_without"
    ) as raised:
        check_method(Shrinking())
    assert isinstance(raised.value.__cause__, AssertionError)
    with pytest.raises(
        AssertionError, match=r"breaks 2 of 3 promises:(\n- .*: AssertionError: .* loss must be .*got nan.*){2}"
    ):
        check_method(Infinite())
    with pytest.raises(ValueError, match="no method is called 'fedavgg'"):
        check_method("fedavgg")


def test_the_suite_needs_neither_scikit_learn_nor_pytest() -> None:
    assert testing.run("fedavg", rounds=1).history[-1]["global"]["1"]["examples"] == 120
