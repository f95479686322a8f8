"""Norm statistics of deployed models, estimated on the clients' data (HeteroFL's static batch norm)."""

from __future__ import annotations

from fedfactor.nn.norms import pooled
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
        """Return the statistics of the server's model on the training data of all clients together."""
        if capacity not in self.statistics:
            everyone = [Participant(client, capacity, self.server.round) for client in self._clients]
            self.statistics[capacity] = self._estimated(everyone)
        return self.statistics[capacity]

    def of(self, who: Participant) -> Tensors:
        """Return the statistics of one client's model on its own training data."""
        return self._estimated([who])

    def _estimated(self, asked: list[Participant]) -> Tensors:
        gathered = self._dispatch.gather("calibrate", "calibrated", self.server, asked, self._store)
        self.moved, self.bad = self.moved + gathered.moved, self.bad + gathered.bad
        replies = list(gathered.messages.values())
        return {
            name: pooled((reply.fields["samples"], reply.tensors[name]) for reply in replies)
            for name in replies[0].tensors
        }
