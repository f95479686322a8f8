"""A client on a Flower node: it runs `client.work` on its own data and keeps its state on its own disk. Needs no flwr.

Any message may be the first one or the last one of its process, so all that must last is on disk. A node is configured
by `--node-config`: `client` (a number or a name), `capacity` (a share, or "measure"), `data` with `data-options` and
`data-dir`, `state-dir`, `device` and `threads`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import fedfactor
from fedfactor import cost
from fedfactor.client.descent import state_tensors
from fedfactor.client.device_states import DeviceStates, Lost
from fedfactor.client.work import batches, filled_network, work
from fedfactor.data.clients import count
from fedfactor.protocol import message as protocol
from fedfactor.protocol.message import BadMessage, Bytes, decode, encode
from fedfactor.protocol.moves import Moves
from fedfactor.protocol.setup import Setup, kept_of
from fedfactor.protocol.states import SHA256
from fedfactor.rng import torch_rng
from fedfactor.runs.directory import ENROLLED
from fedfactor.runs.flower.device import Config, check_config, data_of, resolve_text, setup_on_node
from fedfactor.runs.tasks import Facts, facts_with_base, may_have_base
from fedfactor.server.replies import LONGEST_REASON
from fedfactor.server.state import Server
from fedfactor.server.store import DiskStore
from fedfactor.support.files import write_atomically
from fedfactor.support.secret import secret_seed
from fedfactor.task import arguments, like


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
    def of(cls, run: Config, node: Config) -> ClientNode:
        """Return the node that the configurations of the run and of the node describe."""
        check_config(node)
        return cls(str(run["recipe"]), run["data"] == "nodes", float(run["deadline"]), dict(node))

    def hello(self) -> dict[str, bool | int | float | str]:
        """Return what the node reports to the server: which client it is, its capacity, its data and its base."""
        capacity = self.config.get("capacity", 0.0)
        if capacity == "measure":
            capacity = self.measured()
        return {
            "fedfactor": fedfactor.__version__,
            "client": self.client,
            "capacity": float(capacity),
            "facts": json.dumps(self._task()[1]) if self.own_data else "",
            "samples": self._samples() if self.own_data else 0,
            "base": self._task()[0].base_sha256 if may_have_base(resolve_text(self.recipe)) else "",
        }

    def _samples(self) -> int:
        setup, _ = self._task()
        return 1 if setup.privacy else count(setup.task.data.of(0))  # the same for all numbers: the data are its own

    @property
    def client(self) -> int | str:
        """Number in the population, or a name; if empty, the server identifies the node by its key."""
        found: int | str = self.config.get("client", self.config.get("partition-id", ""))
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

    def do(self, job: Bytes, fields: Config) -> tuple[dict[str, bool | int | float | str], Bytes]:
        """Run a job from the state that it names, and write the new state to disk before the answer is sent."""
        setup, _ = self._task()
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
        if message.kind == "store":
            return {"state": "", "seconds": 0.0}, self._store(states.directory, message, state)
        secret = None
        if setup.privacy and setup.privacy.where == "client":
            states.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            secret = secret_seed(states.directory / "secret", fresh=True)
        reply, new = work(setup, job, state, secret)
        sha256 = states.write(round + 1, new) if new is not None else ""
        return {"state": sha256, "seconds": time.perf_counter() - start}, reply

    def _store(self, directory: Path, message: protocol.Message, state: Bytes | None) -> Bytes:
        """Write the client's model, which is the download and its private state, as a run directory."""
        (setup, facts), recipe = self._task(), resolve_text(self.recipe)
        fields = {key: message.fields[key] for key in ("client", "round", "capacity")}
        client, round, capacity = fields.values()
        kept = kept_of(setup, state, round)
        parts = filled_network(setup.at(round), message, kept, training=False)[1]
        download = {name: tensor.cpu() for name, tensor in parts["model"].items()}
        server = Server(round, download, {}, moves=Moves(parts["moved"]))
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = {"client": client, **(data_of(self.config) if self.own_data else {})}
        known = {"start": {"capacities": {client: capacity}}, "owner": owner}
        write_atomically(directory / ENROLLED, json.dumps(known))
        write_atomically(directory / "task.json", json.dumps(facts_with_base(facts, setup)))
        write_atomically(directory / "recipe.toml", recipe.to_toml())
        info = {"round": round, "totals": {}, "events": 0, "settings": {}}
        store = DiskStore(directory / "checkpoint")
        if state:
            store.stage(round, "client", client, state)
        store.commit(round, server.to_parts(), info)
        return encode(protocol.Message("stored", fields))

    def is_client(self, number: object) -> bool:
        """Return whether a job for this client may be run by this node."""
        return not isinstance(self.client, int) or self.client == number

    def _states(self, run: str, client: int) -> DeviceStates:
        if not run.isalnum():
            raise BadMessage("the name of the run in the job is not made of letters and digits")
        given = self.config.get("state-dir")
        return DeviceStates((Path(str(given)) if given else state_folder()) / run / f"client-{client}")

    def _task(self) -> tuple[Setup, Facts]:
        return setup_on_node(self.recipe, self.own_data, str(self.config.get("device", "")), **data_of(self.config))


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
    for batch in _some(batches(setup, examples, STEPS + 1, rng), STEPS + 1):
        start = time.perf_counter()
        with training.autocast():
            loss = setup.task.loss(setup.task.outputs(network, batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        float(loss.detach())  # wait for the device
        taken.append(time.perf_counter() - start)
    network.zero_grad()
    return training.batches(count(examples), training.length) * sum(taken[1:]) / max(1, len(taken) - 1)


def _some(items: Any, count: int) -> Any:
    return (item for item, _ in zip(items, range(count), strict=False))


def needed_bytes(setup: Setup, client: int, capacity: float) -> int:
    """Return the bytes that training needs: weights, gradients, the optimizer's state, and activations.

    The weights count twice: the download is there too.
    """
    data, network = setup.task.data, setup.network(capacity).train()
    first = next(iter(network.parameters()))
    args, named = arguments(like(data.batch(data.of(client), slice(setup.training.batch_size)), first))
    copies = 3 + max(1, state_tensors(setup.training))
    weights = copies * sum(p.numel() for p in network.parameters()) * first.element_size()
    try:
        return weights + cost.measure(network, named or args).activation_bytes
    except cost.Uncountable as error:
        warnings.warn(f"{error}. The memory of activations is not known and left out", stacklevel=2)
        return weights


def free_bytes(device: torch.device) -> float:
    """Return the free memory of a device in bytes; infinity if it is unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    names = getattr(os, "sysconf_names", {})
    if device.type == "cpu" and {"SC_AVPHYS_PAGES", "SC_PAGE_SIZE"} <= set(names):
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float("inf")


def reply(asked: Config, job: Bytes | None) -> tuple[dict[str, bool | int | float | str], Bytes | None]:
    """Return the fields and bytes that answer a message; a failure is described in the fields.

    `asked` has the message's `kind` and `fields`, and the configurations of the `run` and of the `node`.
    """
    try:
        return _reply(asked, job)
    except Exception as error:  # a failed client must not affect the others
        return {"failure": f"{type(error).__name__}: {error}"[:LONGEST_REASON]}, None


def _reply(asked: Config, job: Bytes | None) -> tuple[dict[str, bool | int | float | str], Bytes | None]:
    node = ClientNode.of(asked["run"], asked["node"])
    torch.set_num_threads(node.config.get("threads", 1))
    if asked["kind"] == "query":
        return node.hello(), None
    if job is None:
        raise BadMessage("a job without a message")
    client = decode(job).fields.get("client")
    if not node.is_client(client):
        return {"failure": f"this node is client {node.client}, not {client}", "stranger": True}, None
    return node.do(job, asked["fields"])
