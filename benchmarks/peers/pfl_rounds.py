"""A workload on pfl, used as documented: `torchrun --nproc-per-node 2 -m benchmarks.peers.pfl_rounds NAME ROUNDS`."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.workloads import WORKLOADS


class Net(nn.Module):
    """The workload's model with the two methods that pfl asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        self.train()
        return nn.functional.cross_entropy(self.inner(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Return the summed loss; only asked for when something is evaluated."""
        self.eval()
        with torch.no_grad():
            return {"loss": Weighted(nn.functional.cross_entropy(self.inner(x), y, reduction="sum").item(), len(y))}


class Clock(TrainingProcessCallback):
    """Notes when every round ends."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Take the time."""
        self.marks.append(time.perf_counter())
        return False, Metrics()


def main(name: str, rounds: int) -> None:
    torch.set_num_threads(1)
    np.random.seed(0)
    work = WORKLOADS[name]
    inputs, labels = work.data()

    def user(client: int) -> Dataset:
        rows = work.rows(client)
        return Dataset(raw_data=[inputs[rows], labels[rows]])

    data = FederatedDataset(user, get_user_sampler("random", list(range(work.users))))
    net = Net(work.model())
    model = PyTorchModel(
        net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0)
    )
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=work.cohort, val_cohort_size=0
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch),
        NNEvalHyperParams(local_batch_size=work.batch),
        callbacks=[clock],
    )
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps([after - before for before, after in itertools.pairwise(clock.marks)]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
