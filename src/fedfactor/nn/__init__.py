"""Factorised layers, and functions that put them into a model and take them out again."""

from fedfactor.nn.adapt import Tune, adapt
from fedfactor.nn.factorize import Finding, check, compose, factorize, first_layers, outer_layers, unfitted, weight_norm
from fedfactor.nn.layers import (
    FactorConv1d,
    FactorConv2d,
    FactorGRU,
    FactorLinear,
    FactorLSTM,
    FactorMultiheadAttention,
    FactorRNN,
    FactorWeight,
    composed_once,
    dense_names,
    factor_weights,
    site_names,
)

__all__ = [
    "FactorConv1d",
    "FactorConv2d",
    "FactorGRU",
    "FactorLSTM",
    "FactorLinear",
    "FactorMultiheadAttention",
    "FactorRNN",
    "FactorWeight",
    "Finding",
    "Tune",
    "adapt",
    "check",
    "compose",
    "composed_once",
    "dense_names",
    "factor_weights",
    "factorize",
    "first_layers",
    "outer_layers",
    "site_names",
    "unfitted",
    "weight_norm",
]
