"""A client on a Flower node: it runs `client.work` on its own data and keeps its state on its own disk.

Flower starts a process per message, so nothing may be kept in memory between messages. A node is configured by
`--node-config`: `client` (a number or a name), `capacity` (a share, or "measure"), `data` with `data-options` and
`data-dir`, `state-dir`, `device` and `threads`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import fedfactor
from fedfactor import cost
from fedfactor.client.device_states import DeviceStates, Lost
from fedfactor.client.work import batches, work
from fedfactor.data import federated, load
from fedfactor.data.clients import FederatedData, Virtual
from fedfactor.data.federated import SHARED
from fedfactor.engines.flower.adapter import Context, Message, RecordDict, pack, unpack
from fedfactor.protocol.message import BadMessage, Bytes, decode
from fedfactor.protocol.settings import check_device_here
from fedfactor.protocol.setup import Setup
from fedfactor.protocol.states import SHA256
from fedfactor.rng import torch_rng
from fedfactor.runs.recipe import Recipe, parse, resolve
from fedfactor.runs.tasks import Facts, facts_of, setup_of, task_of, task_with
from fedfactor.server.dispatch import LONGEST_REASON

Config = Mapping[str, Any]
KNOWN = ("client", "capacity", "data", "data-options", "data-dir", "state-dir", "device", "threads")
"""Keys of a node's configuration."""
SIMULATED = ("partition-id", "num-partitions")
"""Keys that Flower's simulation adds."""


class NodeError(ValueError):
    """The configuration of a node is not valid; the message names the key."""


@dataclasses.dataclass(frozen=True)
class ClientNode:
    """One node: settings of the run, and the configuration of the device."""

    recipe: str
    """Text of the recipe."""
    own_data: bool
    """Whether every node has its own data; otherwise it loads its part of the recipe's data."""
    deadline: float
    config: Config

    @classmethod
    def of(cls, context: Context) -> ClientNode:
        """Return the node that Flower's context describes."""
        run, node = context.run_config, context.node_config
        for key in node:
            if key not in (*KNOWN, *SIMULATED):
                raise NodeError(f"node-config has no key {key!r}; the keys are {', '.join(KNOWN)}")
        return cls(str(run["recipe"]), run["data"] == "nodes", float(run["deadline"]), dict(node))

    def hello(self) -> dict[str, bool | int | float | str]:
        """Return what the node reports to the server: which client it is, its capacity and its data."""
        capacity = self.config.get("capacity", 0.0)
        if capacity == "measure":
            capacity = self.measured()
        elif type(capacity) not in (int, float) or not (capacity == 0 or 0 < capacity <= 1):
            raise NodeError(f'capacity must be a share of the full model in (0, 1], or "measure", got {capacity!r}')
        return {
            "fedfactor": fedfactor.__version__,
            "client": self.client,
            "capacity": float(capacity),
            "facts": json.dumps(self._task()[1]) if self.own_data else "",
        }

    @property
    def client(self) -> int | str:
        """Number in the population, or a name; if empty, the server identifies the node by its key."""
        found = self.config.get("client", self.config.get("partition-id", ""))
        if not isinstance(found, int | str) or isinstance(found, bool):
            raise NodeError(f"client must be a number in the population, or a name, got {found!r}")
        return found

    def measured(self) -> float:
        """Return the largest capacity that fits the free memory and trains within half of the round's deadline."""
        levels = resolve_text(self.recipe).capacities.levels
        setup, _ = self._task()
        client = self.client if isinstance(self.client, int) else 0
        for level in levels:
            if needed_bytes(setup, client, level) > free_bytes(setup.training.torch_device):
                continue
            if training_seconds(setup, client, level) <= self.deadline / 2:
                return level
        return levels[-1]

    def do(self, job: Bytes, fields: Config) -> tuple[bytes, dict[str, bool | int | float | str]]:
        """Run a job from the state that it names, and write the new state to disk before the answer is sent."""
        setup, _ = self._task()
        threads = self.config.get("threads", 1)
        if type(threads) is not int or threads < 1:
            raise NodeError(f"threads must be an integer of at least 1, got {threads!r}")
        torch.set_num_threads(threads)
        message = decode(job)
        client, round = message.fields["client"], message.fields["round"]
        states = self._states(fields["run"], client)
        base = str(fields["state"])
        if base and not SHA256.fullmatch(base):
            raise BadMessage("the job does not name its state by a SHA-256")
        try:
            state = states.read(base) if base else None
        except Lost:
            if not fields["restart"]:
                raise
            state = None
        if message.kind == "train":
            states.settle(base or None, round)
        start = time.perf_counter()
        reply, new = work(setup, job, state)
        sha256 = states.write(round + 1, new) if new is not None else ""
        return bytes(reply), {"state": sha256, "seconds": time.perf_counter() - start}

    def is_client(self, number: object) -> bool:
        """Return whether a job for this client may be run by this node."""
        return not isinstance(self.client, int) or self.client == number

    def _states(self, run: str, client: int) -> DeviceStates:
        if not run.isalnum():
            raise BadMessage("the name of the run in the job is not made of letters and digits")
        given = self.config.get("state-dir")
        return DeviceStates((Path(str(given)) if given else state_folder()) / run / f"client-{client}")

    def _task(self) -> tuple[Setup, Facts]:
        own = {key: str(self.config.get(key, "")) for key in ("data", "data-options", "data-dir", "device")}
        return _task(self.recipe, self.own_data, **{key.replace("-", "_"): text for key, text in own.items()})


