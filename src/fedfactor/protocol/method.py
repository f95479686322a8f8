"""The abstract method: its hooks, with FedAvg's behaviour as their default.

A method maps the server's tensors to each client's, and back. It is a frozen dataclass whose fields are its
hyper-parameters. Its hooks take and return plain dictionaries of tensors and contain no loop over rounds, clients or
batches. They are listed in the order in which a round calls them.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor, nn

from fedfactor.nn import compose
from fedfactor.nn.frozen import Frozen
from fedfactor.nn.state import fill, tensors_of
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.context import Context
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.plan import Held, HoldersMean, Plan, Reply, Tensors, pull, whole_plan
from fedfactor.protocol.settings import Training
from fedfactor.protocol.states import HeldTensors
from fedfactor.task import Batch, Build, Task

Networks = Callable[[float], nn.Module]
"""Returns the network of a capacity, one object per capacity. Only those that `initial` gets have initial values."""


@dataclass(frozen=True)
class Traits:
    """Properties of a method that server, engines and tools need to know."""

    space: Literal["slice", "turning", "personal"] = "slice"
    """How clients' tensors relate to the server's: fixed slices, a basis that changes each round, or one model each."""
    weighting: str = "samples"
    """The weight of a client in the mean: its `samples`, `uniform`, or a description of the method's own rule."""
    adapts: bool = False
    """Whether clients of less capacity get a smaller network. Otherwise all clients get the same one."""
    plain: bool = True
    """Whether deployed models consist of ordinary layers. False where weights depend on the input."""
    calibrates: bool = False
    """Whether norm statistics are estimated on the clients' data before a model is used."""
    complete: bool = False
    """Whether the server's tensors are a complete model although clients keep private tensors."""
    moves: bool = False
    """Whether the part of the server's tensors that a client trains changes from round to round."""
    moves_base: bool = False
    """Whether rounds add changes to the frozen base: the method's fold is a `MovingFold`."""
    needs_sgd: bool = False
    """Whether the objective assumes that clients take steps of SGD."""
    sends_labels: bool = False
    """Whether clients tell the server which classes they have."""
    needs_classes: str = ""
    """What needs one class per example, such as a masked loss: a task of another kind is refused. Empty: nothing."""
    needs_logits: str = ""
    """What needs logits, such as distillation: a task of another kind is refused. Empty: nothing."""
    reports: tuple[str, ...] = ()
    """Names of the numbers that `Diagnostics.report` returns; a reply with other names is rejected."""
    rereads: bool = False
    """Whether `Diagnostics.observe` reads the replies. The server then keeps all of a round until its end, on disk."""


@dataclass(frozen=True)
class Participant:
    """A client that takes part in a round."""

    client: int
    capacity: float
    round: int


_USUAL = Traits()


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are trained with the same settings."""

    names: Collection[str]
    lr_factor: float = 1.0
    """Their learning rate as a multiple of the run's."""
    weight_decay: bool = True
    """Whether the run's weight decay acts on them."""


@dataclass(frozen=True)
class Phase:
    """A phase of local training: its length and the parameters that are trained. All others are frozen."""

    epochs: float
    """The number of epochs, or of steps if the run has `train.local_steps`: the unit of the argument of `phases`."""
    groups: Sequence[ParameterGroup]


def parameter_names(network: nn.Module) -> list[str]:
    """Return the names of the network's parameters, without those of a frozen base."""
    return [name for name, parameter in network.named_parameters() if not isinstance(parameter, Frozen)]


def fixed_names(network: nn.Module) -> set[str]:
    """Return the names of parameters that are downloaded but not trained, and so not uploaded."""
    return {name for name in parameter_names(network) if not network.get_parameter(name).requires_grad}


