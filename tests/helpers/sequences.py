"""Ragged sequences as map-style datasets of mappings, and a model that returns `loss` and `logits`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

from fedfactor.data import Datasets


class Sequences(Dataset[dict[str, Any]]):
    """Sequences of 3 to 8 numbers below 20, and whether most are above 10; `noisy` ones change with each reading."""

    def __init__(self, seed: int, number: int = 20, *, noisy: bool = False) -> None:
        rng = np.random.default_rng(seed)
        found = [torch.from_numpy(rng.integers(1, 20, rng.integers(3, 9))) for _ in range(number)]
        self.items, self.noisy = [(ids, int((ids > 10).sum() * 2 > len(ids))) for ids in found], noisy

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids, label = self.items[index]
        if self.noisy:
            ids = ids.clone()
            ids[random.randrange(len(ids))] = np.random.randint(1, 20) if torch.rand(()) < 0.5 else 1
        return {"ids": ids, "labels": label}


def padded(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad sequences with 0."""
    ids = pad_sequence([example["ids"] for example in examples], batch_first=True)
    return {"ids": ids, "labels": torch.tensor([example["labels"] for example in examples])}


@dataclass
class Output:
    """Outputs in the form of Hugging Face's models."""

    loss: Tensor | None
    logits: Tensor


class Bag(nn.Module):
    """Mean of the embeddings of a sequence without its padding, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.fc = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Output:
        mask = (ids > 0).to(self.embed.weight.dtype)[..., None]
        mean = (self.embed(ids) * mask).sum(1) / mask.sum(1)
        logits = self.fc(self.hidden(mean).relu())
        return Output(None if labels is None else nn.functional.cross_entropy(logits, labels), logits)


def datasets(clients: int = 4, *, noisy: bool = False) -> list[Sequences]:
    """One dataset per client."""
    return [Sequences(seed, 20 + seed, noisy=noisy) for seed in range(clients)]


def held_out(clients: int = 4, *, noisy: bool = False) -> list[Sequences]:
    """One test dataset per client."""
    return [Sequences(100 + seed, 15, noisy=noisy) for seed in range(clients)]


def owners(clients: int = 4) -> Datasets:
    """The same, for recipes."""
    return Datasets(datasets(clients), held_out(clients), padded, class_names=("few", "many"))


def one_owner(seed: int = 0) -> Datasets:
    """The data of one node."""
    return Datasets(Sequences(seed), Sequences(100 + seed), padded, class_names=("few", "many"))


def positions() -> Datasets:
    """Sequences with a class per position."""
    return Datasets(TensorDataset(torch.zeros(12, 5).long(), torch.zeros(12, 5).long()))


def doubled(outputs: Output, batch: dict[str, Tensor]) -> Tensor:
    """Return twice the usual loss."""
    return 2 * nn.functional.cross_entropy(outputs.logits, batch["labels"])
