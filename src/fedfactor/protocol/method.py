"""The hooks of a method, with FedAvg's behaviour as their default.

A method is a map between the server's tensors and each client's, and back. It is a frozen dataclass whose fields are
its hyper-parameters; its hooks take and return plain dictionaries of tensors and hold no loop over rounds, clients or
batches. They are listed here in the order in which a round meets them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from fedfactor.nn import compose
from fedfactor.nn.state import fill, tensors_of
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.context import Context
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.plan import Held, Plan, Reply, Tensors, holders_mean, pull, whole_plan
from fedfactor.protocol.states import HeldTensors
from fedfactor.task import Task

Networks = Callable[[float], nn.Module]
"""From a capacity to that network as the run started it: one object a capacity, the same on every machine."""


@dataclass(frozen=True)
class Participant:
    """A client of this round, as the server knows it."""

    client: int
    capacity: float
    round: int


@dataclass(frozen=True)
class Phase:
    """A stretch of local training: how many epochs, and which parameters train."""

    epochs: int
    trains: Callable[[str], bool] = lambda name: True


def split_epochs(what: str, first: int | None, share: float, epochs: int) -> tuple[int, int]:
    """Split a round's epochs in two: `first` of them, or that share and at least one each, and the rest."""
    if first is None and epochs == 1:
        raise ValueError(f"this method trains in two parts, but a round has one epoch: give two, or {what} = 0 or 1")
    if first is None:
        first = min(max(1, round(share * epochs)), epochs - 1) if epochs else 0
    if not 0 <= first <= epochs:
        raise ValueError(f"{what} must lie in [0, {epochs}], a round's epochs, got {first}")
    return first, epochs - first


@dataclass(frozen=True)
class Outcome:
    """A round as the server saw it: what `observe` may look at."""

    round: int
    """Counted from 1."""
    before: Tensors
    """The server's tensors as they were when the round began."""
    after: Tensors
    """As they are now."""
    view: Tensors
    """What `prepare` made of them, which the plans of the replies refer to."""
    replies: Sequence[Reply]
    networks: Networks
    first: Callable[[], Tensors]
    """Gives the server's tensors before the first round."""
    due: bool = False
    """Whether this round is one that is measured: larger figures belong there."""


