"""Classifiers of texts from Hugging Face's transformers, whose weights are in a local folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from fedfactor.support.install import optional


def text_classifier(config: str = "", classes: int = 2) -> nn.Module:
    """Build the classifier of sequences that a folder's `config.json` describes, without weights.

    In a recipe, `model.pretrained` names the folder, or a model of the hub, and its weights are loaded. The model takes
    rows of token ids, as `data.tokenizer` makes them; padding is masked.
    """
    path = Path(config) / "config.json"
    if not config or not path.exists():
        raise ValueError(f"there is no {path}: set model.pretrained to a folder of a Hugging Face model")
    hub = optional("transformers", "tune", "a model of Hugging Face")
    known = hub.AutoConfig.for_model(**{**json.loads(path.read_text()), "num_labels": classes})
    if known.pad_token_id is None:
        raise ValueError(f"{path} names no pad_token_id, so the padding of shorter texts cannot be masked: add it")
    model: nn.Module = hub.AutoModelForSequenceClassification.from_config(known)
    model.register_forward_pre_hook(_mask_padding, with_kwargs=True)
    return model


def _mask_padding(model: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the attention mask, if the model is called with token ids alone."""
    if len(args) == 1 and "attention_mask" not in named:
        named["attention_mask"] = (args[0] != model.config.pad_token_id).long()
    return args, named
