"""Rounds in which the server does not wait for all clients."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedfactor.protocol.fleet import Fleet
from fedfactor.protocol.method import Method, Staged
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.settings import Nonnegative, checked

Several = Annotated[int, Field(ge=1)]


@checked
class Buffering:
    """When the server takes a step: after each cohort, or after each `buffer` replies (FedBuff, arXiv:2106.06639).

    In buffered rounds, `concurrency` clients train at any time. One that has answered is replaced at once, so replies
    may belong to an earlier model. A round is a step of the server.
    """

    mode: Literal["synchronous", "buffered"] = "synchronous"
    """Whether a round waits for its cohort, or ends with the reply that fills the buffer."""
    concurrency: Several | None = None
    """Clients that train at the same time in buffered rounds. Default: `train.cohort`."""
    buffer: Several | None = None
    """Replies per step of the server in buffered rounds."""
    staleness: Nonnegative = 0.5
    """Changes that are `n` steps old count (1 + n) to the power of minus this (FedBuff, Sec. 5: 0.5); 0: in full."""

    def __post_init__(self) -> None:
        if self.mode == "synchronous" and (self.concurrency, self.buffer) != (None, None):
            raise ValueError('concurrency and buffer are for mode = "buffered"')
        if self.mode == "buffered" and self.buffer is None:
            raise ValueError("buffer: say after how many replies the server takes a step")

    @property
    def buffered(self) -> bool:
        """Whether rounds end when the buffer is full."""
        return self.mode == "buffered"

    def weight(self, age: int) -> float:
        """Return the factor of a change that began so many steps ago."""
        return float((1 + age) ** -self.staleness)

    def sizes(self, cohort: int, population: int) -> tuple[int, int]:
        """Return how many clients train at a time, and how many replies fill the buffer; ValueError if too many."""
        room, size = self.concurrency or cohort, self.buffer or 0
        if not size <= room <= population:
            raise ValueError(
                f"rounds: a buffer of {size} replies needs at least as many clients at a time, which are {room}, and "
                f"the population has {population}"
            )
        return room, size

    def refuses(self, method: Method, optimizer: Optimizer, fleet: Fleet | None, streams: bool) -> str | None:
        """Return the reason why rounds of this kind cannot be combined with these, or `None`.

        `streams`: whether clients answer on their own, so that there is an order without a fleet.
        """
        if not self.buffered:
            return None
        if fleet is None and not streams:
            return (
                'rounds.mode = "buffered" needs a [fleet], whose virtual clock says who answers first, or real clients '
                "on Flower"
            )
        if fleet is not None and (fleet.deadline is not None or fleet.overselect > 1):
            return 'fleet.deadline and fleet.overselect are for synchronous rounds, and rounds.mode is "buffered"'
        if method.traits.space != "slice" or method.traits.moves_base or isinstance(method, Staged):
            return f"{method.name} needs synchronous rounds: replies to an earlier model do not fit the current one"
        if optimizer.keeps_state:
            return f"{optimizer.name} needs synchronous rounds: what clients keep belongs to one model of all"
        return None


SYNCHRONOUS = Buffering()
"""Each round waits for its cohort."""
