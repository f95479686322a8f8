"""A server and nodes on several machines: keys, restarts, and why a node was refused."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from fedfactor.engines.flower.certificates import node_key
from fedfactor.engines.flower.control import Control, RegisteredNode, key_bytes
from fedfactor.engines.flower.programs import DeploymentError
from fedfactor.runs.flower.hosts import Attempts, Hopeless, Keys, RunFailed, refusal


class Door:
    """A SuperLink's list of those who may join."""

    def __init__(self) -> None:
        self.known: list[RegisteredNode] = []

    def nodes(self) -> list[RegisteredNode]:
        return list(self.known)

    def register(self, public_key: Path, name: str) -> int:
        if name == "refused":
            raise DeploymentError("the SuperLink refused RegisterNode")
        self.known.append(RegisteredNode(len(self.known), name, "registered", key_bytes(public_key)))
        return len(self.known)

    def unregister(self, node: int) -> None:
        self.known = [one for one in self.known if one.id != node]


def test_keys_in_the_folder_may_join_and_one_that_is_none_keeps_nobody_out(tmp_path: Path) -> None:
    keys, door = Keys(tmp_path), Door()
    control = cast(Control, door)
    for name in ("a", "b", "refused"):
        node_key(tmp_path / name)
    (tmp_path / "c.pub").write_text("nonsense")
    changes = keys.admit(control)
    assert changes[:2] == ["a may join", "b may join"]
    assert "c.pub is not the public key of a node" in changes[2]
    assert changes[3:] == ["the SuperLink refused RegisterNode"]
    assert keys.admit(control) == [], "said once"
    (tmp_path / "a.pub").write_text("half a k")  # as while it is copied again
    assert len(keys.admit(control)) == 1
    assert [node.name for node in door.known] == ["a", "b"]
    (tmp_path / "b.pub").unlink()
    assert keys.admit(control) == ["b may no longer join"]


def test_reasons_are_told_in_words() -> None:
    key = Path("node.key")
    false = refusal("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed (_ssl.c:1)", "a:1", key)
    assert isinstance(false, Hopeless)
    assert "a:1" in false
    stranger = refusal("Exit Code: 305\n[code: 2004] Failed to activate SuperNode.", "a:1", key)
    assert not isinstance(stranger, Hopeless)
    assert "node.key.pub" in stranger
    assert refusal("one\ntwo", "a:1", key) == "the node ended: one | two"


def test_a_run_that_gets_further_may_fail_as_often_as_it_likes(tmp_path: Path) -> None:
    attempts, pointer = Attempts(tmp_path), tmp_path / "checkpoint" / "current"
    pointer.parent.mkdir()
    for round in range(10):
        pointer.write_text(f"round-{round}")
        attempts.count()
        attempts.count()
    attempts.count()
    attempts.reason = "no quorum"
    with pytest.raises(RunFailed, match="3 times without getting beyond round 9: no quorum"):
        attempts.count()
