"""Norm statistics of deployed models, estimated on the clients' data (HeteroFL's static batch norm)."""

from __future__ import annotations

import torch

from fedfactor.protocol.method import Participant
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.states import States
from fedfactor.server.dispatch import Dispatch
from fedfactor.server.state import Server


class Calibration:
    """The norm statistics of one server state by capacity; clients are asked for them when they are first needed."""

    def __init__(self, dispatch: Dispatch, server: Server, clients: list[int], store: States) -> None:
        self._dispatch, self.server, self._clients, self._store = dispatch, server, clients, store
        self.statistics = dict(server.statistics)
        self.moved = 0
        """Bytes sent for calibration, in both directions."""
        self.bad = 0
        """Number of invalid replies."""

    def at(self, capacity: float) -> Tensors:
        """Return the mean of the batch statistics of the server's model on the clients' training data."""
        if capacity not in self.statistics:
            asked = [Participant(client, capacity, self.server.round) for client in self._clients]
            gathered = self._dispatch.gather("calibrate", "calibrated", self.server, asked, self._store)
            self.moved, self.bad = self.moved + gathered.moved, self.bad + gathered.bad
            replies = gathered.messages.values()
            total = sum(reply.fields["samples"] for reply in replies)
            summed: Tensors = {}
            for reply in replies:
                for name, tensor in reply.tensors.items():
                    share = reply.fields["samples"] / total
                    summed[name] = summed.get(name, torch.zeros_like(tensor)) + share * tensor
            self.statistics[capacity] = summed
        return self.statistics[capacity]
