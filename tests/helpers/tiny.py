"""The federation of `fedfactor.testing` on real digits, and everything that is registered."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fedfactor import testing
from fedfactor.data import iid, load
from fedfactor.data.clients import FederatedData
from fedfactor.engines import pool
from fedfactor.protocol.method import Method, Staged
from fedfactor.registry import create, names
from fedfactor.rng import numpy_rng
from fedfactor.server.result import Result
from fedfactor.task import Task
from fedfactor.testing import SmallNet as Tiny
from fedfactor.testing import promises
from fedfactor.testing.federation import Recording, Tampering

__all__ = [
    "CODECS", "FAMILIES", "FIELDS", "METHODS", "OPTIMIZERS", "Recording", "Tampering", "Tiny", "data", "decaying",
    "lasting", "odd", "refusal", "run", "task",
]  # fmt: skip

# Forked worker processes have then imported what their jobs need, which takes a second in each of them otherwise.
pool.PRELOADED.append(__name__)

METHODS = names("methods")
OPTIMIZERS = names("optimizers")
CODECS = names("codecs")

FIELDS = {"pufferfish": {"warmup": 1}}
"""Settings of a method under which a short run shows all that it does."""


def _family(method: Method) -> tuple[object, ...]:
    """Return what decides which code of engines and checkpoints runs: what is averaged how, and who keeps which state."""
    hooks = ("fold", "remember", "keep", "private_names")
    owners = [next(c for c in type(method).__mro__ if hook in vars(c)) for hook in hooks]
    return method.traits.space, owners[0], *(owner is Method for owner in owners[1:]), isinstance(method, Staged)


FAMILIES = sorted({"local", *{_family(create("methods", name)): name for name in reversed(METHODS)}.values()})
"""One method per family and `local`, whose server has no tensors: for costly tests of engines and checkpoints.

Their code does not ask for the method. `fedfactor.testing` checks every method with copies of the setup, as workers have,
and resumes a run of it.
"""


@functools.cache
def data(even: bool = True) -> FederatedData:
    """Six clients of 40 digits each (uneven: 20 to 60)."""
    whole = load("digits", split_seed=3)
    train, central = ((torch.from_numpy(x).float() / 16, torch.from_numpy(y)) for x, y in (whole.train, whole.test))
    where = torch.from_numpy(iid(whole.train[1], 1, numpy_rng(3, "partition"))[0])
    edges = [0, 40, 80, 120, 160, 200, 240] if even else [0, 20, 60, 120, 150, 205, 240]
    parts = [where[a:b] for a, b in itertools.pairwise(edges)]
    own = [torch.arange(20) + 20 * client for client in range(6)]
    return FederatedData(train, parts, central, own)


def odd() -> FederatedData:
    """The same clients, whose targets say whether a digit is odd: a binary task."""
    central = data().central
    assert central is not None
    return replace(data(), train=(data().train[0], data().train[1] % 2), central=(central[0], central[1] % 2))


def task() -> Task:
    """The tiny network on the tiny data."""
    return Task(Tiny, data())


def skewed() -> FederatedData:
    """Six clients with the digits of two classes each."""
    labels = data().train[1]
    parts = [torch.isin(labels, torch.tensor([c, c + 4])).nonzero().flatten()[:30] for c in range(6)]
    return FederatedData(data().train, parts, data().central)


def run(method: Any = "fedavg", **settings: Any) -> Result:
    """Run two rounds of three out of six clients; every setting can be changed."""
    if isinstance(method, str):
        method = create("methods", method, **FIELDS.get(method, {}))
    return testing.run(method, **{"data": data(), **settings})


def lasting(result: Result) -> dict[str, Any]:
    """Return a run's summary without the time that it took."""
    return {key: value for key, value in result.summary.items() if key != "seconds"}


def refusal(method: str, optimizer: str, codec: str) -> str | None:
    """Return why a combination is refused, or `None`."""
    return promises.refusal(create("methods", method), optimizer, codec)


def decaying(method: Method, network: nn.Module) -> dict[str, bool]:
    """Return on which parameters weight decay acts."""
    (phase,) = method.phases(network, 1)
    return {name: group.weight_decay for group in phase.groups for name in group.names}