@lru_cache(maxsize=4)
def resolve_text(text: str) -> Recipe:
    """Resolve a recipe given as text."""
    return resolve(parse(text, "the run's recipe"), "the run's recipe")


@lru_cache(maxsize=4)
def _task(text: str, own: bool, *, data: str, data_options: str, data_dir: str, device: str) -> tuple[Setup, Facts]:
    """Load this node's data and build the setup; cached for processes that serve several jobs (simulation)."""
    recipe = resolve_text(text)
    if device:
        recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, device=device))
    check_device_here(recipe.training.device)
    if own:
        if not data:
            raise NodeError(
                "every node has its own data in this run: set `data` to name a data set or package.module:function"
            )
        federated_data, facts = _own_data(recipe, data, _options(data_options), data_dir or None)
        task = task_with(recipe, federated_data, facts)
    else:
        if data:
            raise NodeError(
                f"this run's nodes load parts of the recipe's data: remove data = {data!r} from node-config"
            )
        task, facts = task_of(recipe, data_dir or None)
    setup = setup_of(recipe, task)
    setup.bind(recipe.capacities.levels)
    return setup, facts


def _options(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise NodeError(f"data-options must be a JSON object, got {text[:80]!r} ({error})") from None
    if not isinstance(found, dict):
        raise NodeError(f"data-options must be a JSON object, got {text[:80]!r}")
    return found


def _own_data(recipe: Recipe, name: str, options: dict[str, Any], data_dir: str | None) -> tuple[FederatedData, Facts]:
    """Load a node's own data: all its training examples belong to its client, whatever the client's number."""
    dataset = load(name, data_dir=data_dir, **options)
    shared = {key: value for key, value in recipe.tables["partition"].items() if key in SHARED}
    whole = federated(dataset, "iid", clients=1, **{**shared, "take": 0})

    def everybody(part: torch.Tensor) -> Virtual:
        return Virtual(MOST_CLIENTS, lambda client: part)

    tests = everybody(whole.test_of[0]) if whole.test_of is not None else None
    data = FederatedData(whole.train, everybody(whole.train_of[0]), whole.central, tests, whole.transform)
    return data, facts_of(dataset, whole)


MOST_CLIENTS = 1 << 31
"""Size of the population that a node assumes: its client may have any number below it."""


def state_folder() -> Path:
    """Return the default directory of private states."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "fedfactor"


STEPS = 3
"""Number of timed training steps, after one for warming up."""


def training_seconds(setup: Setup, client: int, capacity: float) -> float:
    """Time a few training steps at a capacity and return the estimated seconds of a round's training."""
    examples, training = setup.task.data.of(client), setup.training
    network, rng = setup.network(capacity).train(), torch_rng(training.seed, "measure")
    taken = []
    for x, y in _some(batches(setup, examples, STEPS + 1, rng), STEPS + 1):
        start = time.perf_counter()
        loss = setup.task.loss(network(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        float(loss.detach())  # wait for the device
        taken.append(time.perf_counter() - start)
    network.zero_grad()
    steps = training.epochs * -(-len(examples[1]) // training.batch_size)
    return steps * sum(taken[1:]) / max(1, len(taken) - 1)


def _some(items: Any, count: int) -> Any:
    return (item for item, _ in zip(items, range(count), strict=False))


def needed_bytes(setup: Setup, client: int, capacity: float) -> int:
    """Return the bytes that training needs: weights, gradients, momentum, and activations for the backward pass."""
    inputs = setup.task.data.of(client)[0][: setup.training.batch_size]
    network = setup.network(capacity).train()
    first = next(iter(network.parameters()))
    example = setup.task.data.transform.test(inputs)
    spent = cost.measure(network, example.to(first.dtype) if example.is_floating_point() else example)
    return 4 * spent.parameters * first.element_size() + spent.activation_bytes


def free_bytes(device: torch.device) -> float:
    """Return the free memory of a device in bytes; infinity if it is unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    names = getattr(os, "sysconf_names", {})
    if device.type == "cpu" and {"SC_AVPHYS_PAGES", "SC_PAGE_SIZE"} <= set(names):
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float("inf")


def answer(message: Message, context: Context) -> Message:
    """Answer a message; errors are described in the answer, because Flower's own errors contain less."""
    try:
        content = _answer(message.content, message.metadata.message_type, context)
    except Exception as error:  # a failed client must not affect the others
        reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
        content = pack(None, {"failure": reason})
    return Message(content, reply_to=message)


def _answer(content: RecordDict, kind: str, context: Context) -> RecordDict:
    node = ClientNode.of(context)
    data, fields = unpack(content)
    if kind == "query":
        return pack(None, node.hello())
    if data is None:
        raise BadMessage("a job without a message")
    job = bytearray(data)  # writable, so that decoding needs no further copy
    asked = decode(job).fields.get("client")
    if not node.is_client(asked):
        return pack(None, {"failure": f"this node is client {node.client}, not {asked}", "stranger": True})
    return pack(*node.do(job, fields))
