"""A workload on Flower's simulation, used as documented: `python -m benchmarks.peers.flower_rounds NAME ROUNDS`."""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

from benchmarks.workloads import WORKLOADS

NAME, ROUNDS = sys.argv[1], int(sys.argv[2])
WORK = WORKLOADS[NAME]
MARKS: list[float] = []


@functools.cache
def here() -> tuple[nn.Module, Tensor, Tensor]:
    """Build model and data once a worker process."""
    torch.set_num_threads(1)
    return (WORK.model(), *WORK.data())


client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train one client."""
    model, inputs, labels = here()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=WORK.lr)
    rows = WORK.rows(int(context.node_config["partition-id"]))
    model.train()
    for where in rows[torch.randperm(WORK.samples)].split(WORK.batch):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[where]), labels[where]).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": WORK.samples})}
    return Message(content=RecordDict(content), reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Average for some rounds, noting when each ends."""

    def mark(round: int, arrays: ArrayRecord) -> MetricRecord:
        MARKS.append(time.perf_counter())
        return MetricRecord({})

    strategy = FedAvg(fraction_train=WORK.cohort / WORK.users, fraction_evaluate=0.0, min_available_nodes=WORK.users)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(WORK.model().state_dict()),
        num_rounds=ROUNDS,
        train_config=ConfigRecord({}),
        evaluate_fn=mark,
    )


if __name__ == "__main__":
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=WORK.users,
        backend_config={
            "init_args": {"num_cpus": 2, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    print(json.dumps([after - before for before, after in itertools.pairwise(MARKS)]))
