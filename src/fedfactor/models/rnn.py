"""FLANC's recurrent network for Shakespeare."""

from __future__ import annotations

import torch

from fedfactor.models.lstm import LSTMClassifier
from fedfactor.models.width import scaled
from fedfactor.registry import register


@register(
    "models",
    "rnn_shakespeare",
    input_shape=(80,),
    input_dtype=torch.int64,
    tokens=80,
    paper="FLANC (NeurIPS 2022) Table 1, Shakespeare",
)
def rnn_shakespeare(classes: int = 80, embedding: int = 512, hidden: int = 256, width: float = 1.0) -> LSTMClassifier:
    """FLANC's one-layer "RNN" at a width p: an LSTM with inputs of 512 p and 256 p hidden units.

    Neither paper nor released code gives the cell. This one fits the sizes of Table 1: weights of
    786,432 p^2 and one bias of 1,024 p make 49K, 443K and 787K at p = 1/4, 3/4 and 1 (the table's 214K at
    p = 1/2 fits no cell; this one has 197K).

    Deviations: torch has a second bias of 1,024 p, and the table leaves out embedding and decoder.
    """
    return LSTMClassifier(classes, scaled(embedding, width), scaled(hidden, width), 1, classes, weight_norm=False)
