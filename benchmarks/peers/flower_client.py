"""What Flower's simulation runs for a client; a module of its own, which its worker processes can import."""

from __future__ import annotations

import functools

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from benchmarks.workloads import WORKLOADS

app = ClientApp()


@functools.cache
def here(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Build model and data once a worker process."""
    torch.set_num_threads(1)
    return (WORKLOADS[name].model(), *WORKLOADS[name].data())


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client."""
    name = str(message.content["config"]["workload"])
    work, (model, inputs, labels) = WORKLOADS[name], here(name)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
    rows = work.rows(int(context.node_config["partition-id"]))
    model.train()
    for where in rows[torch.randperm(work.samples)].split(work.batch):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[where]), labels[where]).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": work.samples})}
    return Message(content=RecordDict(content), reply_to=message)
