"""The client's side: the only loop over batches.

`work` is one pure function of a message, the client's data, its state and the run's settings. Engines only move its
bytes: what runs here in a process of its own is what runs on a phone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedfactor.methods.base import Method, Phase
from fedfactor.nn.norms import watched_norms
from fedfactor.nn.state import tensors_of
from fedfactor.optimizers.base import Optimizer
from fedfactor.places import Places
from fedfactor.plan import Tensors
from fedfactor.profile import timed
from fedfactor.rng import derive, seeded, torch_rng
from fedfactor.settings import Training
from fedfactor.states import at_hand
from fedfactor.task import Examples, Task, like
from fedfactor.wire import Bytes, Codec, Message, Room, decode, encode


@dataclass
class Setup:
    """What server and clients of a run agree on; networks are built once a capacity and refilled."""

    task: Task
    method: Method
    optimizer: Optimizer
    codec: Codec
    training: Training
    _forms: list[Setup] = field(default_factory=list)
    _networks: dict[float, nn.Module] = field(default_factory=dict)
    _kept: dict[float, Tensors] = field(default_factory=dict)
    _trained: dict[float, frozenset[str]] = field(default_factory=dict)

    def fit(self, levels: Sequence[float]) -> None:
        """Give the method what it wants to know of the capacities and of the data; before anything is built."""
        self.method = self.method.fitted(levels).sized(self.task.data.example)

    def at(self, round: int) -> Setup:
        """Return the setup as it is in a round: another one where the method has another form then."""
        method = self.method.at(round)
        if method == self.method:
            return self
        found = next((form for form in self._forms if form.method == method), None)
        if found is None:
            found = Setup(self.task, method, self.optimizer, self.codec, self.training)
            self._forms.append(found)
        return found

    def network(self, capacity: float) -> nn.Module:
        """Return the network of a capacity: one object, refilled by whoever uses it.

        The seed of its first values has no client in it, so private parts start equal everywhere.
        """
        if capacity not in self._networks:
            with seeded(derive(self.training.seed, "init")):
                built = self.method.network(self.task.build, capacity)
            built = built.to(self.training.torch_device, self.training.torch_dtype)
            self._networks[capacity] = built
            self._trained[capacity] = frozenset(name for name, p in built.named_parameters() if p.requires_grad)
            private = self.method.private_names(built)
            self._kept[capacity] = {name: t.clone() for name, t in tensors_of(built).items() if name in private}
        return self._networks[capacity]

    def trained(self, capacity: float) -> frozenset[str]:
        """Return the names of the parameters that the model's author did not freeze: what codecs may change."""
        self.network(capacity)
        return self._trained[capacity]

    def kept(self, capacity: float) -> Tensors:
        """Return what a client that never took part holds: private tensors as they start."""
        self.network(capacity)
        return self._kept[capacity]


@dataclass
class Context:
    """What hooks may look at while one client trains."""

    task: Task
    training: Training
    round: int
    client: int
    capacity: float
    lr: float
    targets: Tensor
    """Of all the client's examples."""
    kept: Tensors
    """What the client kept of its last round; empty when it takes part for the first time."""
    down: Tensors
    """The download as decoded: the anchor of proximal terms."""
    extras: Tensors
    """What the optimizer sent along, by the name of the tensor it belongs to."""
    state: Tensors
    """What the optimizer kept on this client."""
    travel: dict[str, float] = field(default_factory=dict)
    """How far a constant gradient of one has moved each parameter: steps times rate; momentum adds to it."""

    @property
    def labels(self) -> Tensor:
        """The classes that occur in the client's data."""
        return self._classes[0]

    @property
    def counts(self) -> Tensor:
        """How many examples of each of them there are."""
        return self._classes[1]

    @cached_property
    def _classes(self) -> tuple[Tensor, Tensor]:
        if self.task.kind != "classification":
            return self.targets[:0], self.targets[:0]
        labels, counts = torch.unique(self.targets, return_counts=True)
        return labels, counts

    @staticmethod
    def gradients(loss: Tensor, of: Mapping[str, Tensor]) -> Tensors:
        """Differentiate a loss with respect to intermediate tensors, keeping the graph for the step itself."""
        found = torch.autograd.grad(loss, list(of.values()), retain_graph=True, allow_unused=True)
        return {name: gradient for name, gradient in zip(of, found, strict=True) if gradient is not None}