def split_epochs(what: str, first: int | None, share: float, epochs: float) -> tuple[float, float]:
    """Split a round's epochs (or steps: see `Phase.epochs`) into two phases; return the length of each.

    The first phase has `first` epochs, or if `first` is `None` that share of the epochs, with at least one per phase.
    `what` is the name of the setting `first` in errors.
    """
    if first is None and 0 < epochs < 2:
        short = "a round has fewer than two epochs (or local_steps)"
        raise ValueError(f"this method trains in two phases, but {short}: set two, or {what} = 0 or 1")
    if first is None:
        first = int(min(max(1, round(share * epochs)), epochs - 1)) if epochs else 0
    if not 0 <= first <= epochs:
        raise ValueError(f"{what} must lie in [0, {epochs:g}], the epochs (or local_steps) of a round, got {first}")
    return first, epochs - first


def epochs_refused(split: Callable[[float], object], training: Training | None) -> str | None:
    """Return the reason why a round's epochs cannot be split, or `None`."""
    try:
        split(training.length if training else 2)
    except ValueError as error:
        return str(error)
    return None


class Fold(Protocol):
    """Turns the replies of a round into the server's mean, one by one, so that a round never holds all of them."""

    def add(self, reply: Reply) -> None:
        """Add a reply. Do not keep its tensors: they share the memory of the whole reply.

        Replies are added in the order of the jobs (longest first), on every engine, so that sums have the same bits.
        """
        ...

    def result(self) -> tuple[Tensors, Held]:
        """Return the mean in the server's space, and the number of clients that held each element.

        It is called once, after the last reply, and only if enough clients answered.
        """
        ...


class MovingFold:
    """Mixin for the fold of a method that moves the frozen base (`Traits.moves_base`)."""

    moves: Tensors
    """What the round adds to the weights of the base, known after `result`: see `protocol/moves.py`."""


@dataclass(frozen=True)
class ObservedRound:
    """A finished round on the server: the input of `Diagnostics.observe`."""

    round: int
    """Counted from 1."""
    before: Tensors
    """The server's tensors when the round began."""
    after: Tensors
    """The server's tensors after the round."""
    view: Tensors
    """The result of `prepare`, which the plans of the replies refer to."""
    fold: Fold
    """The method's fold after its `result`; it may have counted something for this."""
    figures: Sequence[Mapping[str, float]]
    """What each client reported (`report`), in the order of the jobs."""
    replies: Iterable[Reply]
    """The replies in the order of the jobs, without `reference` and `extras`; only if `Traits.rereads` is set."""
    networks: Networks
    first: Callable[[], Tensors]
    """Returns the server's tensors before the first round."""
    due: bool = False
    """Whether this round is evaluated. Return large figures only then."""


class Diagnostics:
    """Optional mixin of a method that logs figures in addition to the loss."""

    def report(self, network: nn.Module, ctx: Context) -> dict[str, float]:
        """Return numbers about this client's training for `observe`. They are uploaded, so keep them few."""
        return {}

    def observe(self, observed: ObservedRound) -> dict[str, Any]:
        """Return figures of a round, as small JSON values; they are logged as `observed` of the round's event."""
        return {}

    def passes(self, capacity: float) -> dict[float, float]:
        """Return the number of forward passes per training example, by the capacity of the network."""
        return {capacity: 1.0}


class Staged(ABC):
    """Optional mixin of a method that has different forms in different rounds."""

    @abstractmethod
    def at(self, round: int) -> Method:
        """Return the form of the method in a round, counted from 0."""

    @abstractmethod
    def convert(self, server: Tensors, before: nn.Module) -> Tensors:
        """Convert the server's tensors to this form; `before` is the full network of the previous form."""


RENAMED_HOOKS = {
    "private": "private_names",
    "start": "initial",
    "use": "load",
    "fitted": "bind",
    "sized": "bind",
    "check": "bind or network",
    "decays": "phases",
    "pace": "phases",
    "weights": "weight",
    "aggregate": "fold",
}
"""Hooks of earlier versions, and the hooks that replace them."""


