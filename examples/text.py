"""Text in batches of dictionaries: sentences of unequal length are padded, and AdamW trains a small transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import fedfactor

GOOD, BAD = ["good", "great", "fine", "lovely"], ["bad", "poor", "awful", "dull"]
PLAIN = ["the", "film", "was", "a", "story", "of", "one", "man", "and", "his", "dog", "in", "town"]
WORDS = {word: number for number, word in enumerate(["[pad]", *GOOD, *BAD, *PLAIN])}


def reviews(number: int, seed: int) -> list[dict[str, Tensor]]:
    """Make sentences of 4 to 12 words with one word of praise or blame, which the label says."""
    rng, found = torch.Generator().manual_seed(seed), []
    for _ in range(number):
        length, label, place, word = (int(torch.randint(high, (), generator=rng)) for high in (9, 2, 4, 4))
        ids = torch.randint(1 + len(GOOD + BAD), len(WORDS), (4 + length,), generator=rng)
        ids[place] = WORDS[(BAD, GOOD)[label][word]]
        found.append({"input_ids": ids, "labels": torch.tensor(label)})
    return found


def collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad sentences to the longest one of the batch."""
    ids = pad_sequence([one["input_ids"] for one in examples], batch_first=True)
    return {"input_ids": ids, "mask": ids > 0, "labels": torch.stack([one["labels"] for one in examples])}


class Reader(nn.Module):
    """One layer of a transformer, and the mean over words."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(len(WORDS), size, padding_idx=0), nn.Linear(size, 2)
        self.layer = nn.TransformerEncoderLayer(size, 4, 2 * size, dropout=0.0, batch_first=True)

    def forward(self, input_ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        """Return the logits; the loss gets the labels from the batch."""
        read = self.layer(self.embed(input_ids), src_key_padding_mask=~mask)
        logits: Tensor = self.out((read * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return logits


if __name__ == "__main__":
    result = fedfactor.simulate(
        Reader, [reviews(80, seed) for seed in range(5)], test=[reviews(40, 100 + seed) for seed in range(5)],
        collate=collate, rounds=4, local_optimizer=torch.optim.AdamW, lr=3e-3,
    )  # fmt: skip
    print(f"accuracy {result.summary['best_accuracy']:.3f}")
