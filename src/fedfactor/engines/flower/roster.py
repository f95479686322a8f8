"""Who is who: nodes come and go under Flower's numbers, clients keep theirs for a whole run.

A node says which client it is when it is first seen; who has which number is written down in the run directory, with
the key that the node came with.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import fedfactor
from fedfactor.data.clients import Kind
from fedfactor.engines.flower.adapter import Grid, Inbox, Node, instruction, nodes, pack, push, unpack
from fedfactor.protocol.files import write_file
from fedfactor.protocol.message import BadMessage

log = logging.getLogger("fedfactor.engines.flower")

HELLO_SECONDS = 600.0
"""How long a node may take to say who it is; it may have to load its data first."""
LONGEST_NAME = 100
MOST_FACTS = 1 << 16


@dataclass(frozen=True)
class Claim:
    """What a node says of itself."""

    node: Node
    client: int | str
    """Its number in the population, or a name."""
    capacity: float | None
    facts: dict[str, Any]
    """What its data are like, where every node has its own; see `run.facts_of`."""

    @classmethod
    def read(cls, node: Node, fields: Mapping[str, Any]) -> Claim:
        """Check a node's answer: raises `BadMessage`."""
        if "failure" in fields:
            raise BadMessage(str(fields["failure"]))
        version = fields.get("fedfactor")
        if version != fedfactor.__version__:
            raise BadMessage(
                f"it runs fedfactor {str(version)[:20]}, the server {fedfactor.__version__}: install the same"
            )
        client, capacity = fields.get("client"), fields.get("capacity")
        if client == "":
            client = node.key
        if not isinstance(client, int | str) or isinstance(client, bool) or not 0 < len(str(client)) <= LONGEST_NAME:
            raise BadMessage("it says neither which client it is (node-config client=...) nor has it a key")
        if type(capacity) is not float or not (capacity == 0 or (math.isfinite(capacity) and 0 < capacity <= 1)):
            raise BadMessage(f"a capacity lies in (0, 1], it says {capacity!r}")
        return cls(node, client, capacity or None, _facts(fields.get("facts")))


def _facts(text: object) -> dict[str, Any]:
    if not isinstance(text, str) or len(text) > MOST_FACTS:
        raise BadMessage("what it says of its data is too long, or no text")
    try:
        found: dict[str, Any] = json.loads(text or "{}")
    except ValueError:
        raise BadMessage("what it says of its data is not JSON") from None
    if found != {} and not _possible(found):
        raise BadMessage(f"what it says of its data cannot be: {str(found)[:200]}")
    return found


def _possible(facts: Any) -> bool:
    if not isinstance(facts, dict):
        return False
    shape, classes = facts.get("seen_shape"), facts.get("classes")
    return (
        facts.get("kind") in get_args(Kind)
        and facts.get("seen_dtype") in DTYPES
        and type(classes) is int
        and 0 < classes <= MOST_NUMBERS
        and isinstance(shape, list)
        and len(shape) <= MOST_AXES
        and all(type(size) is int and size > 0 for size in shape)
        and math.prod(shape) <= MOST_NUMBERS
    )


DTYPES = ("float32", "float64", "float16", "bfloat16", "uint8", "int64", "int32")
MOST_NUMBERS = 1 << 28
MOST_AXES = 8


