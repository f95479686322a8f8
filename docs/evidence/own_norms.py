"""What averaged norm statistics cost: `python docs/evidence/own_norms.py DATA_DIR RUN ...`.

Prints the mean accuracy of a run's clients with their models as they are, then with the running means and variances of
batch norms taken anew from each client's own training data. No weight is changed.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import fedfactor
from fedfactor.runs.tasks import task_of


def main(data_dir: str, *directories: str) -> None:
    """Measure each run."""
    for directory in directories:
        run = fedfactor.load(directory)
        task, _ = task_of(run.recipe, data_dir)
        data, as_it_is, own = task.data, [], []
        for client in range(data.clients):
            test = data.own_test(client)
            if test is None:
                continue
            model = run.model(client=client)
            as_it_is.append(task.evaluate(model, test)["accuracy"])
            for norm in model.modules():
                if isinstance(norm, nn.modules.batchnorm._BatchNorm):
                    norm.reset_running_stats()
                    norm.momentum = None  # the plain mean over batches
            model.train()
            with torch.no_grad():
                for inputs in data.of(client)[0].split(run.recipe.tables["train"]["batch_size"]):
                    model(data.transform.test(inputs))
            own.append(task.evaluate(model, test)["accuracy"])
        print(f"{directory}: {100 * sum(as_it_is) / len(own):.1f}, own norm statistics {100 * sum(own) / len(own):.1f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