@dataclass(frozen=True)
class Method:
    """FedAvg (McMahan et al. 2017, Alg. 1): all tensors are shared and averaged, weighted by examples."""

    name: ClassVar[str] = ""
    untunable: ClassVar[str] = ""
    """Why the method cannot train the change of a frozen base (`[tune]`); empty if it can."""

    def __init_subclass__(cls) -> None:
        """Raise TypeError if the class defines a hook that would never be called."""
        for hook in cls.__dict__.keys() & RENAMED_HOOKS.keys():
            if callable(cls.__dict__[hook]):  # a field may have the name, such as `start` of `Factorised`
                raise TypeError(f"{cls.__name__}.{hook}: methods have no such hook any more; use {RENAMED_HOOKS[hook]}")
        if "remember" in cls.__dict__ and "replies" in inspect.signature(cls.remember).parameters:
            raise TypeError(f"{cls.__name__}.remember: it gets one reply now, and returns what to store for its client")
        if cls.__dict__.keys() & {"report", "observe", "passes"} and not issubclass(cls, Diagnostics):
            raise TypeError(f"{cls.__name__} has hooks of Diagnostics: derive it from Diagnostics too")
        if cls.__dict__.keys() & {"at", "convert"} and not issubclass(cls, Staged):
            raise TypeError(f"{cls.__name__} has hooks of Staged: derive it from Staged too")

    @property
    def traits(self) -> Traits:
        """The properties of this method that server, engines and tools need to know."""
        return _USUAL

    # Form.

    def bind(self, task: Task, levels: Sequence[float]) -> Self:
        """Return this method adapted to a task and the run's capacity levels; called once, before networks are built.

        Raise ValueError if the method cannot be used for the task.
        """
        return self

    def refuses(self, optimizer: Optimizer, codec: Codec, training: Training | None = None) -> str | None:
        """Return the reason why this method cannot be combined with these, or `None`."""
        stateful = [part.name for part in (optimizer, codec) if part.keeps_state]
        if stateful and self.traits.space == "turning":
            return f"{stateful[0]} keeps tensors on the client, but the basis of {self.name} changes each round"
        if training is not None and (reason := self._refuses_steps(optimizer, training)):
            return reason
        if self.traits.space == "personal" and optimizer.keeps_state:
            return f"{optimizer.name} keeps clients near one shared model, but {self.name} gives each client its own"
        return optimizer.refuses(codec)

    def _refuses_steps(self, optimizer: Optimizer, training: Training) -> str | None:
        """Return the reason why clients cannot take the steps of the run's local optimizer, or `None`."""
        chosen = training.local_optimizer
        assuming = optimizer.name if optimizer.needs_sgd else self.name if self.traits.needs_sgd else ""
        if assuming and chosen.name != "sgd":
            return f"{assuming} assumes that clients take steps of SGD, but train.optimizer is {chosen.name}"
        if optimizer.needs_sgd and chosen.keep_state:
            return (
                f"{optimizer.name} assumes that momentum starts anew each round: leave out train.optimizer.keep_state"
            )
        if chosen.keep_state and self.traits.space == "turning":
            return f"train.optimizer.keep_state keeps tensors, but the basis of {self.name} changes each round"
        if chosen.keep_state and self.traits.moves:
            return f"train.optimizer.keep_state keeps tensors, but {self.name} trains other weights in each round"
        return None

    # Network: server and clients build the same.

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the network that a client of this capacity trains; `build(width)` makes the task's model.

        Raise ValueError if the method finds nothing to change in the model.
        """
        return build(1.0)

    def trained_capacity(self, capacity: float) -> float:
        """Return the capacity at which a client of this capacity really trains: 1 if all train the whole model."""
        return capacity if self.traits.adapts else 1.0

    def private_names(self, network: nn.Module) -> set[str]:
        """Return the names of the network's tensors that stay on the client."""
        return set()

    # Server to client.

    def initial(self, networks: Networks) -> Tensors:
        """Return the server's tensors before the first round."""
        tensors = tensors_of(networks(1.0))
        return {name: tensors[name].clone() for name in shared_names(self, networks(1.0))}

    def weight_names(self, networks: Networks, server: Tensors) -> set[str]:
        """Return the names of the server's tensors that are trained weights; the others are buffers."""
        return {name for name, p in networks(1.0).named_parameters() if p.requires_grad and name in server}

    def prepare(self, server: Tensors, networks: Mapping[float, nn.Module], *, training: bool) -> Tensors:
        """Return the view of the server's tensors that this round's plans refer to; called once per round.

        `networks` has the networks of the participating capacities. `training` is false if the models are not trained
        but used.
        """
        return server

    def plan(self, view: Tensors, who: Participant, network: nn.Module, rng: torch.Generator | None) -> Plan:
        """Return the position of each of the client's tensors in the view.

        `rng` is for methods that choose at random what a client trains. It is `None` if the model is not trained but
        used.
        """
        return whole_plan(shared_names(self, network))

    def download(self, view: Tensors, who: Participant, plan: Plan, held: HeldTensors, network: nn.Module) -> Tensors:
        """Return the client's download; `held` has what `remember` stored for each client."""
        return pull(view, plan)

    # Client.

    def load(self, network: nn.Module, down: Tensors, kept: Tensors, *, training: bool) -> None:
        """Fill the network with the download and the tensors that the client kept, for training or for use."""
        fill(network, {**down, **kept})

    def phases(self, network: nn.Module, epochs: float) -> list[Phase]:
        """Return the phases of local training, whose length is `epochs` (steps, if the run has `train.local_steps`)."""
        return [Phase(epochs, [ParameterGroup(parameter_names(network))])]

    def objective(self, network: nn.Module, batch: Batch, ctx: Context) -> Tensor:
        """Return the loss of a batch, penalties included."""
        return ctx.task.loss(ctx.task.outputs(network, batch), batch)

    def keep(self, network: nn.Module) -> Tensors:
        """Return the tensors that the client keeps until its next round."""
        private = self.private_names(network)
        return {name: tensor for name, tensor in tensors_of(network).items() if name in private} if private else {}

    # Client to server.

    def weight(self, reply: Reply) -> float:
        """Return the weight of a reply in the mean; only proportions matter."""
        return float(reply.samples) if self.traits.weighting == "samples" else 1.0

    def fold(self, server: Tensors, view: Tensors, networks: Networks) -> Fold:
        """Return what turns the replies of a round into the mean in the server's space."""
        return HoldersMean(view, self.weight)

    def remember(self, reply: Reply) -> Tensors:
        """Return the tensors that the server stores for the client of a reply."""
        return {}

    # Result.

    def served(self, levels: Sequence[float]) -> list[float]:
        """Return the capacities at which the server's model is used and measured."""
        return list(dict.fromkeys(map(self.trained_capacity, levels)))

    def deploy(self, server: Tensors, network: nn.Module, capacity: float, kept: Tensors) -> nn.Module:
        """Return a plain module of ordinary layers, built from the server's tensors and a client's private ones.

        `network` is the network for this capacity; it is overwritten.
        """
        view = self.prepare(server, {capacity: network}, training=False)
        plan = self.plan(view, Participant(-1, capacity, 0), network, None)
        self.load(network, pull(view, plan), kept, training=False)
        return compose(network)


# Functions of a method's hooks.


def shared_names(method: Method, network: nn.Module) -> list[str]:
    """Return the names of the network's tensors that are not private."""
    private = method.private_names(network)
    return [name for name in tensors_of(network) if name not in private]


def same_for_all(method: Method) -> bool:
    """Return whether all clients of a capacity surely get the same tensors in a round, by the hooks of `Method`."""
    kind = type(method)
    return kind.plan is Method.plan and kind.download is Method.download and not method.traits.moves_base


def has_global_model(method: Method, network: nn.Module) -> bool:
    """Return whether the server's tensors are a complete model without a client's private tensors."""
    return method.traits.complete or (method.traits.space != "personal" and not method.private_names(network))


def form_of(method: Method, round: int) -> Method:
    """Return the form of a method in a round, counted from 0."""
    return method.at(round) if isinstance(method, Staged) else method


def forward_passes(method: Method, capacity: float) -> dict[float, float]:
    """Return a method's number of forward passes per training example, by the capacity of the network."""
    return method.passes(capacity) if isinstance(method, Diagnostics) else {capacity: 1.0}
