"""What a round keeps of its replies: sums, not the replies themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from fedfactor.nn import dense_names
from fedfactor.profile import timed
from fedfactor.protocol.aggregation import Aggregation
from fedfactor.protocol.message import Message, decode, encode
from fedfactor.protocol.method import MovingFold
from fedfactor.protocol.moves import Moves
from fedfactor.protocol.optimizer import State, Step
from fedfactor.protocol.plan import HoldersSum, Plan, Reply, Tensors
from fedfactor.protocol.setup import Setup
from fedfactor.protocol.states import pack
from fedfactor.server.privacy import ProtectedRound
from fedfactor.server.robust import gathered, shortened
from fedfactor.server.spool import Spool
from fedfactor.server.state import Server
from fedfactor.server.store import Store


class RoundFold:
    """Adds the replies of a round, one by one: the method's mean, the optimizer's sums, and what the round records."""

    def __init__(
        self,
        setup: Setup,
        server: Server,
        view: Tensors,
        store: Store,
        rule: Aggregation,
        protect: ProtectedRound | None = None,
    ) -> None:
        self._setup, self._server, self._store, self._rule = setup, server, store, rule
        self.method_fold = setup.method.fold(server.tensors, view, setup.network)
        if rule.gathers:
            self.method_fold = gathered(rule, self.method_fold, store.scratch)
        self._extras = HoldersSum(view)
        self._untrained = _first_masks(setup, server)
        # Of a weight that is sent as U V, the rows of U are its output channels.
        self._dense = cache(lambda capacity: {f"{k}.u": n for k, n in dense_names(setup.network(capacity)).items()})
        self.figures: list[dict[str, float]] = []
        """What each client reported about its training."""
        self._kept: list[Reply] = []
        self._spool = Spool(store.scratch)
        self._largest = -1.0, -1
        if protect:
            self.method_fold = protect.fold(self.method_fold)
            for capacity, plan in protect.plans.items():  # noise reaches all that some client can hold
                self._hold(plan, capacity)

    @timed("server algebra")
    def add(self, reply: Reply) -> None:
        """Add a valid reply."""
        setup = self._setup
        if self._rule.bound is not None:
            reply = shortened(reply, self._rule.bound)
        if self._rule.max_samples is not None:
            reply = replace(reply, samples=min(reply.samples, self._rule.max_samples))
        self.method_fold.add(replace(reply, samples=1) if setup.optimizer.uniform else reply)
        self._extras.add(reply.plan, reply.extras)
        self._largest = max(self._largest, (reply.norm, reply.client))
        self.figures.append(reply.figures)
        remembered = setup.method.remember(reply)
        if remembered:
            self._store.stage(self._server.round + 1, "server", reply.client, pack(remembered))
        if setup.method.traits.rereads:
            self._spool.put(len(self._kept), encode(Message("reply", {}, reply.tensors)))
            self._kept.append(replace(reply, tensors={}, reference={}, extras={}))
        self._hold(reply.plan, reply.capacity)

    def _hold(self, plan: Plan, capacity: float) -> None:
        """Note the rows of weights that a client holds: they are trained."""
        for piece in plan.values() if self._untrained else ():
            dense = self._dense(capacity).get(piece.source)
            name = dense if dense in self._untrained else piece.source
            if name in self._untrained:
                rows = piece.index[0] if piece.index else None
                self._untrained[name][rows if isinstance(rows, Tensor) else slice(rows)] = False

    @timed("server algebra")
    def step(self, population: int) -> tuple[Tensors, State]:
        """Return the server's new tensors and optimizer state: weights take the optimizer's step, buffers the mean."""
        setup, server = self._setup, self._server
        mean, held = self.method_fold.result()
        names = setup.method.weight_names(setup.network, server.tensors)
        step = Step(
            {name: server.tensors[name] for name in names},
            {name: mean[name] for name in names},
            {name: held[name] for name in names},
            server.optimizer,
            self._extras.total,
            population,
        )
        stepped, state = setup.optimizer.step(step)
        return {name: stepped.get(name, mean[name]) for name in server.tensors}, state

    @property
    def moves(self) -> Moves:
        """How far the base has moved, this round included; known after `step`."""
        before, fold = self._server.moves, self.method_fold
        return before.then(self._server.round + 1, fold.moves) if isinstance(fold, MovingFold) else before

    @property
    def largest(self) -> int:
        """The client that sent the largest numbers."""
        return self._largest[1]

    @property
    def untrained(self) -> Tensors:
        """Masks of the rows of weights that no client has held, up to this round."""
        return {name: mask for name, mask in self._untrained.items() if mask.any()}

    def replies(self) -> Iterator[Reply]:
        """Yield the replies again, without `reference` and `extras`."""
        if not self._setup.method.traits.rereads:
            raise ValueError(f"{self._setup.method.name}: set Traits.rereads to read the replies of a round in observe")
        for number, reply in enumerate(self._kept):
            yield replace(reply, tensors=decode(self._spool.read(number)).tensors)


def _first_masks(setup: Setup, server: Server) -> Tensors:
    """Return masks of the rows of weights that no client has held before this round."""
    if server.round > 0 or not setup.method.traits.adapts:
        return {name: mask.clone() for name, mask in server.untrained.items()}
    names = setup.method.weight_names(setup.network, server.tensors)
    weights = {name: server.tensors[name] for name in names if server.tensors[name].dim()}
    return {name: torch.ones(len(weight), dtype=torch.bool) for name, weight in weights.items()}
