"""Clients on Flower's nodes: transport and processes. Nothing else in the package knows flwr."""