@timed("the rest")
def work(setup: Setup, job: Bytes, state: Bytes | None, room: Room | None = None) -> tuple[Bytes, Bytes | None]:
    """Do one job and return the reply (in `room`, if given) and the client's new state (`None`: unchanged)."""
    message = decode(job)
    client, round = message.fields["client"], message.fields["round"]
    kept, setup = kept_of(setup, state, round), setup.at(round)
    with seeded(derive(setup.training.seed, message.kind, round, client), setup.training.torch_device):
        if message.kind == "train":
            return _train(setup, message, kept, room)
        if message.kind == "evaluate":
            return _evaluate(setup, message, kept), None
        if message.kind == "calibrate":
            return _calibrate(setup, message, kept), None
    raise ValueError(f"unknown kind of job {message.kind!r}")


def kept_of(setup: Setup, state: Bytes | None, round: int) -> dict[str, Tensors]:
    """Read what a client kept, by section; what it kept of another form of the method is of no use any more."""
    if not state:
        return {}
    message = decode(at_hand(state))
    same = setup.at(message.fields["round"]) is setup.at(round)
    return sections(message.tensors) if same else {}


def ready(setup: Setup, message: Message, kept: dict[str, Tensors], targets: Tensor) -> tuple[nn.Module, Context]:
    """Return the network as a job fills it and the context of its training; `targets` are all the client has."""
    fields, device = message.fields, setup.training.torch_device
    network, parts = _load(setup, message, kept, setup.method.load)
    places = Places.read(fields.get("places"), parts["model"])
    return network, Context(
        task=setup.task,
        training=setup.training,
        round=fields["round"],
        client=fields["client"],
        capacity=fields["capacity"],
        lr=fields["lr"],
        targets=targets,
        kept=_on(device, kept.get("kept", {})),
        down=parts["model"],
        extras=_on(device, parts.get("extra", {})),
        state=_on(device, places.take(kept.get("optimizer", {}), parts["model"])),
    )


def _train(setup: Setup, message: Message, kept: dict[str, Tensors], room: Room | None) -> tuple[Bytes, Bytes | None]:
    method, training, fields = setup.method, setup.training, message.fields
    examples = setup.task.data.of(fields["client"])
    network, ctx = ready(setup, message, kept, examples[1])
    places = Places.read(fields.get("places"), ctx.down)
    answer: dict[str, Any] = {key: fields[key] for key in ("client", "round", "capacity")}
    answer["samples"] = len(examples[1])
    test = setup.task.data.own_test(fields["client"]) if fields["test"] else None
    if test is not None:
        answer["before"] = setup.task.evaluate(network, test)
    answer.update(_fit(setup, network, examples, ctx))
    if test is not None:
        answer["after"] = setup.task.evaluate(network, test)
    if method.reports:
        answer["figures"] = method.report(network, ctx)

    own = tensors_of(network)
    shared = {name: own[name].to(wanted.dtype) for name, wanted in ctx.down.items()}
    trained = setup.trained(ctx.capacity)
    rng = torch_rng(training.seed, "codec", ctx.round, ctx.client)
    codec_state = _on(training.torch_device, places.take(kept.get("codec", {}), ctx.down))
    coded, codec_state = code_up(setup.codec, trained, shared, ctx.down, codec_state, rng)
    seen = decode_up(setup.codec, trained, coded, ctx.down)
    extras, optimizer_state = setup.optimizer.finish(seen, ctx)
    reply = Message("trained", answer, {**_prefixed("model", coded), **_prefixed("extra", extras)})
    state = {
        **_prefixed("kept", method.keep(network)),
        **_prefixed("optimizer", places.put(kept.get("optimizer", {}), optimizer_state)),
        **_prefixed("codec", places.put(kept.get("codec", {}), codec_state)),
    }
    fields = {"client": ctx.client, "round": ctx.round}
    return encode(reply, room), encode(Message("state", fields, state)) if state else None


