"""The library in one call: a model, tensors, a method, and a plain model back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Never

import numpy as np
import torch
from torch import Tensor, nn

from fedfactor.data.clients import Arrays, Examples, FederatedData, Kind, count
from fedfactor.data.records import Collate, MapStyle, Records
from fedfactor.data.splitting import dirichlet, iid
from fedfactor.engines import Engine
from fedfactor.nn import Tune
from fedfactor.protocol.aggregation import Aggregation, Rule
from fedfactor.protocol.attack import Attack
from fedfactor.protocol.buffering import SYNCHRONOUS, Buffering
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.fleet import Fleet
from fedfactor.protocol.local_optimizer import LocalOptimizer
from fedfactor.protocol.method import Method
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.privacy import Privacy
from fedfactor.protocol.sentences import RENAMED_KEYS
from fedfactor.protocol.settings import Capacities, Rounds, Schedule, Training
from fedfactor.registry import create
from fedfactor.rng import numpy_rng
from fedfactor.runs.execute import run
from fedfactor.runs.peft import started
from fedfactor.runs.recipe import Recipe, described
from fedfactor.runs.tasks import Facts, counted_facts
from fedfactor.server.result import Result
from fedfactor.support.checks import near
from fedfactor.task import EVALUATION_BATCH, Loss, Metric, Task


def simulate(
    model: nn.Module | Callable[..., nn.Module],
    data: FederatedData | Arrays | MapStyle | Sequence[MapStyle],
    *,
    test: Arrays | MapStyle | Sequence[MapStyle] | None = None,
    collate: Collate | None = None,
    loss: Loss | None = None,
    clients: int | None = None,
    alpha: float | None = None,
    method: str | Method = "fedavg",
    optimizer: str | Optimizer = "fedavg",
    codec: str | Codec = "float32",
    capacities: Mapping[float, float] | Capacities | None = None,
    tune: Tune | None = None,
    fleet: Mapping[str, float] | Fleet | None = None,
    aggregation: Rule | Aggregation = "mean",
    attack: Attack | None = None,
    buffering: Buffering = SYNCHRONOUS,
    privacy: Mapping[str, Any] | Privacy | None = None,
    kind: Kind | None = None,
    metrics: Mapping[str, Metric] | Sequence[str] = (),
    best: str | None = None,
    higher_is_better: bool | None = None,
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
        data: Inputs and targets as two tensors, or one map-style dataset such as a `torch.utils.data.Dataset`, to split
            over the clients; a list of datasets, one per client; or data that are split already.
        test: The central test set, in one of these forms. With a list of datasets per client, a list of as many test
            datasets is the clients' own test data, and together they are the central test set.
        collate: Makes a batch of a list of a dataset's examples; by default `torch.utils.data.default_collate`. A model
            is called as `model(x)` for batches `(x, y)`, and as `model(**batch)` for mappings.
        loss: A function of the model's outputs and the batch that returns a scalar tensor. By default the `loss` of the
            outputs, if they have one as those of Hugging Face's models do, otherwise the loss of the kind.
        clients: Number of clients to split the data over; by default 10. Data that are split already have their own.
        alpha: Split by Dirichlet(alpha) over the labels: the smaller, the fewer classes per client. None: IID.
        method: A federated method, its name (`fedfactor.list_methods()`), or `package.module:Class`, a class of your
            own. So also `optimizer` and `codec`.
        optimizer: How clients and server step, or its name: fedavg, fedprox, scaffold, feddyn, fedadam, ...
        codec: How tensors are encoded in messages, or its name: float32, float16, fedpaq, int8, topk, ...
        capacities: Which share of the full model clients can train: levels in (0, 1] with the share of clients that
            have each, such as `{1.0: 0.5, 0.25: 0.5}`. None: all clients train the full model.
        tune: Fine-tune a pre-trained model: which layers get a change, and which tensors are trained whole. All others
            are frozen, and are in no message. So are parameters of the model that do not require gradients.
        fleet: The devices of the clients, on which a virtual clock times the rounds: a `Fleet`, or built-in devices
            with the share of clients that have each, such as `{"phone-low": 0.5, "gateway": 0.5}`. None: no clock.
        aggregation: How the server puts replies together: an `Aggregation`, or the name of a rule that needs no further
            settings: mean, median, trimmed_mean, krum, multi_krum.
        attack: What a share of hostile clients does, to try rules against it. None: all are honest.
        buffering: When the server takes a step: after each cohort, or, on a fleet, whenever enough replies are there.
        privacy: Differential privacy of whole clients: a `Privacy`, or its settings, such as
            `{"clip": 1.0, "noise": 1.0, "delta": 1e-5}`. None: no clipping and no noise.
        kind: What the targets are: classes (classification), 0 or 1 (binary), the next token (language), real numbers
            (regression: mean squared error), or whatever your loss needs (custom). None: custom if you give a loss,
            otherwise classification.
        metrics: Further metrics by name. Each is a function of the model's outputs and the batch that returns one value
            per example or their mean, an object with torchmetrics' `update`, `compute` and `reset`, or the name of a
            built-in metric: mae, mse.
        best: The metric that decides which model is best. None: the accuracy, or the loss if there are no classes.
        higher_is_better: Whether higher values of `best` are better. Metrics of torchmetrics and built-in ones know it.
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
        target: Value of the deciding metric at which rounds, bytes and operations are noted.
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
        if test is not None or alpha is not None or collate is not None:
            raise TypeError(
                "a FederatedData has its own split, test set and batches: leave out test, alpha and collate"
            )
    else:
        data = split(data, clients or 10, test=test, alpha=alpha, seed=seed, collate=collate)
    if clients not in (None, data.clients):
        raise ValueError(f"clients is {clients}, but the data are split over {data.clients} already: leave it out")
    task = Task(started(model, tune), data, kind, evaluate_batch_size, loss, metrics, best, higher_is_better, tune)
    recipe = described(
        Path(directory or "simulation").resolve().name,
        training,
        Rounds(**{f.name: given[f.name] for f in fields(Rounds)}),
        capacities if isinstance(capacities, Capacities) else Capacities(capacities or {1.0: 1.0}),
        create("methods", method) if isinstance(method, str) else method,
        create("optimizers", optimizer) if isinstance(optimizer, str) else optimizer,
        create("codecs", codec) if isinstance(codec, str) else codec,
        {"metrics": task.measures.written, "best": best or "", "higher_is_better": higher_is_better},
        tune,
        Fleet.of_profiles(fleet) if isinstance(fleet, Mapping) else fleet,
        Aggregation(aggregation) if isinstance(aggregation, str) else aggregation,
        attack,
        buffering,
        Privacy(**privacy) if isinstance(privacy, Mapping) else privacy,
    )

    def begin(recipe: Recipe) -> tuple[Recipe, Task, Facts]:
        return recipe, task, {} if directory is None else counted_facts(task.data, task.kind, _class_names(task))

    def heard(event: dict[str, Any]) -> None:
        for text in event.get("warnings", ()):
            warnings.warn(text, stacklevel=2)
        on_event(event)

    return run(recipe, directory, resume=True, engine=engine, on_event=heard, begin=begin)


def _class_names(task: Task) -> list[str]:
    """Return the numbers of all classes that occur, as names; of datasets, if they list their targets."""
    parts = [part for part in (task.data.train, task.data.central) if part is not None and count(part)]
    found = [part.known_targets() if isinstance(part, Records) else part[1] for part in parts]
    targets = [part for part in found if part is not None]
    return (
        [str(number) for number in range(1 + max(int(part.max()) for part in targets))]
        if (task.has_classes and targets)
        else []
    )


def split(
    examples: Arrays | MapStyle | Sequence[MapStyle],
    clients: int,
    *,
    test: Arrays | MapStyle | Sequence[MapStyle] | None = None,
    alpha: float | None = None,
    seed: int = 0,
    collate: Collate | None = None,
) -> FederatedData:
    """Split examples over clients: evenly, or by Dirichlet(alpha) over the labels. A list has a dataset per client."""
    if isinstance(examples, list | tuple) and not _are_arrays(examples):
        if alpha is not None:
            raise TypeError("alpha splits one dataset over clients; a list of datasets is split already")
        return per_client(examples, test, collate)
    train = _examples(examples, collate)
    number = count(train)
    if clients > number:
        raise ValueError(f"{number} examples cannot be split over {clients} clients")
    FederatedData(train, [torch.arange(number)])  # raises ValueError if these are not examples
    rng = numpy_rng(seed, "partition")
    if alpha is None:
        parts = iid(np.zeros(number, np.int64), clients, rng)
    else:
        targets = train.targets() if isinstance(train, Records) else train[1]
        if targets.numel() != number or (targets.is_floating_point() and not targets.equal(targets.round())):
            raise ValueError("alpha splits by class, but targets are not one class per example: leave alpha out")
        parts = dirichlet(targets.long().flatten().numpy(), clients, alpha, rng)
    central = None if test is None else _examples(test, collate)
    return FederatedData(train, [torch.from_numpy(part) for part in parts], central)


def per_client(datasets: Sequence[MapStyle], test: Any = None, collate: Collate | None = None) -> FederatedData:
    """Return data whose clients have one dataset each; `test` is one dataset, or one per client."""
    train, central = Records(datasets, collate), None if test is None else _examples(test, collate)
    own = isinstance(test, list | tuple) and not _are_arrays(test)
    if own and len(test) != len(datasets):
        raise ValueError(f"there are {len(datasets)} training datasets, one per client, but {len(test)} of test data")
    tests = torch.split(torch.arange(count(central)), central.sizes) if own and isinstance(central, Records) else None
    return FederatedData(train, torch.split(torch.arange(len(train)), train.sizes), central, tests)


def _examples(given: Any, collate: Collate | None) -> Examples:
    if isinstance(given, list | tuple) and _are_arrays(given):
        if collate is not None:
            raise TypeError("collate makes batches of a dataset's examples; inputs and targets need none")
        return given[0], given[1]
    return Records(given if isinstance(given, list | tuple) else [given], collate)


def _are_arrays(given: Sequence[Any]) -> bool:
    """Return whether these are inputs and targets, and not datasets."""
    return len(given) == 2 and any(isinstance(part, Tensor | np.ndarray) for part in given)
