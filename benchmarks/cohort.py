"""Memory and time of a round against the number of its clients: ten against a thousand, a model of ten million weights.

Each round runs in a process of its own; memory is the peak of the server's process, workers not included. `python -m
benchmarks.cohort METHOD ENGINE CLIENTS` measures one round.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import emit, note

METHODS = ("fedavg", "fedpara", "heterofl", "flanc", "fedhm")
ENGINES = ("pool", "flower")
FEW, MANY, POPULATION = 10, 1_000, 1_000_000
WORKERS, HIDDEN, INPUTS = 2, 1792, 256


class Net(nn.Module):
    """Four hidden layers: 10.2 million parameters at full width."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        n = int(HIDDEN * width)
        self.first, self.fc = nn.Linear(INPUTS, n), nn.Linear(n, 10)
        self.inner = nn.ModuleList(nn.Linear(n, n) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        for layer in self.inner:
            x = layer(x).relu()
        out: Tensor = self.fc(x)
        return out


def run() -> None:
    for method in METHODS:
        for engine in ENGINES:
            few, many = (_measured(method, engine, clients) for clients in (FEW, MANY))
            emit(
                f"cohort/{method}/{engine}/memory of {MANY} over {FEW} clients",
                many["MB"] / few["MB"],
                "ratio",
                "<= 1.3",
            )
            emit(f"cohort/{method}/{engine}/seconds per client of {MANY}", many["s"] / MANY, "s", "")


def _measured(method: str, engine: str, clients: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.cohort", method, engine, str(clients)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    note(f"{method}, {engine}, {clients} clients: {found['MB']:.0f} MB, {found['s'] / clients:.3f} s per client")
    return found


class Grid:
    """A Flower grid in this process: a node works when it gets a message, and its answer waits until it is pulled."""

    def __init__(self) -> None:
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # a message cannot be made without them
        self.setup: Any = None
        self._answers: dict[str, Any] = {}
        self._count = 0

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """Run the jobs."""
        from fedfactor.client.work import work
        from fedfactor.engines.flower.adapter import pack, unpack

        numbers = []
        for message in messages:
            data, _ = unpack(message.content)
            reply, _ = work(self.setup, data or b"", None)
            self._count += 1
            numbers.append(str(self._count))
            content = pack(reply, {"state": "", "seconds": 0.0})
            about = SimpleNamespace(src_node_id=message.metadata.dst_node_id)
            self._answers[numbers[-1]] = SimpleNamespace(metadata=about, content=content, has_error=lambda: False)
        return numbers

    def pull_messages(self, numbers: Iterable[str]) -> list[Any]:
        """Return answers, each of them once."""
        return [self._answers.pop(number) for number in numbers if number in self._answers]


class Everybody:
    """A roster in which every client is connected, as the node of its own number."""

    run, population = "benchmark", POPULATION

    def __init__(self) -> None:
        self.here = self

    def gather(self, *_: object) -> None:
        """Wait for nobody."""

    def get(self, client: int) -> int:
        """Return the node of a client."""
        return client + 1

    def samples_of(self, client: int) -> None:
        """Know nothing about the data of a client."""


def _engine(name: str) -> Any:
    if name == "pool":
        from fedfactor.engines import Pool

        return Pool(WORKERS)
    from fedfactor.engines.flower.engine import FlowerEngine

    class Local(FlowerEngine):
        def run(self, setup: Any, jobs: Any) -> Any:
            self.grid.setup = setup
            return super().run(setup, jobs)

    return Local(Grid(), Everybody(), poll=0.05)  # type: ignore[arg-type]


def child(method: str, engine: str, clients: int) -> None:
    """Run one round and print what it took."""
    import fedfactor
    from fedfactor.data.clients import FederatedData, Virtual

    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(4000, INPUTS, generator=rng), torch.randint(10, (4000,), generator=rng)
    data = FederatedData((inputs, labels), Virtual(POPULATION, lambda client: (torch.arange(4) + 4 * client) % 4000))
    result = fedfactor.simulate(
        Net, data, method=method, rounds=1, cohort=clients, batch_size=4, evaluate_every=0, evaluate_clients="none",
        capacities={1.0: 0.5, 0.5: 0.5}, engine=_engine(engine),
    )  # fmt: skip
    (seconds,) = (event["seconds"] for event in result.history if event["event"] == "round")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps({"MB": peak, "s": seconds, "sha256": result.summary["weights_sha256"]}))


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], int(sys.argv[3]))
