"""Messages in Flower's records: packed and unpacked unchanged, and answers that cannot be read."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedfactor.engines import flower
from fedfactor.engines.flower import adapter
from fedfactor.engines.flower.adapter import STORED_AS, Inbox, nodes, pack, unpack
from fedfactor.protocol.message import BadMessage
from tests.helpers.grid import FIRST_ID, Deployment, LocalGrid, recipe, travelled


def test_bytes_of_our_own_kind_travel_unchanged_in_one_array() -> None:
    LocalGrid([], {})
    data = bytes(range(256)) * 30_000  # more than one of Flower's chunks
    sent = Message(pack(bytearray(data), {"state": "", "seconds": 0.5, "restart": False}), FIRST_ID, "train")
    assert unpack(travelled(sent).content) == (data, {"state": "", "seconds": 0.5, "restart": False})
    assert unpack(travelled(Message(pack(b"", {}), FIRST_ID, "train")).content) == (b"", {})
    assert unpack(travelled(Message(pack(None, {}), FIRST_ID, "train")).content) == (None, {})


def test_long_messages_travel_in_several_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    LocalGrid([], {})
    monkeypatch.setattr(adapter, "PIECE", 100)
    for length in (399, 400, 401, 1200, 1201):
        data = bytes(number % 251 for number in range(length))
        parts = [data[:7], memoryview(data)[7:950], data[950:]]
        for given in (data, parts):
            content = travelled(Message(pack(given, {}), FIRST_ID, "train")).content
            arrays = content.array_records["bytes"]
            assert [len(array.data) for array in arrays.values()][:-1] == [400] * ((length - 1) // 400)
            assert unpack(content) == (data, {})


def test_a_pull_may_take_as_long_as_its_answer_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the next one starts only when it has finished, and only one long answer is in memory."""
    monkeypatch.setattr(adapter, "PATIENCE", 0.0)
    monkeypatch.setattr(adapter, "USUAL_SPEED", 1.0)

    class Slow(LocalGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            time.sleep(0.2)
            raise ValueError("faulty")

    inbox, grid = Inbox(), Slow([], {})
    assert not [*inbox.pull(grid, ["a"])]
    assert [answer.to for answer in inbox.pull(grid, ["b", "c"], longest=30)] == ["b", "c"]


@pytest.mark.parametrize(
    "records",
    [
        {},
        {"fields": ArrayRecord()},
        {"fields": ConfigRecord(), "more": ConfigRecord()},
        {"fields": ConfigRecord(), "bytes": ConfigRecord()},
        {"fields": ConfigRecord(), "bytes": ArrayRecord()},
        {"fields": ConfigRecord(), "bytes": ArrayRecord({"message": Array("uint8", (1,), "numpy.ndarray", b"x")})},
        {"fields": ConfigRecord(), "bytes": ArrayRecord({"message": Array("int8", (1,), STORED_AS, b"x")})},
        {"fields": ConfigRecord(), "bytes": ArrayRecord({"message1": Array("uint8", (1,), STORED_AS, b"x")})},
    ],
)
def test_content_of_another_app_is_refused(records: dict[str, ConfigRecord | ArrayRecord]) -> None:
    with pytest.raises(BadMessage, match="a message of another app"):
        unpack(RecordDict(records))  # type: ignore[arg-type]


def test_node_numbers_stay_whole() -> None:
    grid = LocalGrid([{}], {})
    assert [node.id for node in nodes(grid)] == [FIRST_ID] and FIRST_ID > 2**63 and float(FIRST_ID) != FIRST_ID


def test_nobody_can_guess_the_number_of_anothers_message(tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, recipe(train={"rounds": 1}))
    deployed.serve()
    secret = {message.metadata.message_type: set[str]() for message in deployed.grid.pushed}
    for message in deployed.grid.pushed:
        secret[message.metadata.message_type].add(unpack(message.content)[1]["once"])
    assert {kind: len(found) for kind, found in secret.items()} == {"query": 4, "train": 4}
    assert all(len(one) == 32 for found in secret.values() for one in found)


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("flwr", "psutil") else found(name))
    with pytest.raises(ImportError, match=r"Flower needs flwr, psutil; install it with .*\[flower\]"):
        importlib.reload(flower)
