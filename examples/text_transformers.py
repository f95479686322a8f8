"""A model of transformers, built from a configuration: its own loss, batches of dictionaries, AdamW."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import fedfactor

WORDS, LONGEST = 50, 12


def model() -> BertForSequenceClassification:
    """Return a small BERT with random weights."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=LONGEST, **sizes))


def sentences(number: int, seed: int) -> list[dict[str, Tensor]]:
    """Draw sentences of 4 to 12 words; the label says whether the first word is among the first half of all words."""
    rng, found = torch.Generator().manual_seed(seed), []
    for _ in range(number):
        length = int(torch.randint(4, LONGEST + 1, (), generator=rng))
        ids, mask = torch.zeros(LONGEST, dtype=torch.int64), (torch.arange(LONGEST) < length).long()
        ids[:length] = torch.randint(1, WORDS, (length,), generator=rng)
        found.append({"input_ids": ids, "attention_mask": mask, "labels": (ids[0] < WORDS // 2).long()})
    return found


if __name__ == "__main__":
    result = fedfactor.simulate(
        model, [sentences(100, seed) for seed in range(5)], test=[sentences(40, 100 + seed) for seed in range(5)],
        rounds=6, epochs=2, batch_size=16, local_optimizer=torch.optim.AdamW, lr=3e-3,
    )  # fmt: skip
    print(f"accuracy {result.summary['best_accuracy']:.3f}")
