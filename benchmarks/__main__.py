"""Run the benchmarks: all of them, or the modules named on the command line."""

from __future__ import annotations

import importlib
import sys

import torch

MODULES = [
    "hadamard", "spectral", "composition", "server", "wire", "population", "cohort", "rounds", "evaluation", "tune",
    "flower", "large",
]  # fmt: skip


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names or MODULES:
        importlib.import_module(f"benchmarks.{name}").run()


if __name__ == "__main__":
    main(sys.argv[1:])
