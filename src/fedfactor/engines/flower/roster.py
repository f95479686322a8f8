"""Which node is which client: node ids may change when nodes reconnect, client numbers stay for the whole run.

A node reports which client it is when it first connects. The run directory stores the number of each client together
with the key of its node.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import fedfactor
from fedfactor.data.clients import Kind
from fedfactor.engines.flower.adapter import ConnectedNode, Grid, Inbox, instruction, nodes, pack, push, unpack
from fedfactor.protocol.message import BadMessage
from fedfactor.protocol.states import SHA256
from fedfactor.protocol.validation import MOST_SAMPLES
from fedfactor.support.files import write_atomically

log = logging.getLogger("fedfactor.engines.flower")

HELLO_SECONDS = 600.0
"""How long a node may take to report which client it is; it may have to load its data first."""
LONGEST_NAME = 100
MOST_FACTS = 1 << 16
LONGEST_HELLO = 1 << 20
"""Bytes of the longest answer to the question which client a node is."""


@dataclass(frozen=True)
class Claim:
    """What a node reports about itself."""

    node: ConnectedNode
    client: int | str
    """Its number in the population, or a name."""
    capacity: float | None
    facts: dict[str, Any]
    """Description of its data if every node has its own, see `runs.tasks.facts_of`; otherwise empty."""
    base: str = ""
    """SHA-256 of the frozen base of its model; empty if the model has none."""
    samples: int = 0
    """Number of its training examples if it has its own data; otherwise 0."""

    @classmethod
    def read(cls, node: ConnectedNode, fields: Mapping[str, Any]) -> Claim:
        """Return the claim in a node's answer; raise `BadMessage` if it is not valid."""
        if "failure" in fields:
            raise BadMessage(str(fields["failure"]))
        version = fields.get("fedfactor")
        if version != fedfactor.__version__:
            raise BadMessage(
                f"it runs fedfactor {str(version)[:20]}, the server {fedfactor.__version__}: install the same version"
            )
        client, capacity = fields.get("client"), fields.get("capacity")
        if client == "":
            client = node.key
        if not isinstance(client, int | str) or isinstance(client, bool) or not 0 < len(str(client)) <= LONGEST_NAME:
            raise BadMessage("it neither reports which client it is (node-config client=...) nor has a key")
        if type(capacity) is not float or not (capacity == 0 or (math.isfinite(capacity) and 0 < capacity <= 1)):
            raise BadMessage(f"it reports capacity {capacity!r}, expected a number in (0, 1]")
        base = fields.get("base", "")
        if not isinstance(base, str) or (base and not SHA256.fullmatch(base)):
            raise BadMessage("it does not name the frozen base of its model by a SHA-256")
        samples = fields.get("samples", 0)
        if type(samples) is not int or not 0 <= samples <= MOST_SAMPLES:
            raise BadMessage(f"it reports {samples!r} training examples, expected an integer up to {MOST_SAMPLES}")
        return cls(node, client, capacity or None, _facts(fields.get("facts")), base, samples)


def _facts(text: object) -> dict[str, Any]:
    if not isinstance(text, str) or len(text) > MOST_FACTS:
        raise BadMessage("its description of its data is too long, or not a text")
    try:
        found: dict[str, Any] = json.loads(text or "{}")
    except ValueError:
        raise BadMessage("its description of its data is not JSON") from None
    if found != {} and not _possible(found):
        raise BadMessage(f"its description of its data is not valid: {str(found)[:200]}")
    return found


def _possible(facts: Any) -> bool:
    if not isinstance(facts, dict):
        return False
    tensor, classes = {"dtype": facts.get("seen_dtype"), "shape": facts.get("seen_shape")}, facts.get("classes")
    return (
        facts.get("kind") in get_args(Kind)
        and type(classes) is int
        and 0 <= classes <= MOST_NUMBERS
        and _possible_outline(facts.get("outline", tensor), MOST_AXES)
    )