@timed("training")
def _fit(setup: Setup, network: nn.Module, examples: Examples, ctx: Context) -> dict[str, Any]:
    """Train the network through the method's phases."""
    training, rng = setup.training, torch_rng(setup.training.seed, "batches", ctx.round, ctx.client)
    network.train()
    losses, steps = torch.zeros((), device=training.torch_device), 0
    for phase in setup.method.phases(training.epochs):
        parameters = _trainable(network, phase, setup.trained(ctx.capacity))
        if not parameters:
            continue
        descent = Descent(setup, network, parameters, ctx.lr)
        pull, travel = 0.0, 0.0
        for batch in batches(setup, examples, phase.epochs, rng):
            loss = setup.method.objective(network, batch, ctx)
            for parameter in parameters.values():
                parameter.grad = None
            loss.backward()  # type: ignore[no-untyped-call]
            _densify(parameters)
            setup.optimizer.correct(parameters, ctx)
            if training.clip:
                torch.nn.utils.clip_grad_norm_(parameters.values(), training.clip)
            descent.step()
            pull = training.momentum * pull + 1.0
            travel += ctx.lr * pull
            losses, steps = losses + loss.detach(), steps + 1
        for name in parameters:
            ctx.travel[name] = ctx.travel.get(name, 0.0) + travel * setup.method.pace(name)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in setup.trained(ctx.capacity))
        parameter.grad = None
    return {"loss": float(losses) / max(steps, 1), "steps": steps}


def _trainable(network: nn.Module, phase: Phase, trained: frozenset[str]) -> dict[str, nn.Parameter]:
    """Freeze what this phase does not train, and return the rest."""
    chosen = {}
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in trained and phase.trains(name))
        if parameter.requires_grad:
            chosen[name] = parameter
    return chosen


def _densify(parameters: Mapping[str, nn.Parameter]) -> None:
    """Fill up gradients that list only some rows, as of `nn.Embedding(sparse=True)`: nothing after them takes those."""
    for parameter in parameters.values():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


class Descent:
    """SGD with momentum: the kernel of torch's own fused one, called without the optimizer around it.

    Torch's optimizer objects import its compiler when the first is made, which takes seconds in every process, and
    spend more time on a step of a small model than the step itself takes.
    """

    def __init__(self, setup: Setup, network: nn.Module, parameters: Mapping[str, nn.Parameter], lr: float) -> None:
        self._momentum = setup.training.momentum
        self._groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            decay = setup.training.weight_decay if setup.method.decays(name, network) else 0.0
            self._groups.setdefault((lr * setup.method.pace(name), decay), []).append(parameter)
        # Where a step writes without autograd's knowing: cheaper than telling it to look away at every step.
        self._values = {parameter: parameter.detach() for parameter in parameters.values()}
        self._pulls: dict[nn.Parameter, Tensor] = {}

    def step(self) -> None:
        """Step along the gradients; parameters without one stay."""
        for (lr, decay), members in self._groups.items():
            moving = [parameter for parameter in members if parameter.grad is not None]
            if not self._momentum:
                self._move(moving, [], lr, decay)
                continue
            # The kernel takes one word for all: whether their first gradients start the pulls.
            new = [parameter for parameter in moving if parameter not in self._pulls]
            old = [parameter for parameter in moving if parameter in self._pulls]
            self._pulls.update((parameter, torch.empty_like(parameter)) for parameter in new)
            self._move(old, [self._pulls[parameter] for parameter in old], lr, decay)
            self._move(new, [self._pulls[parameter] for parameter in new], lr, decay, first=True)

    def _move(
        self, moving: Sequence[nn.Parameter], pulls: list[Tensor], lr: float, decay: float, *, first: bool = False
    ) -> None:
        if not moving:
            return
        gradients = [parameter.grad for parameter in moving if parameter.grad is not None]
        torch._fused_sgd_(
            [self._values[parameter] for parameter in moving], gradients, pulls, lr=lr, momentum=self._momentum,
            weight_decay=decay, dampening=0.0, nesterov=False, maximize=False, is_first_step=first,
        )  # fmt: skip


def batches(setup: Setup, examples: Examples, epochs: int, rng: torch.Generator) -> Iterator[Examples]:
    """Yield shuffled batches; a last batch of one joins the one before, since batch norms cannot train on it."""
    (inputs, targets), training, transform = examples, setup.training, setup.task.data.transform
    home = torch.empty(0, dtype=training.torch_dtype, device=training.torch_device)
    for _ in range(epochs):
        order = list(torch.split(torch.randperm(len(targets), generator=rng), training.batch))
        if len(order) > 1 and len(order[-1]) == 1:
            order[-2:] = [torch.cat(order[-2:])]
        for where in order:
            yield like(transform.train(inputs[where], rng), home), targets[where].to(home.device)


