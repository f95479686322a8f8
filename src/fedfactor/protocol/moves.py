"""Moves of the base: what the rounds of a run add to frozen weights, for methods that merge changes into them.

The base itself is on every machine and in no message. A client keeps how far its base has moved, and gets the moves
that it has missed as a message of kind `moves` within its next job.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from fedfactor.factor.products import product
from fedfactor.protocol.coding import sections
from fedfactor.protocol.message import BadMessage, Message, decode, encode
from fedfactor.protocol.plan import Tensors

SECTION = "moves"
"""The section of a job that has the message of kind `moves`, as bytes."""


@dataclass(frozen=True)
class Moves:
    """The sum of all moves, and the latest moves one by one.

    A move has, per layer, `LAYER.u` and `LAYER.v`, whose product is added to the weight, or `LAYER.w` itself.
    """

    total: Tensors = field(default_factory=dict)
    """The sum of all moves, as a move of weights: `LAYER.w` of each layer that has moved."""
    log: dict[int, Tensors] = field(default_factory=dict)
    """The latest moves by round, counted from 1, as long as they are smaller than `total` together."""

    def then(self, round: int, move: Tensors) -> Moves:
        """Return these moves and that of one more round. Moves that are too old to be worth sending are forgotten."""
        total, log = moved(self.total, move), {**self.log, round: move}
        while _numbers(log.values()) > _numbers([total]):
            del log[min(log)]
        return Moves(total, log)

    def since(self, round: int) -> Tensors:
        """Return what a client needs whose base has moved up to a round: the missed moves, or the sum if it is smaller.

        The result is part of a job: one tensor with the bytes of a message, or none if nothing was missed.
        """
        now = max(self.log, default=0)
        known = all(missed in self.log for missed in range(round + 1, now + 1))
        sent = {f"{at}/{name}": tensor for at, move in self.log.items() if at > round for name, tensor in move.items()}
        if not known:
            round, sent = 0, {f"{now}/{name}": tensor for name, tensor in self.total.items()}
        if not sent:
            return {}
        message = encode(Message("moves", {"since": round, "until": now}, sent))
        return {f"{SECTION}/message": torch.frombuffer(message, dtype=torch.uint8)}


def caught_up(total: Tensors, sent: Tensors) -> Tensors:
    """Return how far a client's base has moved, given how far it had, and what `Moves.since` sent."""
    if not sent:
        return total
    message = decode(sent["message"].numpy().data)
    if message.kind != "moves":
        raise BadMessage(f"got a message of kind {message.kind} in place of the moves of the base")
    total = total if message.fields["since"] else {}
    rounds = sections(message.tensors)
    for round in sorted(rounds, key=int):
        total = moved(total, rounds[round])
    return total


def moved(total: Tensors, move: Tensors) -> Tensors:
    """Return the sum of moves after one more. Server and clients add in the same order: their sums have equal bits."""
    found = dict(total)
    for name, tensor in move.items():
        layer, factor = name[:-1], name[-1]
        if factor == "v":
            continue
        # Copies: libraries round differently if the same numbers have another alignment.
        added = tensor.clone() if factor == "w" else product(tensor.clone(), move[f"{layer}v"].clone())
        found[f"{layer}w"] = found[f"{layer}w"] + added if f"{layer}w" in found else added
    return found


def _numbers(moves: Iterable[Tensors]) -> int:
    return sum(tensor.numel() for move in moves for tensor in move.values())
