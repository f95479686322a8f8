"""The library in one call: a model, tensors, a method, and a plain model back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Never

import torch
from torch import nn

from fedfactor.data.clients import Examples, FederatedData, Kind
from fedfactor.data.splitting import dirichlet, iid
from fedfactor.engines import Engine
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.local_optimizer import LocalOptimizer
from fedfactor.protocol.method import Method
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.sentences import RENAMED_KEYS
from fedfactor.protocol.settings import Capacities, Rounds, Schedule, Training
from fedfactor.registry import create
from fedfactor.rng import numpy_rng
from fedfactor.runs.execute import run
from fedfactor.runs.recipe import Recipe, described
from fedfactor.runs.tasks import Facts, counted_facts
from fedfactor.server.result import Result
from fedfactor.support.checks import near
from fedfactor.task import EVALUATION_BATCH, Task


def simulate(
    model: nn.Module | Callable[..., nn.Module],
    data: FederatedData | Examples,
    *,
    test: Examples | None = None,
    clients: int = 10,
    alpha: float | None = None,
    method: str | Method = "fedavg",
    optimizer: str | Optimizer = "fedavg",
    codec: str | Codec = "float32",
    capacities: Mapping[float, float] | Capacities | None = None,
    kind: Kind = "classification",
    directory: Path | str | None = None,
    engine: Engine | None = None,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    rounds: int = 10,
    cohort: int | float = 1.0,
    quorum: float = 0.5,
    evaluate_every: int | None = None,
    evaluate_clients: Literal["none", "selected", "all"] = "selected",
    evaluate_limit: int = 0,
    evaluate_batch_size: int = EVALUATION_BATCH,
    target: float | None = None,
    joules_per_byte: float | None = None,
    epochs: int | float | None = None,
    local_steps: int | None = None,
    batch_size: int = 32,
    accumulate: int = 1,
    local_optimizer: str | type[torch.optim.Optimizer] | Mapping[str, Any] | Callable[..., Any] = "sgd",
    lr: float | None = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
    max_grad_norm: float = 0.0,
    schedule: Schedule | Literal["constant", "exponential", "multistep", "cosine", "one_cycle"] = "constant",
    local_schedule: Literal["constant", "cosine"] = "constant",
    seed: int = 0,
    device: str = "cpu",
    dtype: Literal["float32", "float64", "bfloat16"] = "float32",
    precision: Literal["full", "bf16-mixed"] = "full",
    own_norms: bool = False,
    **unknown: Never,
) -> Result:
    """Train a model on data split over clients, and return the finished run.

    Args:
        model: The network, or a function that builds it. Methods that train networks of several sizes need a function
            with the parameter `width`, a share of the full width.
        data: Inputs and targets to split over the clients, or data that are split already.
        test: Inputs and targets of the central test set; only where `data` are inputs and targets.
        clients: Number of clients to split inputs and targets over.
        alpha: Split by Dirichlet(alpha) over the labels: the smaller, the fewer classes per client. None: IID.
        method: A federated method, its name (`fedfactor.list_methods()`), or `package.module:Class`, a class of your
            own. So also `optimizer` and `codec`.
        optimizer: How clients and server step, or its name: fedavg, fedprox, scaffold, feddyn, fedadam, ...
        codec: How tensors are encoded in messages, or its name: float32, float16, fedpaq, int8, topk, ...
        capacities: Which share of the full model clients can train: levels in (0, 1] with the share of clients that
            have each, such as `{1.0: 0.5, 0.25: 0.5}`. None: all clients train the full model.
        kind: What the targets are: classes (classification), 0 or 1 (binary), or the next token (language).
        directory: Commit each round to this directory. A call with the same directory resumes the run; with more
            rounds, it extends the run. `fedfactor report` and `fedfactor.load(directory, model=...)` open it.
        engine: Where clients run; by default in this process, one after another. `fedfactor.engines.Pool` runs them
            in worker processes.
        on_event: Called with each event of the run, such as the metrics of a round.
        rounds: Number of rounds.
        cohort: Clients per round: a number, or (as a float) a share of all clients.
        quorum: Least share of a cohort that must answer correctly. Below it the run stops.
        evaluate_every: Rounds between evaluations. The last round is always evaluated; 0: only the last. By default, a
            run is evaluated at most 20 times.
        evaluate_clients: Whose models are tested on the client's own test data: no client's, those of the clients
            that trained in the round, or all clients'.
        evaluate_limit: Most clients that `evaluate_clients="all"` tests, always the same ones. 0: no limit.
        evaluate_batch_size: Examples per batch in evaluations.
        target: Accuracy at which rounds, bytes and operations are noted.
        joules_per_byte: Energy that the network link needs for a byte, to report the energy of communication.
        epochs: Local epochs per round, such as 2 or 0.5; 1 by default.
        local_steps: Steps of the clients' optimizer per round, in place of `epochs`.
        batch_size: Examples per batch.
        accumulate: Batches per step, which uses the mean of their gradients.
        local_optimizer: The clients' optimizer: sgd, adam, adamw, adagrad, rmsprop, or a class such as
            `torch.optim.NAdam`. With options: `functools.partial(torch.optim.AdamW, betas=(0.9, 0.95))`, or a table
            such as `{"name": "adamw", "betas": (0.9, 0.95), "keep_state": True}`. With `keep_state`, a client keeps
            the optimizer's state until its next round.
        lr: Learning rate of the clients; by default 0.1 for sgd, otherwise that of the optimizer's class.
        momentum: Momentum of the clients' SGD.
        weight_decay: Weight decay of the clients; by default that of the optimizer's class (sgd: 0, adamw: 0.01).
        max_grad_norm: Clip gradients to this norm. 0: no clipping.
        schedule: How the learning rate changes over rounds: a `Schedule`, or the name of one without settings.
        local_schedule: How the learning rate changes over the steps of a round.
        seed: Seed of everything random. The same seed gives the same result, bit by bit.
        device: Where clients train: cpu, cuda, cuda:1, mps, ...
        dtype: Floating-point type of training.
        precision: "bf16-mixed" trains with `torch.autocast` in bfloat16; weights stay in `dtype`.
        own_norms: Clients estimate the running statistics of batch norms on their own data after each download.

    Raises:
        ValueError: A value is not legal, or method, optimizer and codec do not go together.
        TypeError: There is no such parameter.
    """
    given: dict[str, Any] = dict(locals())
    for name in unknown:
        if new := RENAMED_KEYS.get(f"train.{name}"):
            raise TypeError(f"simulate(): {name} is now {new.removeprefix('train.')}")
        known = [parameter for parameter in signature(simulate).parameters if parameter != "unknown"]
        raise TypeError(f"simulate() has no parameter {name!r}; {near(name, known)}there are {', '.join(known)}")
    for part in (method, optimizer, codec):
        if isinstance(part, type):
            raise TypeError(f"give an object, {part.__name__}(), or a name, not the class")
    chosen = {**given, "optimizer": LocalOptimizer.of(local_optimizer)}
    training = Training(**{f.name: chosen[f.name] for f in fields(Training)})
    if isinstance(data, FederatedData):
        if test is not None or alpha is not None:
            raise TypeError("test and alpha are for inputs and targets; a FederatedData has its own split and test set")
    else:
        data = split(data, clients, test=test, alpha=alpha, seed=seed)
    recipe = described(
        Path(directory or "simulation").resolve().name,
        training,
        Rounds(**{f.name: given[f.name] for f in fields(Rounds)}),
        capacities if isinstance(capacities, Capacities) else Capacities(capacities or {1.0: 1.0}),
        create("methods", method) if isinstance(method, str) else method,
        create("optimizers", optimizer) if isinstance(optimizer, str) else optimizer,
        create("codecs", codec) if isinstance(codec, str) else codec,
    )
    task = Task(model, data, kind, evaluate_batch_size)

    def begin(recipe: Recipe) -> tuple[Recipe, Task, Facts]:
        return recipe, task, {} if directory is None else counted_facts(task.data, kind, _class_names(task.data))

    def heard(event: dict[str, Any]) -> None:
        for text in event.get("warnings", ()):
            warnings.warn(text, stacklevel=2)
        on_event(event)

    return run(recipe, directory, resume=True, engine=engine, on_event=heard, begin=begin)


def _class_names(data: FederatedData) -> list[str]:
    """Return the numbers of all classes that occur, as names."""
    targets = [examples[1] for examples in (data.train, data.central) if examples is not None and len(examples[1])]
    return [str(number) for number in range(1 + max(int(part.max()) for part in targets))]


def split(
    examples: Examples,
    clients: int,
    *,
    test: Examples | None = None,
    alpha: float | None = None,
    seed: int = 0,
) -> FederatedData:
    """Split inputs and targets over clients: evenly, or by Dirichlet(alpha) over the labels."""
    if clients > len(examples[1]):
        raise ValueError(f"{len(examples[1])} examples cannot be split over {clients} clients")
    FederatedData(examples, [torch.arange(len(examples[1]))])  # raises ValueError if these are not examples
    labels, rng = examples[1].long().flatten().numpy(), numpy_rng(seed, "partition")
    parts = iid(labels, clients, rng) if alpha is None else dirichlet(labels, clients, alpha, rng)
    return FederatedData(examples, [torch.from_numpy(part) for part in parts], test)
