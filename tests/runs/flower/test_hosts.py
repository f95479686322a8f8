"""A server and nodes on several machines: keys, restarts, what `join` says, and why a node was refused."""

from __future__ import annotations

import contextlib
import http.server
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from fedfactor.engines.flower.certificates import Certificates, node_key, server_certificates
from fedfactor.engines.flower.control import Control, Hopeless, RegisteredNode, key_bytes, unreachable
from fedfactor.engines.flower.programs import DeploymentError, free_port
from fedfactor.runs.flower import hosts
from fedfactor.runs.flower.hosts import Attempts, Keys, RunFailed, refusal


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


class Health(http.server.BaseHTTPRequestHandler):
    """Answers as a SuperLink that is up."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving(port: int, files: Certificates | None) -> Iterator[str]:
    """Serve on a port of this machine, with TLS if there are certificates; yield the address."""
    with http.server.HTTPServer(("127.0.0.1", port), Health) as server:
        if files is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(files.certificate, files.key)
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    return server_certificates(tmp_path / "site", ["127.0.0.1"], 1)


def test_why_a_server_cannot_be_reached(files: Certificates, tmp_path: Path) -> None:
    other = server_certificates(tmp_path / "other", ["127.0.0.1"], 1).authority
    with serving(free_port(), files) as address:
        assert unreachable(address, files.authority) == ""
        false = unreachable(address, other)
        assert isinstance(false, Hopeless) and f"the server at {address} does not match ca.crt" in false
    closed = unreachable(address, files.authority)
    assert closed.startswith(
        f"cannot reach the server at {address} ([Errno 111] Connection refused): check the address"
    )
    with serving(free_port(), None) as plain:
        assert f"cannot reach the server at {plain} ([SSL" in unreachable(plain, files.authority)


class Enough(Exception):
    """The test has heard what it waited for."""


def joined(
    folder: Path, address: str, authority: Path, printing: str, enough: Callable[[str], bool], patch: pytest.MonkeyPatch
) -> list[str]:
    """Join with a stand-in for the SuperNode that prints something; return what was said until it was enough."""
    patch.setattr(hosts, "node_command", lambda *_: ["sh", "-c", f"echo '{printing}'; exec sleep 60"])
    patch.setattr(hosts, "PROBE", 0.1)
    patch.setattr(hosts, "POLL", 0.05)
    said = list[str]()

    def tell(sentence: str) -> None:
        said.append(sentence)
        if enough(sentence):
            raise Enough

    state = folder / "state"
    with pytest.raises(Enough):
        hosts.join(address, authority, folder / "node.key", state / "flower", {"state-dir": str(state)}, tell)
    return said


def test_a_node_says_that_it_waits_connects_and_where_its_log_is(
    files: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    heard = set[str]()
    with contextlib.ExitStack() as late:

        def appear(sentence: str) -> bool:
            if "Connection refused" in sentence:
                late.enter_context(serving(port, files))
            heard.update({sentence.split()[0], sentence.split()[-1]})
            return {"connected", "answers"} <= heard

        said = joined(tmp_path, f"127.0.0.1:{port}", files.authority, "INFO : SuperNode ID: 7", appear, monkeypatch)
    key, connecting, *others = said
    assert key.startswith("created a key for this node")
    assert connecting == f"connecting to 127.0.0.1:{port}; the log of this node is {tmp_path}/state/flower/node.log"
    assert others.count(f"connected to 127.0.0.1:{port}") == 1
    assert [word for word in others if "cannot reach" in word], "told once, although it looked more often"
    assert len(others) == 3


def test_a_false_server_ends_a_node_at_once(
    files: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = server_certificates(tmp_path / "other", ["127.0.0.1"], 1).authority
    with serving(free_port(), files) as address, pytest.raises(DeploymentError, match=r"does not match ca\.crt"):
        joined(tmp_path, address, other, "", lambda _: False, monkeypatch)


def test_a_node_that_ends_says_why_and_where_its_log_is(
    files: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printing = "Failed to activate SuperNode'; exit 1; echo '"
    with serving(free_port(), files) as address:
        said = joined(tmp_path, address, files.authority, printing, lambda word: "trying again" in word, monkeypatch)
    assert "does not accept this node's key" in said[-1]
    assert said[-1].endswith(f"trying again (log: {tmp_path}/state/flower/node.log)")


def test_a_node_says_how_to_export_what_it_has_received(
    files: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointer = tmp_path / "state" / "f00" / "client-3" / "checkpoint" / "current"
    old = tmp_path / "state" / "0ld" / "client-3" / "checkpoint" / "current"
    old.parent.mkdir(parents=True)
    old.write_text("round-9")

    def receive(sentence: str) -> bool:
        if sentence.startswith("connected"):
            pointer.parent.mkdir(parents=True)
            pointer.write_text("round-5")
        return sentence.startswith("received")

    with serving(free_port(), files) as address:
        said = joined(tmp_path, address, files.authority, "SuperNode ID: 7", receive, monkeypatch)
    assert f"fedfactor export {tmp_path}/state/f00/client-3 -o" in said[-1]
    assert "0ld" not in said[-1]
