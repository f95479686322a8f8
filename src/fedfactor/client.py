"""The client's side: the only loop over batches.

`work` is one pure function of a message, the client's data, its state and the run's settings. Engines only move its
bytes: what runs here in a process of its own is what runs on a phone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedfactor.methods.base import Method, Phase
from fedfactor.optimizers.base import Optimizer
from fedfactor.plan import Tensors
from fedfactor.rng import derive, torch_rng
from fedfactor.settings import Training
from fedfactor.task import Examples, Task, like
from fedfactor.wire import Codec, Message, decode, encode


@dataclass
class Setup:
    """What server and clients of a run agree on; networks are built once a capacity and refilled."""

    task: Task
    method: Method
    optimizer: Optimizer
    codec: Codec
    training: Training
    _networks: dict[float, nn.Module] = field(default_factory=dict)
    _kept: dict[float, Tensors] = field(default_factory=dict)

    def network(self, capacity: float) -> nn.Module:
        """Return the network of a capacity: one object, refilled by whoever uses it.

        The seed of its first values has no client in it, so private parts start equal everywhere.
        """
        if capacity not in self._networks:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive(self.training.seed, "init"))
                built = self.method.network(self.task.build, capacity)
            built = built.to(self.training.torch_device, self.training.torch_dtype)
            self._networks[capacity] = built
            self._kept[capacity] = {name: tensor.clone() for name, tensor in self.method.keep(built).items()}
        return self._networks[capacity]

    def kept(self, capacity: float) -> Tensors:
        """Return what a client that never took part holds."""
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
    labels: Tensor
    """The classes that occur in the client's data."""
    down: Tensors
    """The download as decoded: the anchor of proximal terms."""
    extras: Tensors
    """What the optimizer sent along, by the name of the tensor it belongs to."""
    state: Tensors
    """What the optimizer kept on this client."""
    travel: dict[str, float] = field(default_factory=dict)
    """How far a constant gradient of one has moved each parameter: steps times rate; momentum adds to it."""

    @staticmethod
    def gradients(loss: Tensor, of: Mapping[str, Tensor]) -> Tensors:
        """Differentiate a loss with respect to intermediate tensors, keeping the graph for the step itself."""
        found = torch.autograd.grad(loss, list(of.values()), retain_graph=True, allow_unused=True)
        return {name: gradient for name, gradient in zip(of, found, strict=True) if gradient is not None}


def work(setup: Setup, job: bytes, state: bytes | None) -> tuple[bytes, bytes | None]:
    """Do one job and return the reply and the client's new state (`None`: unchanged)."""
    message = decode(job)
    kept = _sections(decode(state).tensors) if state else {}
    client, round = message.fields["client"], message.fields["round"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(setup.training.seed, message.kind, round, client))
        if message.kind == "train":
            return _train(setup, message, kept)
        if message.kind == "evaluate":
            return _evaluate(setup, message, kept), None
        if message.kind == "calibrate":
            return _calibrate(setup, message, kept), None
    raise ValueError(f"unknown kind of job {message.kind!r}")


def _train(setup: Setup, message: Message, kept: dict[str, Tensors]) -> tuple[bytes, bytes | None]:
    method, training, fields = setup.method, setup.training, message.fields
    network, parts = _load(setup, message, kept)
    examples = setup.task.data.of(fields["client"])
    ctx = Context(
        task=setup.task,
        training=training,
        round=fields["round"],
        client=fields["client"],
        capacity=fields["capacity"],
        lr=fields["lr"],
        labels=torch.unique(examples[1]) if setup.task.kind == "classification" else examples[1][:0],
        down=parts["model"],
        extras=_on(training.torch_device, parts.get("extra", {})),
        state=_on(training.torch_device, kept.get("optimizer", {})),
    )
    answer: dict[str, Any] = {key: fields[key] for key in ("client", "round", "capacity")}
    answer["samples"] = len(examples[1])
    test = setup.task.data.own_test(fields["client"]) if fields["test"] else None
    if test is not None:
        answer["before"] = setup.task.evaluate(network, test)
    answer.update(_fit(setup, network, examples, ctx))
    if test is not None:
        answer["after"] = setup.task.evaluate(network, test)

    state_dict = network.state_dict()
    shared = {name: state_dict[name].detach().to(wanted.dtype) for name, wanted in ctx.down.items()}
    extras, optimizer_state = setup.optimizer.finish(shared, ctx)
    rng = torch_rng(training.seed, "codec", ctx.round, ctx.client)
    coded, codec_state = code_up(setup.codec, network, shared, ctx.down, kept.get("codec", {}), rng)
    reply = Message("trained", answer, {**_prefixed("model", coded), **_prefixed("extra", extras)})
    state = {
        **_prefixed("kept", method.keep(network)),
        **_prefixed("optimizer", optimizer_state),
        **_prefixed("codec", codec_state),
    }
    return encode(reply), encode(Message("state", {"client": ctx.client}, state)) if state else None