@dataclass(frozen=True)
class Method:
    """Everything is shared and averaged by data: FedAvg (McMahan et al. 2017, Alg. 1)."""

    name: ClassVar[str] = ""
    space: ClassVar[Literal["slice", "turning", "personal"]] = "slice"
    """How a client's tensors relate to the server's over rounds: fixed slices, a basis that turns, or a model each."""
    weighting: ClassVar[str] = "samples"
    """How much a client counts: by its `samples`, `uniform`, or in words what `weights` does."""
    adapts: ClassVar[bool] = False
    """Whether clients of less capacity get a smaller network; others give everybody the same."""

    plain: ClassVar[bool] = True
    """Whether models are deployed as ordinary layers: not where weights depend on the input."""

    @property
    def reports(self) -> tuple[str, ...]:
        """Names of the numbers that `report` returns; a reply with others is a failure."""
        return ()

    @property
    def calibrates(self) -> bool:
        """Whether norm statistics are gathered from the clients before a model is used."""
        return False

    # Server and client: the network and which part of it stays private.

    def fitted(self, levels: Sequence[float]) -> Self:
        """Return this method as it is for a run with these capacity levels; asked once, before anything else."""
        return self

    def sized(self, example: Tensor) -> Self:
        """Return this method as it is for inputs like this one; asked once, before a network is built."""
        return self

    def at(self, round: int) -> Method:
        """Return this method as it is in a round, counted from 0: networks may change their form on the way."""
        return self

    def convert(self, server: Tensors, before: nn.Module) -> Tensors:
        """Return the server's tensors in this form, given them and the full network of the form before."""
        raise NotImplementedError

    def network(self, build: Callable[[float], nn.Module], capacity: float) -> nn.Module:
        """Return the network that a client of this capacity trains; `build(width)` makes the task's model."""
        return build(1.0)

    def private(self, name: str) -> bool:
        """Tell whether a tensor of the network stays on the client."""
        return False

    def private_names(self, network: nn.Module) -> set[str]:
        """Return the names of the network's tensors that stay on the client."""
        return {name for name in tensors_of(network) if self.private(name)}

    def has_global_model(self, network: nn.Module) -> bool:
        """Tell whether the server's tensors make a model without what a client keeps."""
        return self.space != "personal" and not self.private_names(network)

    def check(self, task: Task, network: nn.Module) -> None:
        """Raise a sentence if this method makes no sense for a task and its full network."""

    # Server: from its own tensors to a client's.

    def start(self, networks: Networks, capacities: Sequence[float]) -> Tensors:
        """Return the server's tensors before the first round."""
        network = networks(1.0)
        tensors = tensors_of(network)
        return {name: tensors[name].clone() for name in self.shared_names(network)}

    def weight_names(self, networks: Networks, server: Tensors) -> set[str]:
        """Return which of the server's tensors are trained weights; the others are buffers, which are only averaged."""
        return {
            name for name, parameter in networks(1.0).named_parameters() if parameter.requires_grad and name in server
        }

    def shared_names(self, network: nn.Module) -> list[str]:
        """Return the names of the network's tensors that are not private."""
        private = self.private_names(network)
        return [name for name in tensors_of(network) if name not in private]

    def prepare(self, server: Tensors, networks: Mapping[float, nn.Module]) -> Tensors:
        """Return the view of the server's tensors that this round's plans refer to; computed once a round.

        `networks` are those of the capacities that take part.
        """
        return server

    def plan(self, view: Tensors, who: Participant, network: nn.Module, rng: torch.Generator | None) -> Plan:
        """Say for every tensor of the client where it lives in the view.

        `rng` is for methods that choose at random what a client trains; it is `None` where a model is to be used.
        """
        return whole_plan(self.shared_names(network))

    def download(self, view: Tensors, who: Participant, plan: Plan, held: HeldTensors, network: nn.Module) -> Tensors:
        """Return what the client gets; `held` is what `remember` stored for each client."""
        return pull(view, plan)

    # Client.

    def load(self, network: nn.Module, down: Tensors, kept: Tensors) -> None:
        """Fill the network from the download and from what the client kept."""
        fill(network, {**down, **kept})

    def use(self, network: nn.Module, down: Tensors, kept: Tensors) -> None:
        """Fill the network as the client uses it between rounds, which may not be where it starts training."""
        self.load(network, down, kept)

    def phases(self, epochs: int) -> list[Phase]:
        """Return the stretches of local training."""
        return [Phase(epochs)]

    def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Return the loss of a batch, penalties included."""
        x, y = batch
        return ctx.task.loss(network(x), y)

    def passes(self, capacity: float) -> dict[float, float]:
        """Return how often a training example goes forward, by the capacity of the network it goes through."""
        return {capacity: 1.0}

    def decays(self, name: str, network: nn.Module) -> bool:
        """Tell whether weight decay acts on a parameter."""
        return True

    def keep(self, network: nn.Module) -> Tensors:
        """Return what stays on the client until its next round."""
        private = self.private_names(network)
        return {name: tensor for name, tensor in tensors_of(network).items() if name in private} if private else {}

    def pace(self, name: str) -> float:
        """Return the learning rate of a parameter as a multiple of the run's."""
        return 1.0

    def report(self, network: nn.Module, ctx: Context) -> dict[str, float]:
        """Return plain numbers about this client's training, for `observe`: they leave the client, so keep them few."""
        return {}

    # Server: back.

    def weights(self, replies: Sequence[Reply]) -> list[float]:
        """Return how much each reply counts; only the proportions matter."""
        return [float(reply.samples) if self.weighting == "samples" else 1.0 for reply in replies]

    def aggregate(
        self, server: Tensors, view: Tensors, replies: Sequence[Reply], networks: Networks
    ) -> tuple[Tensors, Held]:
        """Return the mean in the server's space, and how many clients held each element."""
        return holders_mean(view, replies, self.weights(replies))

    def remember(self, replies: Sequence[Reply]) -> dict[int, Tensors]:
        """Return what the server keeps a client (in its store on disk), by client."""
        return {}

    def observe(self, outcome: Outcome) -> dict[str, Any]:
        """Return figures of a round, small and plain enough for JSON, for `observed` in its event."""
        return {}

    # Both: the result.

    def served(self, levels: Sequence[float]) -> list[float]:
        """Return the capacities at which the server's model is used, and so measured."""
        return list(levels) if self.adapts else [1.0]

    def deploy(self, server: Tensors, network: nn.Module, capacity: float, kept: Tensors) -> nn.Module:
        """Return a plain module of ordinary layers, made of the server's tensors and of what a client keeps.

        `network` is the one for this capacity and is overwritten.
        """
        view = self.prepare(server, {capacity: network})
        plan = self.plan(view, Participant(-1, capacity, 0), network, None)
        self.use(network, pull(view, plan), kept)
        return compose(network)

    def refuses(self, optimizer: Optimizer, codec: Codec) -> str | None:
        """Return why this method cannot go with an optimizer or codec, or `None`."""
        stateful = [part.name for part in (optimizer, codec) if part.keeps_state]
        if stateful and self.space == "turning":
            return f"{stateful[0]} keeps tensors on the client, but the basis of {self.name} turns every round"
        if self.space == "personal" and optimizer.keeps_state:
            return f"{optimizer.name} holds clients to one shared model, but {self.name} gives every client its own"
        return optimizer.refuses(codec)
