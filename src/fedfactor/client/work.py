"""The work of a client: training, evaluation and calibration, with the only loop over batches.

`work` is a pure function of a message, the client's data, its state and the run's settings. Engines only move its
inputs and outputs as bytes, so a client computes the same in a local process and on a remote device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping
from itertools import islice, pairwise
from typing import Any

import torch
from torch import nn

from fedfactor.client.descent import States, descent, packed, unpacked
from fedfactor.data.clients import Examples, count, rows
from fedfactor.nn.norms import batch_norms, watched_norms, with_statistics
from fedfactor.nn.state import fill, tensors_of
from fedfactor.profile import timed
from fedfactor.protocol.coding import code_up, decode_down, decode_up, prefixed, sections
from fedfactor.protocol.context import Context
from fedfactor.protocol.message import Bytes, Message, decode, encode
from fedfactor.protocol.method import Diagnostics
from fedfactor.protocol.moves import SECTION, caught_up
from fedfactor.protocol.places import Places
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.privacy import protected
from fedfactor.protocol.setup import Setup, kept_of
from fedfactor.rng import derive, seeded, torch_rng
from fedfactor.task import Batch, moved


@timed("the rest")
def work(setup: Setup, job: Bytes, state: Bytes | None, secret: int | None = None) -> tuple[Bytes, Bytes | None]:
    """Run one job and return the reply and the client's new state (`None` if it is unchanged).

    `secret` is the seed of the noise that a client adds for differential privacy; by default the run's seed.
    """
    message = decode(job)
    client, round = message.fields["client"], message.fields["round"]
    kept, setup = kept_of(setup, state, round), setup.at(round)
    with seeded(derive(setup.training.seed, message.kind, round, client), setup.training.torch_device):
        if message.kind == "train":
            return _train(setup, message, kept, job, secret)
        if message.kind == "evaluate":
            return _evaluate(setup, message, kept), None
        if message.kind == "calibrate":
            return _calibrate(setup, message, kept), None
        if message.kind == "measure":
            return _measure(setup, message), None
    raise ValueError(f"unknown kind of job {message.kind!r}, expected train, evaluate, calibrate or measure")


def ready(setup: Setup, message: Message, kept: dict[str, Tensors], examples: Examples) -> tuple[nn.Module, Context]:
    """Return the network filled from a job, and the training context; `examples` are all of the client's."""
    fields, device = message.fields, setup.training.torch_device
    network, parts = filled_network(setup, message, kept, training=True)
    places = Places.read(fields.get("places"), parts["model"])
    return network, Context(
        task=setup.task,
        training=setup.training,
        round=fields["round"],
        client=fields["client"],
        capacity=fields["capacity"],
        lr=fields["lr"],
        examples=examples,
        kept=_on(device, kept.get("kept", {})),
        down=parts["model"],
        extras=_on(device, parts.get("extra", {})),
        state=_on(device, places.take(kept.get("optimizer", {}), parts["model"])),
        moved=parts["moved"],
    )


