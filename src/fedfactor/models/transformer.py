"""A small Transformer for the classification of short texts (FedDecomp, AG News)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from fedfactor.models.width import scaled
from fedfactor.registry import register

Positions = Literal["learned", "sinusoidal"]
PADDING = 0


class TransformerClassifier(nn.Module):
    """Token and position embeddings, encoder layers, the mean over all tokens except padding, `fc`.

    Input: token ids (batch, time), 0 is padding; output (batch, classes).
    """

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        heads: int,
        layers: int,
        hidden: int,
        length: int,
        classes: int,
        dropout: float,
        positions: Positions,
    ) -> None:
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(vocabulary, dim, padding_idx=PADDING)
        self.positions: Tensor
        if positions == "learned":
            self.positions = nn.Parameter(torch.randn(length, dim) * 0.02)
        elif positions == "sinusoidal":
            # Not persistent: a constant need not be sent.
            self.register_buffer("positions", _sinusoids(length, dim), persistent=False)
        else:
            raise ValueError(f"positions must be 'learned' or 'sinusoidal', got {positions!r}")
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(dim, heads, hidden, dropout, batch_first=True)
        # With nested tensors, shapes depend on the data: such networks can be neither exported nor counted.
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        for parameter in self.encoder.parameters():
            # The encoder consists of copies of one layer: without this, all layers would start with the same values.
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        self.fc = nn.Linear(dim, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of a batch of texts of at most `length` tokens."""
        time = ids.shape[1]
        if time > self.length:
            raise ValueError(f"texts of {time} tokens are longer than this network's length={self.length}")
        padding = ids == PADDING
        # Attention over no token is NaN, so a text of only padding attends to its first position.
        hidden = padding & (torch.arange(time, device=ids.device) > 0)
        x = self.dropout(self.embedding(ids) + self.positions[:time])
        x = self.encoder(x, src_key_padding_mask=hidden)
        kept = (~padding).to(x.dtype).unsqueeze(2)
        mean = (x * kept).sum(1) / kept.sum(1).clamp(min=1)
        logits: Tensor = self.fc(mean)
        return logits


@register(
    "models",
    "transformer",
    input_shape=(64,),
    input_dtype=torch.int64,
    tokens=10_000,
    paper="FedDecomp appendix, AG News",
)
def transformer(
    classes: int = 4,
    vocabulary: int = 10_000,
    dim: int = 128,
    heads: int = 4,
    layers: int = 2,
    hidden: int = 256,
    length: int = 128,
    dropout: float = 0.1,
    positions: Positions = "learned",
    width: float = 1.0,
) -> TransformerClassifier:
    """Return a Transformer classifier for AG News. FedDecomp uses one without giving its size.

    `width` scales `dim` and `hidden`, not the number of heads: `dim` is a whole number of features per head.
    Deviations: the paper mentions five classes, AG News has four.
    """
    if dim % heads:
        raise ValueError(f"dim={dim} must be a multiple of heads={heads}")
    dim = heads * scaled(dim // heads, width)
    return TransformerClassifier(
        vocabulary, dim, heads, layers, scaled(hidden, width), length, classes, dropout, positions
    )


def _sinusoids(length: int, dim: int) -> Tensor:
    """Return (length, dim): sines in even columns, cosines in odd ones, with wavelengths up to 20,000 pi."""
    half = (dim + 1) // 2
    rates = torch.exp(torch.arange(half) * (-math.log(10_000.0) / max(half, 1)))
    angles = torch.arange(length).unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[:, :dim].contiguous()
