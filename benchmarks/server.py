"""The server's share of a round: what it computes for 20 clients of a ResNet-18, beside what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from benchmarks.harness import emit, medians, note
from fedfactor import models
from fedfactor.data.clients import FederatedData
from fedfactor.methods import FLANC, FedHM, HeteroFL, Method, Participant, PriSM
from fedfactor.optimizers import FedAvgOptimizer
from fedfactor.protocol.codecs import Float32
from fedfactor.protocol.plan import Reply, Tensors
from fedfactor.protocol.settings import Training
from fedfactor.protocol.setup import Setup
from fedfactor.rng import torch_rng
from fedfactor.task import Task

CLIENTS, IMAGES, EPOCHS, BATCH = 20, 500, 2, 32  # PriSM Table 7
BLOCKS = {"layer2.0.conv*": (8, 32), "layer3.0.conv*": (16, 64), "layer4.0.conv*": (32, 128)}
# Method, its levels and the options of its ResNet-18.
ROUNDS: dict[str, tuple[Method, tuple[float, ...], dict[str, object]]] = {
    "prism": (PriSM(), (0.4, 0.2), {"scale_stem": False, "shortcut": "slice"}),
    "fedhm": (FedHM(rho=3), (1.0, 0.5, 0.25, 0.125), {}),
    "flanc": (FLANC(bases=BLOCKS), (1.0, 0.75, 0.5, 0.25), {"scale_stem": False}),
    "heterofl": (HeteroFL(), (1.0, 0.64, 0.5, 0.35), {}),
}


def step(network: nn.Module) -> Callable[[], object]:
    """One training step without its update, which is the smaller part."""
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    network.train()
    return lambda: nn.functional.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]


def measure(method: Method, levels: tuple[float, ...], options: dict[str, object]) -> tuple[float, float]:
    """Return the seconds that the server and all clients take for a round."""

    def build(width: float = 1.0) -> nn.Module:
        return models.build("resnet18", width=width, **options)

    data = FederatedData((torch.randn(CLIENTS, 3, 32, 32), torch.arange(CLIENTS) % 10), [torch.arange(CLIENTS)])
    setup = Setup(Task(build, data), method, FedAvgOptimizer(), Float32(), Training())
    setup.bind(levels)
    method = setup.method
    server = method.initial(setup.initial)
    cohort = [Participant(client, levels[client % len(levels)], 0) for client in range(CLIENTS)]

    def plans() -> tuple[Tensors, list[Reply]]:
        view = method.prepare(server, {level: setup.network(level) for level in levels}, training=True)
        replies = []
        for who in cohort:
            network = setup.network(who.capacity)
            plan = method.plan(view, who, network, torch_rng(0, "plan", 0, who.client))
            down = method.download(view, who, plan, {}, network)
            replies.append(Reply(who.client, who.capacity, IMAGES, plan, down, down, {}))
        return view, replies

    view, sent = plans()
    replies = [replace(reply, tensors={name: t + 1 for name, t in reply.tensors.items()}) for reply in sent]

    def fold() -> None:
        folding = method.fold(server, view, setup.network)
        for reply in replies:
            folding.add(reply)
        folding.result()

    seconds = medians(
        {
            "prepare and plans": plans,
            "fold": fold,
            **{f"step at {level:g}": step(setup.network(level)) for level in levels},
        },
        repeats=5,
    )
    steps = EPOCHS * -(-IMAGES // BATCH)
    clients = sum(steps * seconds[f"step at {who.capacity:g}"] for who in cohort)
    return seconds["prepare and plans"] + seconds["fold"], clients


def run() -> None:
    for name, workload in ROUNDS.items():
        note(f"server: {name}")
        ours, theirs = measure(*workload)
        emit(f"server/{name}/seconds", ours, "s", "at most 2")
        emit(f"server/{name}/share of the clients' training", 100 * ours / theirs, "%", "at most 2")