def _train(
    setup: Setup, message: Message, kept: dict[str, Tensors], job: Bytes, secret: int | None
) -> tuple[Bytes, Bytes | None]:
    method, training, fields, privacy = setup.method, setup.training, message.fields, setup.privacy
    examples, attack = setup.task.data.of(fields["client"]), setup.attacked_by(fields["client"])
    if attack and attack.kind == "label_flip":
        examples = setup.task.data.mislabelled(examples)
    network, ctx = ready(setup, message, kept, examples)
    places = Places.read(fields.get("places"), ctx.down)
    answer: dict[str, Any] = {key: fields[key] for key in ("client", "round", "capacity")}
    answer["samples"] = 1 if privacy else count(examples)  # with privacy, the update is all that a client tells
    test = setup.task.data.own_test(fields["client"]) if fields["test"] and not privacy else None
    if test is not None:
        answer["before"] = setup.task.evaluate(network, test)
    states = unpacked(_on(training.torch_device, kept.get("local", {})))
    fitted = _fit(setup, network, examples, ctx, states)
    answer |= {} if privacy else fitted
    if test is not None:
        answer["after"] = setup.task.evaluate(network, test)
    if method.traits.sends_labels:
        answer["labels"] = ctx.labels.tolist()
    if isinstance(method, Diagnostics) and method.traits.reports and not privacy:
        answer["figures"] = method.report(network, ctx)

    own = tensors_of(network)
    wanted = setup.uploaded(ctx.capacity, ctx.down)
    shared = {name: own[name].to(tensor.dtype) for name, tensor in wanted.items()}
    if attack:
        shared = attack.spoilt(shared, ctx.down, torch_rng(training.seed, "attack", ctx.round, ctx.client))
    trained = setup.trained(ctx.capacity)
    if privacy and privacy.where == "client":
        # A repeated job gets the same noise, and any other job other noise: differences must not reveal an update.
        whose = f"{ctx.client}/{hashlib.sha256(job).hexdigest()}"
        seed = derive(training.seed if secret is None else secret, "privacy", ctx.round, whose)
        shared = protected(shared, ctx.down, trained, privacy, seed)
    rng = torch_rng(training.seed, "codec", ctx.round, ctx.client)
    codec_state = _on(training.torch_device, places.take(kept.get("codec", {}), ctx.down))
    coded, codec_state = code_up(setup.codec, trained, shared, ctx.down, codec_state, rng)
    seen = decode_up(setup.codec, trained, coded, ctx.down)
    extras, optimizer_state = setup.optimizer.finish(seen, ctx)
    reply = Message("trained", answer, {**prefixed("model", coded), **prefixed("extra", extras)})
    state = {
        **prefixed("kept", method.keep(network)),
        **prefixed("optimizer", places.put(kept.get("optimizer", {}), optimizer_state)),
        **prefixed("codec", places.put(kept.get("codec", {}), codec_state)),
        **prefixed("local", packed(states, training.local_optimizer.name)),
        **prefixed("moved", ctx.moved),
    }
    fields = {"client": ctx.client, "round": ctx.round}
    return encode(reply), encode(Message("state", fields, state)) if state else None


@timed("training")
def _fit(setup: Setup, network: nn.Module, examples: Examples, ctx: Context, states: States) -> dict[str, Any]:
    """Train the network in the phases of the method; return the mean loss and the number of steps.

    `states` has the state of the optimizer that the client kept, and is updated if it is kept again.
    """
    training, rng = setup.training, torch_rng(setup.training.seed, "batches", ctx.round, ctx.client)
    network.train()
    losses, processed, steps, rate = torch.zeros((), device=training.torch_device), 0, 0, ctx.lr
    everything, trained, mixed = dict(network.named_parameters()), setup.trained(ctx.capacity), training.autocast()
    for phase in setup.method.phases(network, training.length):
        lr_factors = {name: group.lr_factor for group in phase.groups for name in group.names}
        parameters = _trainable(everything, lr_factors.keys() & trained)
        if not parameters:
            continue
        optimizer, travel = descent(training, phase.groups, parameters, states), 0.0
        number = training.batches(count(examples), phase.epochs)
        epochs = math.ceil(number / len(training.batch_sizes(count(examples))))
        stream = islice(batches(setup, examples, epochs, rng), number)
        groups = [*range(0, number, training.accumulate), number]
        for step, (start, end) in enumerate(pairwise(groups)):
            for parameter in parameters.values():
                parameter.grad = None
            ctx.lr, together = training.local_rate(rate, step, len(groups) - 1), end - start
            for batch in islice(stream, together):
                with mixed:
                    loss = setup.method.objective(network, batch, ctx)
                (loss / together if together > 1 else loss).backward()
                losses, processed = losses + loss.detach(), processed + 1
            _densify(parameters)
            setup.optimizer.correct(parameters, ctx)
            if training.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(parameters.values(), training.max_grad_norm)
            travel, steps = travel + optimizer.step(ctx.lr), steps + 1
        for name in parameters:
            ctx.travel[name] = ctx.travel.get(name, 0.0) + travel * lr_factors[name]
        if training.local_optimizer.keep_state:
            states.update(optimizer.states())
    for parameter in _trainable(everything, trained).values():
        parameter.grad = None
    return {"loss": float(losses) / max(processed, 1), "steps": steps}


