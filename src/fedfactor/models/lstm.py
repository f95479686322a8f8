"""LSTMs over tokens: next-character prediction (FedPara) and sentiment (PriSM)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedfactor.models.width import scaled
from fedfactor.registry import register


class LSTMClassifier(nn.Module):
    """`embedding`, `lstm`, and `fc` on the output at the last position.

    Input: token ids (batch, time); output (batch, classes).
    """

    def __init__(self, tokens: int, embedding: int, hidden: int, layers: int, classes: int, weight_norm: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding)
        self.lstm: nn.Module = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.fc = nn.Linear(hidden, classes)
        if weight_norm:
            # Imported here, since a plain network needs no factorised layers.
            from fedfactor.nn import weight_norm as normalised

            self.lstm = normalised(self.lstm)

    def forward(self, ids: Tensor) -> Tensor:
        """Return one row of logits per row of tokens."""
        outputs, _ = self.lstm(self.embedding(ids))
        logits: Tensor = self.fc(outputs[:, -1])
        return logits


@register(
    "models",
    "lstm_shakespeare",
    input_shape=(80,),
    input_dtype=torch.int64,
    tokens=80,
    paper="FedPara (arXiv:2108.06098) C.2; LEAF",
)
def lstm_shakespeare(
    classes: int = 80,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
    width: float = 1.0,
    weight_norm: bool = True,
) -> LSTMClassifier:
    """FedPara's two-layer LSTM (C.2): 256 hidden units, 80 characters, weight normalisation on all variants.

    The paper does not give the size of the embedding; 8 is from the works that it follows (McMahan et al. 2017,
    LEAF), and so are the 80 input characters and the prediction of the next one. `width` scales the hidden units.
    """
    return LSTMClassifier(classes, embedding, scaled(hidden, width), layers, classes, weight_norm)


@register(
    "models",
    "lstm_imdb",
    input_shape=(500,),
    input_dtype=torch.int64,
    tokens=1001,
    paper="PriSM (arXiv:2208.13141) Table 6",
)
def lstm_imdb(
    tokens: int = 1001, embedding: int = 64, hidden: int = 256, layers: int = 2, width: float = 1.0
) -> LSTMClassifier:
    """PriSM's LSTM for IMDB (Table 6): one logit, positive for a positive review.

    The last position must be a word, so reviews are padded in front. `width` scales the hidden units.
    """
    return LSTMClassifier(tokens, embedding, scaled(hidden, width), layers, 1, weight_norm=False)
