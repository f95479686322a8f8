"""Costs of a client's round, for the cells of a recipe: `python docs/evidence/times.py RECIPE [PATTERN] [EXAMPLES]`.

Prints the bytes of the encoded messages, the multiply-accumulates of an example's forward pass in training, and the
seconds of both messages at 2, 10 and 50 Mbps by the rule of FedPara's Table 7. With the number of a client's examples,
also the seconds of its training on the built-in devices. Inputs are images of 3 x 32 x 32 of ten classes. Nothing is
trained, and no data are needed.
"""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path

import torch

from fedfactor.cost import TRAINING, link_seconds
from fedfactor.data.clients import FederatedData
from fedfactor.protocol.fleet import PROFILES, Device
from fedfactor.runs.catalog import find
from fedfactor.runs.recipe import cells, read, resolve
from fedfactor.runs.tasks import model_factory, setup_of
from fedfactor.server.costs import LINKS_MBPS, Costs
from fedfactor.task import Task


def main(recipe: str, pattern: str = "*", examples: str = "0") -> None:
    """Print a line per cell and capacity."""
    speeds = {name: Device(profile=name).speed for name in PROFILES} if int(examples) else {}
    columns = ["cell", "capacity", "bytes down", "bytes up", "MMAC", *(f"{mbps} Mbps" for mbps in LINKS_MBPS), *speeds]
    print("|", " | ".join(columns), "|")
    print("|---" * len(columns) + "|")
    for name, tables in cells(read(find(Path(recipe)))).items():
        if not fnmatch.fnmatch(name, pattern):
            continue
        cell = resolve(tables, name)
        data = FederatedData.without_examples(1, torch.zeros(3, 32, 32))
        setup = setup_of(cell, Task(model_factory(cell.tables["model"], classes=10), data))
        setup.bind(cell.capacities.levels)
        costs = Costs(setup)
        seen = cell.training.seen(int(examples), cell.training.length)
        for level in cell.capacities.levels:
            (down, up), macs = costs.lengths(level), costs.macs(level)
            seconds = [link_seconds(down + up, mbps, transfers=1) for mbps in LINKS_MBPS]
            seconds += [TRAINING * macs * seen / float(speed or 0) for speed in speeds.values()]
            sizes = f"| {name} | {level:g} | {down:,} | {up:,} | {macs / 1e6:.1f} |"
            print(sizes, " | ".join(f"{one:.2f} s" for one in seconds), "|")


if __name__ == "__main__":
    main(*sys.argv[1:])
