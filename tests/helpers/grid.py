"""Flower without its processes: a grid whose nodes are called in this one, with messages serialised on the way."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedfactor.engines.flower.adapter import GROUP, unpack  # also keeps flwr quiet, before anything of it acts
from fedfactor.protocol.message import decode
from fedfactor.runs.flower.app import write_app
from fedfactor.runs.flower.client_app import app
from fedfactor.runs.flower.server import DEFAULTS, serve
from fedfactor.runs.recipe import Recipe, parse, resolve
from fedfactor.server.result import Result

FIRST_ID = 2**63 + 12345
"""Node numbers are unsigned and of 64 bits: as floats or signed integers they would be others."""

Tamper = Callable[[Message, Message], "Message | None"]


class LocalGrid(Grid):
    """Nodes in this process, by number.

    `tamper` changes what one of them answers, `damage` the bytes of that, `delay` is when it comes, `stall` how long the
    server waits within a pull for all of it, as Flower does. Nodes that are `full` do not store the last model.
    """

    def __init__(self, configs: Iterable[dict[str, Any]], run_config: dict[str, Any]) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # a message cannot be made without them
        self.contexts = {
            FIRST_ID + i: Context(1, FIRST_ID + i, dict(config), RecordDict(), dict(run_config))
            for i, config in enumerate(configs)
        }
        self.keys = {node: f"key of node {node}".encode() for node in self.contexts}
        self.offline: set[int] = set()
        self.tamper: dict[int, Tamper] = {}
        self.damage: dict[int, Callable[[dict[str, bytes]], dict[str, bytes]]] = {}
        self.delay: dict[int, float] = {}
        self.stall: dict[int, float] = {}
        self.full: set[int] = set()
        self.pushed: list[Message] = []
        self.pulled: list[Message] = []
        self._replies: dict[str, Reply] = {}
        self._due: dict[str, float] = {}

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **options: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [node for node in self.contexts if node not in self.offline]

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys[node]) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = []
        for message in messages:
            received = travelled(message)
            self.pushed.append(received)
            node = received.metadata.dst_node_id
            reply = self._answer(received, node)
            numbers.append(received.metadata.message_id)
            if reply is not None:
                contents = self.damage.get(node, dict)(taken_apart(reply))
                # What the SuperLink knows, whatever is in the reply.
                self._replies[received.metadata.message_id] = Reply(
                    node, reply.object_id, contents, message_type=received.metadata.message_type
                )
        return numbers

    def _answer(self, message: Message, node: int) -> Message | None:
        if node in self.offline:
            return Message(Error(5, "Node unavailable"), reply_to=message)
        try:
            reply = app(message, self.contexts[node])
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)
        longest = int(message.metadata.group_id.removeprefix(GROUP))
        assert len(unpack(reply.content)[0] or b"") <= longest, "the SuperLink would refuse it"
        if kind_of(message) == "store":
            return None if node in self.full else reply
        change = self.tamper.get(node)
        return reply if change is None or kind_of(message) == "query" else change(message, reply)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        now = time.monotonic()
        for number in message_ids:  # a reply is due from when it is first asked for: the work itself was done at once
            reply = self._replies.get(number)
            if reply is not None and number not in self._due:
                late = self.delay.get(reply.node, 0.0) if reply.message_type == "train" else 0.0
                self._due[number] = now + late
        ready = [number for number in message_ids if number in self._replies and self._due[number] <= now]
        # Handed out once, also where it then cannot be put together.
        replies = [self._replies.pop(number) for number in ready]
        for reply in replies:
            time.sleep(self.stall.get(reply.node, 0.0) if reply.message_type == "train" else 0.0)
        found = [put_together(reply.object_id, dict(reply.contents)) for reply in replies]
        self.pulled += found
        return found


@dataclass(frozen=True)
class Reply:
    """What came back for a message, in pieces."""

    node: int
    object_id: str
    contents: dict[str, bytes]
    message_type: str


def kind_of(message: Message) -> str:
    """Return what a message asks for: query, train, evaluate, calibrate or store."""
    data = unpack(message.content)[0]
    return "query" if data is None else decode(data).kind


def travelled(message: Message) -> Message:
    """Take a message apart into the objects that Flower moves, and put it together again."""
    return put_together(message.object_id, taken_apart(message))


def taken_apart(message: Message) -> dict[str, bytes]:
    message.metadata.__dict__["_message_id"] = message.object_id
    return {number: thing.deflate() for number, thing in get_all_nested_objects(message).items()}


def put_together(number: str, contents: dict[str, bytes]) -> Message:
    found = inflate_object_from_contents(number, contents)
    assert isinstance(found, Message)
    found.metadata.__dict__["_message_id"] = number
    return found


RECIPE = """
name = "flower"
seed = 5
data = { name = "digits", test_share = 0.8 }
partition = { kind = "iid", clients = 4, test_limit = 60, train_share = 0.5 }
model = { name = "tests.helpers.tiny:Tiny" }
method = { name = "METHOD"FIELDS }
train = { rounds = 3, cohort = 4, epochs = EPOCHS, batch_size = 16, lr = 0.05, quorum = 0.5 }
capacities = { levels = [1.0, 0.5], shares = [0.5, 0.5] }
"""


def recipe(method: str = "fedavg", **sections: Any) -> Recipe:
    """A few rounds of four clients on digits."""
    text = RECIPE.replace("METHOD", method).replace("EPOCHS", "2" if method in TWO_PHASES else "1")
    text = text.replace("FIELDS", ", warmup = 1" if method == "pufferfish" else "")
    tables = parse(text, "test")
    for name, section in sections.items():
        tables[name] = {**tables.get(name, {}), **section} if isinstance(section, dict) else section
    return resolve(tables, "test")


TWO_PHASES = ("feddecomp", "fedrep")


def outcome(result: Result) -> dict[str, Any]:
    """What two runs must have in common: all but the time they took."""
    events = [{key: value for key, value in event.items() if "seconds" not in key} for event in result.history]
    return {"events": events, **{k: result.summary[k] for k in ("weights_sha256", "private_sha256", "totals")}}


class Deployment:
    """A server's run directory and some nodes with their own disks; the server can be started again and again."""

    def __init__(self, folder: Path, chosen: Recipe, nodes: int = 4, configs: Any = None, **settings: Any) -> None:
        written = write_app(
            chosen, folder / "app", folder / "run", config={"wait": 5.0, "deadline": 30.0, "poll": 0.01, **settings}
        )
        tables = tomllib.loads((written / "pyproject.toml").read_text())
        self.config = tables["tool"]["flwr"]["app"]["config"]
        assert set(self.config) == {*DEFAULTS, "recipe", "run-dir"}
        self.folder = folder
        self.run_dir = folder / "run"
        given = configs or [{"client": i} for i in range(nodes)]
        self.configs = [{"state-dir": str(folder / f"node-{i}"), **config} for i, config in enumerate(given)]
        self.grid = LocalGrid(self.configs, self.config)

    def serve(self, **changes: Any) -> Result:
        """Start the ServerApp and wait for its end."""
        return serve(self.grid, Context(1, 1, {}, RecordDict(), {**self.config, **changes}))


def refusals(caplog: pytest.LogCaptureFixture) -> str:
    """Return what the server logged about nodes that it refused."""
    return "\n".join(record.getMessage() for record in caplog.records if record.name == "fedfactor.engines.flower")