def _trainable(everything: Mapping[str, nn.Parameter], names: Collection[str]) -> dict[str, nn.Parameter]:
    """Freeze all parameters except the named ones, and return these."""
    for name, parameter in everything.items():
        parameter.requires_grad_(name in names)
    return {name: parameter for name, parameter in everything.items() if name in names}


def _densify(parameters: Mapping[str, nn.Parameter]) -> None:
    """Make sparse gradients dense, such as those of `nn.Embedding(sparse=True)`: the later code needs dense ones."""
    for parameter in parameters.values():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


def batches(setup: Setup, examples: Examples, epochs: int, rng: torch.Generator) -> Iterator[Batch]:
    """Yield the shuffled batches of some epochs."""
    training, number = setup.training, count(examples)
    device, dtype = training.torch_device, training.torch_dtype
    for _ in range(epochs):
        for chosen in torch.split(torch.randperm(number, generator=rng), training.batch_sizes(number)):
            yield moved(setup.task.data.batch(examples, chosen, rng), device, dtype)


def _evaluate(setup: Setup, message: Message, kept: dict[str, Tensors]) -> Bytes:
    network, _ = filled_network(setup, message, kept, training=False)
    fields = {key: message.fields[key] for key in ("client", "round", "capacity")}
    test = setup.task.data.own_test(fields["client"])
    scores = setup.task.evaluate(network, test) if test is not None else None
    return encode(Message("evaluated", {**fields, "scores": scores}))


def _calibrate(setup: Setup, message: Message, kept: dict[str, Tensors]) -> Bytes:
    """Run the model on the client's data and return its batch statistics (HeteroFL's static batch norm)."""
    network, _ = filled_network(setup, message, kept, training=False)
    fields = {key: message.fields[key] for key in ("client", "round", "capacity")}
    samples = 1 if setup.privacy else len(setup.task.data.train_of[fields["client"]])
    return encode(Message("calibrated", {**fields, "samples": samples}, _statistics(setup, network, message)))


def _measure(setup: Setup, message: Message) -> Bytes:
    """Evaluate the server's model on a part of the central test set, for a server that shares its workers."""
    (first, last), tensors = message.fields["rows"], _on(setup.training.torch_device, message.tensors)
    plain, central = setup.plain(message.fields["capacity"]), setup.task.data.central
    assert central is not None
    statistics = {
        name: torch.stack([tensors[f"{name}.running_mean"], tensors[f"{name}.running_var"]])
        for name, norm in batch_norms(plain).items()
        if norm.running_mean is None and f"{name}.running_mean" in tensors
    }
    fill(with_statistics(plain, statistics), tensors)
    sums = setup.task.batch_sums(plain, rows(central, slice(first, last)))
    return encode(Message("measured", {"client": message.fields["client"], "sums": sums}))


def _statistics(setup: Setup, network: nn.Module, message: Message) -> Tensors:
    """Return mean and variance of the inputs of each batch norm on the client's training data."""
    client, round = message.fields["client"], message.fields["round"]
    rng = torch_rng(setup.training.seed, "batches", round, client)
    network.train()
    with torch.no_grad(), watched_norms(network) as statistics:
        for batch in batches(setup, setup.task.data.of(client), 1, rng):
            setup.task.outputs(network, batch)
    return statistics()


def filled_network(
    setup: Setup, message: Message, kept: dict[str, Tensors], *, training: bool
) -> tuple[nn.Module, dict[str, Tensors]]:
    """Fill the network for a job's capacity; return it and the decoded sections of the download."""
    capacity, device = message.fields["capacity"], setup.training.torch_device
    network, parts = setup.network(capacity), sections(message.tensors)
    parts["model"] = _on(device, decode_down(setup.codec, setup.trained(capacity), parts.get("model", {})))
    parts["moved"] = caught_up(kept.get("moved", {}), parts.pop(SECTION, {}))
    setup.move(network, parts["moved"])
    own = _on(device, kept.get("kept") or setup.kept(capacity))
    setup.method.load(network, parts["model"], own, training=training)
    if setup.training.own_norms:
        with_statistics(network, _statistics(setup, network, message))
    return network, parts


def _on(device: torch.device, tensors: Tensors) -> Tensors:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
