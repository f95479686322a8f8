"""Federated learning of factorised models."""

__version__ = "0.1.0"