def _evaluate(setup: Setup, message: Message, kept: dict[str, Tensors]) -> Bytes:
    network, _ = _load(setup, message, kept, setup.method.use)
    fields = {key: message.fields[key] for key in ("client", "round", "capacity")}
    test = setup.task.data.own_test(fields["client"])
    scores = setup.task.evaluate(network, test) if test is not None else None
    return encode(Message("evaluated", {**fields, "scores": scores}))


def _calibrate(setup: Setup, message: Message, kept: dict[str, Tensors]) -> Bytes:
    """Run the model over the client's data and return the batch statistics of its norms (HeteroFL's static ones)."""
    network, _ = _load(setup, message, kept, setup.method.use)
    fields = {key: message.fields[key] for key in ("client", "round", "capacity")}
    examples = setup.task.data.of(fields["client"])
    rng = torch_rng(setup.training.seed, "batches", fields["round"], fields["client"])
    network.train()
    with torch.no_grad(), watched_norms(network) as statistics:
        for x, _ in batches(setup, examples, 1, rng):
            network(x)
    return encode(Message("calibrated", {**fields, "samples": len(examples[1])}, statistics()))


def _load(
    setup: Setup, message: Message, kept: dict[str, Tensors], load: Callable[[nn.Module, Tensors, Tensors], None]
) -> tuple[nn.Module, dict[str, Tensors]]:
    """Fill the network of the job's capacity; return it and the decoded sections of the download."""
    capacity, device = message.fields["capacity"], setup.training.torch_device
    network, parts = setup.network(capacity), sections(message.tensors)
    parts["model"] = _on(device, decode_down(setup.codec, setup.trained(capacity), parts.get("model", {})))
    load(network, parts["model"], _on(device, kept.get("kept") or setup.kept(capacity)))
    return network, parts


def _split(tensors: Tensors, trained: Collection[str]) -> tuple[Tensors, Tensors]:
    """Split into what a codec may change, the trained weights, and the rest."""
    weights = {name: tensor for name, tensor in tensors.items() if name.partition(":")[0] in trained}
    return weights, {name: tensor for name, tensor in tensors.items() if name not in weights}


@timed("encoding")
def code_down(codec: Codec, trained: Collection[str], tensors: Tensors) -> Tensors:
    """Code a download: weights by the codec, the rest as it is."""
    weights, rest = _split(tensors, trained)
    return {**rest, **codec.down(weights)}


@timed("encoding")
def decode_down(codec: Codec, trained: Collection[str], coded: Tensors) -> Tensors:
    """Decode a download."""
    weights, rest = _split(coded, trained)
    return {**rest, **codec.from_down(weights)}


@timed("encoding")
def code_up(
    codec: Codec, trained: Collection[str], tensors: Tensors, reference: Tensors, state: Tensors, rng: torch.Generator
) -> tuple[Tensors, Tensors]:
    """Code an upload against the download it started from; return it and the codec's new state."""
    weights, rest = _split(tensors, trained)
    coded, state = codec.up(weights, _split(reference, trained)[0], state, rng)
    return {**rest, **coded}, state


def expected_up(codec: Codec, trained: Collection[str], reference: Tensors) -> Tensors:
    """Return tensors of the names, shapes and types that an upload must have."""
    weights, rest = _split(reference, trained)
    return {**rest, **codec.expected_up(weights)}


@timed("encoding")
def decode_up(codec: Codec, trained: Collection[str], coded: Tensors, reference: Tensors) -> Tensors:
    """Decode an upload."""
    weights, rest = _split(coded, trained)
    return {**rest, **codec.from_up(weights, _split(reference, trained)[0])}


def _prefixed(section: str, tensors: Tensors) -> Tensors:
    return {f"{section}/{name}": tensor for name, tensor in tensors.items()}


def sections(tensors: Tensors) -> dict[str, Tensors]:
    """Split names at their first slash: `model/conv1.weight` is `conv1.weight` of the section `model`."""
    found: dict[str, Tensors] = {}
    for full, tensor in tensors.items():
        section, _, name = full.partition("/")
        found.setdefault(section, {})[name] = tensor
    return found


def _on(device: torch.device, tensors: Tensors) -> Tensors:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
