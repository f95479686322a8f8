"""The configuration of a node, and the task that a run has on it. Needs no flwr."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from fedfactor.data import federated, load
from fedfactor.data.clients import FederatedData, Virtual
from fedfactor.data.federated import SHARED
from fedfactor.data.sources import checked_source
from fedfactor.protocol.settings import check_device_here
from fedfactor.protocol.setup import Setup
from fedfactor.runs.recipe import Recipe, parse, resolve
from fedfactor.runs.tasks import Facts, facts_of, kind_of, setup_of, task_of, task_with
from fedfactor.support.checks import near
from fedfactor.task import Task

Config = Mapping[str, Any]
KNOWN = ("client", "capacity", "data", "data-options", "data-dir", "state-dir", "device", "threads")
"""Keys of a node's configuration."""
SIMULATED = ("partition-id", "num-partitions")
"""Keys that Flower's simulation adds."""


class NodeError(ValueError):
    """The configuration of a node is not valid; the message names the key."""


def check_config(config: Config) -> None:
    """Raise ValueError if a node's configuration is not valid, without loading its data."""
    for key in config:
        if key not in (*KNOWN, *SIMULATED):
            raise NodeError(f"a node has no setting {key!r}; {near(key, KNOWN)}there are {', '.join(KNOWN)}")
    client, capacity = config.get("client", ""), config.get("capacity", 0.0)
    if not isinstance(client, int | str) or isinstance(client, bool):
        raise NodeError(f"client must be a number in the population, or a name, got {client!r}")
    if capacity != "measure" and (type(capacity) not in (int, float) or not 0 <= capacity <= 1):
        raise NodeError(f'capacity must be a share of the full model in (0, 1], or "measure", got {capacity!r}')
    threads = config.get("threads", 1)
    if type(threads) is not int or threads < 1:
        raise NodeError(f"threads must be an integer of at least 1, got {threads!r}")
    check_device_here(str(config.get("device") or "cpu"))
    options = _options(str(config.get("data-options", "")))
    if data := str(config.get("data", "")):
        checked_source(data, options)
    elif options:
        raise NodeError("data-options are arguments of a function that loads a node's own data: set `data` too")


def data_of(config: Config) -> dict[str, str]:
    """Return the settings of a node that say which data it has, as arguments of `own_task`."""
    return {key.replace("-", "_"): str(config.get(key, "")) for key in ("data", "data-options", "data-dir")}


@lru_cache(maxsize=4)
def resolve_text(text: str) -> Recipe:
    """Resolve a recipe given as text."""
    return resolve(parse(text, "the run's recipe"), "the run's recipe")


@lru_cache(maxsize=4)
def setup_on_node(text: str, own: bool, device: str, **config: str) -> tuple[Setup, Facts]:
    """Load this node's data and build the setup; cached for processes that serve several jobs (simulation)."""
    recipe = resolve_text(text)
    if device:
        recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, device=device))
    check_device_here(recipe.training.device)
    if own:
        task, facts = own_task(recipe, **config)
    elif config["data"]:
        raise NodeError(
            f"this run's nodes load parts of the recipe's data: remove data = {config['data']!r} from node-config"
        )
    else:
        task, facts = task_of(recipe, config["data_dir"] or None)
    setup = setup_of(recipe, task)
    setup.bind(recipe.capacities.levels)
    setup.task.check_outputs(setup.network(recipe.capacities.levels[-1]))  # the smallest: this may be a weak device
    return setup, facts


def _options(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise NodeError(f"data-options must be a JSON object, got {text[:80]!r} ({error})") from None
    if not isinstance(found, dict):
        raise NodeError(f"data-options must be a JSON object, got {text[:80]!r}")
    return found


def own_task(recipe: Recipe, data: str, data_options: str, data_dir: str) -> tuple[Task, Facts]:
    """Load a node's own data: all its training examples belong to its client, whatever the client's number."""
    if not data:
        raise NodeError(
            "every node has its own data in this run: set `data` to name a data set or package.module:function"
        )
    dataset = load(data, data_dir=data_dir or None, **_options(data_options))
    shared = {key: value for key, value in recipe.tables["partition"].items() if key in SHARED}
    whole = federated(dataset, "iid", clients=1, **{**shared, "take": 0})

    def everybody(part: torch.Tensor) -> Virtual:
        return Virtual(number_of_nodes(recipe), lambda client: part)

    tests = everybody(whole.test_of[0]) if whole.test_of is not None else None
    split = FederatedData(whole.train, everybody(whole.train_of[0]), whole.central, tests, whole.transform)
    facts = facts_of(split, kind_of(recipe, dataset.kind), dataset.class_names)
    return task_with(recipe, split, facts), facts


def number_of_nodes(recipe: Recipe) -> int:
    """Return the number of clients of a run whose nodes have their own data. Raise ValueError if it is not set."""
    clients = recipe.tables["partition"].get("clients")
    if not clients:  # 0 stands for all owners of the data, whom only the nodes know
        raise ValueError("every node has its own data: set partition.clients in the recipe to the number of nodes")
    return int(clients)