def _fit(setup: Setup, network: nn.Module, examples: Examples, ctx: Context) -> dict[str, Any]:
    """Train the network through the method's phases."""
    training, rng = setup.training, torch_rng(setup.training.seed, "batches", ctx.round, ctx.client)
    network.train()
    losses, steps = torch.zeros((), device=training.torch_device), 0
    for phase in setup.method.phases(training.epochs):
        parameters = _trainable(network, phase)
        if not parameters:
            continue
        sgd = _sgd(setup, network, parameters, ctx.lr)
        pull, travel = 0.0, 0.0
        for batch in batches(setup, examples, phase.epochs, rng):
            loss = setup.method.objective(network, batch, ctx)
            sgd.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            setup.optimizer.correct(parameters, ctx)
            if training.clip:
                torch.nn.utils.clip_grad_norm_(parameters.values(), training.clip)
            sgd.step()
            pull = training.momentum * pull + 1.0
            travel += ctx.lr * pull
            losses, steps = losses + loss.detach(), steps + 1
        for name in parameters:
            ctx.travel[name] = ctx.travel.get(name, 0.0) + travel
    for parameter in network.parameters():
        parameter.requires_grad_(True)
        parameter.grad = None
    return {"loss": float(losses) / max(steps, 1), "steps": steps}


def _trainable(network: nn.Module, phase: Phase) -> dict[str, nn.Parameter]:
    """Freeze what this phase does not train, and return the rest."""
    chosen = {}
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(phase.trains(name))
        if parameter.requires_grad:
            chosen[name] = parameter
    return chosen


def _sgd(setup: Setup, network: nn.Module, parameters: dict[str, nn.Parameter], lr: float) -> torch.optim.SGD:
    training = setup.training
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = training.weight_decay if setup.method.decays(name, network) else 0.0
        groups.setdefault(decay, []).append(parameter)
    options = [{"params": members, "weight_decay": decay} for decay, members in groups.items()]
    return torch.optim.SGD(options, lr=lr, momentum=training.momentum, fused=True)


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


def _evaluate(setup: Setup, message: Message, kept: dict[str, Tensors]) -> bytes:
    network, _ = _load(setup, message, kept)
    fields = {key: message.fields[key] for key in ("client", "round", "capacity")}
    test = setup.task.data.own_test(fields["client"])
    scores = setup.task.evaluate(network, test) if test is not None else None
    return encode(Message("evaluated", {**fields, "scores": scores}))


def _calibrate(setup: Setup, message: Message, kept: dict[str, Tensors]) -> bytes:
    """Run the model over the client's data and return the batch statistics of its norms (HeteroFL's static ones)."""
    network, _ = _load(setup, message, kept)
    fields = {key: message.fields[key] for key in ("client", "round", "capacity")}
    norms = {
        name: module for name, module in network.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    examples = setup.task.data.of(fields["client"])
    gathered: dict[str, list[Tensor]] = {name: [] for name in norms}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].transpose(0, 1).flatten(1)
            gathered[name].append(torch.stack([x.mean(1), x.var(1)]) * len(inputs[0]))

        return hook

    handles = [module.register_forward_pre_hook(watch(name)) for name, module in norms.items()]
    rng = torch_rng(setup.training.seed, "batches", fields["round"], fields["client"])
    network.train()
    with torch.no_grad():
        for x, _ in batches(setup, examples, 1, rng):
            network(x)
    for handle in handles:
        handle.remove()
    count = len(examples[1])
    statistics = {name: torch.stack(seen).sum(0) / count for name, seen in gathered.items()}
    return encode(Message("calibrated", {**fields, "samples": count}, statistics))


def _load(setup: Setup, message: Message, kept: dict[str, Tensors]) -> tuple[nn.Module, dict[str, Tensors]]:
    """Fill the network of the job's capacity; return it and the decoded sections of the download."""
    network = setup.network(message.fields["capacity"])
    parts = _sections(message.tensors)
    down = code_down(setup.codec, network, parts.get("model", {}), decode_it=True)
    parts["model"] = {name: t.to(setup.training.torch_device, t.dtype) for name, t in down.items()}
    own = kept.get("kept") or setup.kept(message.fields["capacity"])
    setup.method.load(network, parts["model"], _on(setup.training.torch_device, own))
    return network, parts


def weights_of(network: nn.Module, tensors: Tensors) -> Tensors:
    """Pick the tensors that a codec may change: the parameters, not the buffers."""
    parameters = {name for name, _ in network.named_parameters()}
    return {name: tensor for name, tensor in tensors.items() if name in parameters}


def code_down(codec: Codec, network: nn.Module, tensors: Tensors, *, decode_it: bool = False) -> Tensors:
    """Code (or decode) a download: weights by the codec, the rest as it is."""
    weights = weights_of(network, tensors)
    return {**tensors, **(codec.from_down(weights) if decode_it else codec.down(weights))}


def code_up(
    codec: Codec,
    network: nn.Module,
    tensors: Tensors,
    reference: Tensors,
    state: Tensors,
    rng: torch.Generator,
) -> tuple[Tensors, Tensors]:
    """Code an upload: weights by the codec, the rest as it is."""
    weights = weights_of(network, tensors)
    coded, state = codec.up(weights, weights_of(network, reference), state, rng)
    rest = {name: tensor for name, tensor in tensors.items() if name not in weights}
    return {**rest, **coded}, state


def _prefixed(section: str, tensors: Tensors) -> Tensors:
    return {f"{section}/{name}": tensor for name, tensor in tensors.items()}


def _sections(tensors: Tensors) -> dict[str, Tensors]:
    """Split names at their first slash."""
    sections: dict[str, Tensors] = {}
    for full, tensor in tensors.items():
        section, _, name = full.partition("/")
        sections.setdefault(section, {})[name] = tensor
    return sections


def _on(device: torch.device, tensors: Tensors) -> Tensors:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