def _possible_outline(found: Any, depth: int) -> bool:
    """Return whether this can be the outline of a batch: see `fedfactor.data.batches.outline`."""
    if isinstance(found, dict) and isinstance(found.get("entries"), dict):
        found = list(found["entries"].values())
    if isinstance(found, list):
        return depth > 0 and all(_possible_outline(part, depth - 1) for part in found)
    if not isinstance(found, dict):
        return found is None
    shape = found.get("shape")
    return (
        found.get("dtype") in DTYPES
        and isinstance(shape, list)
        and len(shape) <= MOST_AXES
        and all(type(size) is int and size > 0 for size in shape)
        and math.prod(shape) <= MOST_NUMBERS
    )


DTYPES = ("float32", "float64", "float16", "bfloat16", "uint8", "int64", "int32", "bool")
MOST_NUMBERS = 1 << 28
MOST_AXES = 8


@dataclass
class Roster:
    """The clients of a run by number: their names, their keys and their current nodes."""

    path: Path
    by_key: bool = False
    """Identify clients by the key of their first connection, whatever a node reports."""
    poll: float = 0.5
    run: str = ""
    """Random name of the run on the nodes' disks."""
    population: int = 0
    own_data: bool = False
    """Whether every node has its own data and describes them."""
    start: dict[str, Any] = field(default_factory=dict)
    """Facts fixed at the start of the run: capacities and the description of the nodes' data."""
    clients: dict[int, dict[str, str]] = field(default_factory=dict)
    """Name and key of every client that has connected so far; `model` is the round whose model it received to keep."""
    samples: dict[int, int] = field(default_factory=dict)
    """Number of training examples that each client with its own data reported when it first connected."""
    known_samples: Callable[[int], int] | None = None
    """Returns a client's number of training examples if the data are the recipe's, which the server knows too."""
    here: dict[int, int] = field(default_factory=dict)
    """Node id of each connected client, as of the last check."""
    claims: dict[int, Claim] = field(default_factory=dict)
    """Claims of connected nodes, by node id."""
    _asked: dict[str, tuple[ConnectedNode, float]] = field(default_factory=dict)
    refused: list[tuple[int, str]] = field(default_factory=list)
    """Nodes that were refused, and why."""
    _inbox: Inbox = field(default_factory=Inbox)

    def __post_init__(self) -> None:
        if self.path.exists():
            try:
                found = json.loads(self.path.read_text())
                self.run, self.start = found["run"], found["start"]
                self.clients = {int(number): client for number, client in found["clients"].items()}
                self.samples = {int(number): count for number, count in found.get("samples", {}).items()}
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self.path} is damaged ({error!r}): restore it from a backup, or start again in another directory"
                ) from None
        else:
            self.run = secrets.token_hex(16)

    def save(self) -> None:
        """Write the roster to its file atomically."""
        written = {"run": self.run, "start": self.start, "clients": self.clients, "samples": self.samples}
        write_atomically(self.path, json.dumps(written, indent=1))

    def gather(self, grid: Grid, wanted: int, seconds: float) -> int:
        """Wait until `wanted` clients are connected or the time is up; return how many are connected.

        The first time, clients with names are numbered in alphabetical order once all are connected.
        """
        end = time.monotonic() + seconds
        while True:
            over = time.monotonic() >= end
            self._look(grid)
            if self.clients or len(self.claims) >= wanted or over:
                self._admit()
            if len(self.here) >= wanted or over:
                return len(self.here)
            time.sleep(min(self.poll, max(0.0, end - time.monotonic())))

    def samples_of(self, client: int) -> int | None:
        """Return a client's number of training examples as known when it enrolled; `None` if it is not known."""
        return self.known_samples(client) if self.known_samples else self.samples.get(client)

    def forget(self, node: int) -> None:
        """Forget which client a node is, so that it is asked again."""
        self.claims.pop(node, None)
        self.here = {client: other for client, other in self.here.items() if other != node}

    def _look(self, grid: Grid) -> None:
        """Update the connected nodes, ask new ones which client they are, and read the answers."""
        online = {node.id: node for node in nodes(grid)}
        self.claims = {number: claim for number, claim in self.claims.items() if number in online}
        self.here = {client: node for client, node in self.here.items() if node in self.claims}
        now = time.monotonic()
        self._asked = {
            number: (node, at)
            for number, (node, at) in self._asked.items()
            if node.id in online and now - at < HELLO_SECONDS
        }
        asked = {node.id for node, _ in self._asked.values()}
        for node in online.values():
            if node.id not in self.claims and node.id not in asked:
                question = instruction(pack(None, {"run": self.run}), node.id, "query", HELLO_SECONDS, LONGEST_HELLO)
                number = push(grid, question)
                if number is not None:
                    self._asked[number] = node, now
        for answer in self._inbox.pull(grid, list(self._asked)):
            found = self._asked.pop(answer.to, None)
            if found is None:
                continue
            node = found[0]
            try:
                if answer.content is None or answer.node != node.id:
                    raise BadMessage(answer.error or "another node answered in its place")
                self.claims[node.id] = Claim.read(node, unpack(answer.content)[1])
            except BadMessage as error:
                self._refuse(node, str(error))

    def _admit(self) -> None:
        """Assign clients to new nodes: those that report a number first, then names in alphabetical order."""
        before = len(self.clients)
        new = [claim for claim in self.claims.values() if claim.node.id not in self.here.values()]
        for claim in sorted(new, key=lambda claim: (isinstance(claim.client, str), claim.client, claim.node.id)):
            try:
                client = self._number(claim)
                if client in self.here:
                    raise BadMessage(f"client {client} is already connected, on node {self.here[client]}")
            except BadMessage as error:
                self._refuse(claim.node, str(error))
                continue
            self.clients.setdefault(client, {"name": str(claim.client), "key": claim.node.key})
            if claim.samples:
                self.samples.setdefault(client, claim.samples)
            self.here[client] = claim.node.id
        if len(self.clients) != before:
            self.save()

    def _number(self, claim: Claim) -> int:
        """Return the client number of a node; raise `BadMessage` if it cannot take part."""
        if self.own_data and not claim.facts:
            raise BadMessage("it does not describe its data")
        wanted = self.start.get("facts", {})
        for key in AGREED if wanted else ():
            if claim.facts.get(key) != wanted.get(key):
                raise BadMessage(f"its data have {key} {str(claim.facts.get(key))[:80]}, expected {wanted.get(key)}")
        if claim.base != self.start.get("base", claim.base):
            raise BadMessage(other_base(claim.base, self.start["base"]))
        if isinstance(claim.client, int):
            number = claim.client
            if not 0 <= claim.client < self.population:
                raise BadMessage(f"there is no client {claim.client} in a population of {self.population}")
        else:
            taken = {*self.clients, *(other.client for other in self.claims.values())}
            named = [n for n, client in self.clients.items() if client["name"] == claim.client]
            number = next(iter(named or (n for n in range(self.population) if n not in taken)), -1)
            if number < 0:
                raise BadMessage(f"all {self.population} clients of the run are taken by other nodes")
        known = self.clients.get(number)
        if self.by_key and known is not None and known["key"] != claim.node.key:
            raise BadMessage(f"client {number} first connected with another key")
        return number

    def _refuse(self, node: ConnectedNode, reason: str) -> None:
        found = node.id, reason[:300]
        if found not in self.refused:  # log each reason once
            self.refused.append(found)
            log.warning("node %d was refused: %s", *found)


def other_base(found: str, wanted: str) -> str:
    """Return why a node cannot take part: it has built its model from other weights than the server."""
    words = [f"the SHA-256 {sha256}" if sha256 else "no frozen parameters" for sha256 in (found, wanted)]
    return f"the base of its model has {words[0]}, that of the server {words[1]}: give it the same pre-trained weights"


AGREED = ("kind", "classes", "seen_shape", "seen_dtype")
"""Facts that must be equal for the data of all nodes."""