@dataclass
class Roster:
    """The clients of a run, by number: their names, their keys, and the nodes they are on at the moment."""

    path: Path
    by_key: bool = False
    """A client is who has the key it first came with, whatever a node says."""
    poll: float = 0.5
    run: str = ""
    """What the run is called on the nodes' disks."""
    population: int = 0
    own_data: bool = False
    """Every node has its own data, and says what they are like."""
    start: dict[str, Any] = field(default_factory=dict)
    """What was found out when the run began and may not change on the way: capacities and the nodes' data."""
    clients: dict[int, dict[str, str]] = field(default_factory=dict)
    """Name and key of every client seen so far."""
    here: dict[int, int] = field(default_factory=dict)
    """The nodes that clients are on, as of the last look."""
    claims: dict[int, Claim] = field(default_factory=dict)
    """What connected nodes say they are, by node."""
    _asked: dict[str, tuple[Node, float]] = field(default_factory=dict)
    _told: set[tuple[int, str]] = field(default_factory=set)
    _inbox: Inbox = field(default_factory=Inbox)

    def __post_init__(self) -> None:
        if self.path.exists():
            try:
                found = json.loads(self.path.read_text())
                self.run, self.start = found["run"], found["start"]
                self.clients = {int(number): client for number, client in found["clients"].items()}
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self.path} is damaged ({error!r}): restore it from a copy, or start again in another directory"
                ) from None
        else:
            self.run = secrets.token_hex(16)

    def save(self) -> None:
        """Write all of it down, at once."""
        written = {"run": self.run, "start": self.start, "clients": self.clients}
        unfinished = self.path.with_name(self.path.name + ".new")
        write_file(unfinished, json.dumps(written, indent=1).encode())
        unfinished.replace(self.path)

    def gather(self, grid: Grid, wanted: int, seconds: float) -> int:
        """Wait until so many clients are here, or the time is up; return how many are.

        The first time, names get their numbers in the order of the alphabet, once all are here.
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

    def forget(self, node: int) -> None:
        """Ask a node again who it is: it says that it is somebody else now."""
        self.claims.pop(node, None)
        self.here = {client: other for client, other in self.here.items() if other != node}

    def _look(self, grid: Grid) -> None:
        """See who is connected, ask newcomers who they are, and take in the answers."""
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
                number = push(grid, instruction(pack(None, {"run": self.run}), node.id, "query", HELLO_SECONDS))
                if number is not None:
                    self._asked[number] = node, now
        for answer in self._inbox.pull(grid, list(self._asked)):
            found = self._asked.pop(answer.to, None)
            if found is None:
                continue
            node = found[0]
            try:
                if answer.content is None or answer.node != node.id:
                    raise BadMessage(answer.error or "another node answered for it")
                self.claims[node.id] = Claim.read(node, unpack(answer.content)[1])
            except BadMessage as error:
                self._refuse(node, str(error))

    def _admit(self) -> None:
        """Give those who are new their places: numbers first, then names in the order of the alphabet."""
        before = len(self.clients)
        new = [claim for claim in self.claims.values() if claim.node.id not in self.here.values()]
        for claim in sorted(new, key=lambda claim: (isinstance(claim.client, str), claim.client, claim.node.id)):
            try:
                client = self._number(claim)
                if client in self.here:
                    raise BadMessage(f"client {client} is here already, on node {self.here[client]}")
            except BadMessage as error:
                self._refuse(claim.node, str(error))
                continue
            self.clients.setdefault(client, {"name": str(claim.client), "key": claim.node.key})
            self.here[client] = claim.node.id
        if len(self.clients) != before:
            self.save()

    def _number(self, claim: Claim) -> int:
        """Return the client that a node is, or say why it is none."""
        if self.own_data and not claim.facts:
            raise BadMessage("it does not say what its data are like")
        wanted = self.start.get("facts", {})
        for key in AGREED if wanted else ():
            if claim.facts.get(key) != wanted.get(key):
                raise BadMessage(f"its data have {key} {str(claim.facts.get(key))[:80]}, the run's {wanted.get(key)}")
        if isinstance(claim.client, int):
            number = claim.client
            if not 0 <= claim.client < self.population:
                raise BadMessage(f"there is no client {claim.client} in a population of {self.population}")
        else:
            taken = {*self.clients, *(other.client for other in self.claims.values())}
            named = [n for n, client in self.clients.items() if client["name"] == claim.client]
            number = next(iter(named or (n for n in range(self.population) if n not in taken)), -1)
            if number < 0:
                raise BadMessage(f"all {self.population} clients of the run are other nodes")
        known = self.clients.get(number)
        if self.by_key and known is not None and known["key"] != claim.node.key:
            raise BadMessage(f"client {number} came with another key before")
        return number

    def _refuse(self, node: Node, reason: str) -> None:
        if (node.id, reason) not in self._told:  # once is enough
            self._told.add((node.id, reason))
            log.warning("node %d takes no part: %s", node.id, reason[:300])


AGREED = ("kind", "classes", "seen_shape", "seen_dtype")
"""What the data of all nodes must have in common."""
