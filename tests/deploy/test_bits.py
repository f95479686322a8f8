"""The same bits over TLS as in one process; the traffic as we count it, as Flower does, and as the network does."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from fedfactor.flower.app import write_app
from fedfactor.flower.local import Deployment, run_local
from tests.deploy.running import HASHES, events, finish, inline, listening, own_processes, recipe

pytestmark = pytest.mark.deploy


@pytest.mark.parametrize("method", ["fedpara", "prism", "feddecomp"])
def test_the_same_bits_as_in_one_process(method: str, deployment: Deployment, tmp_path: Path) -> None:
    levels = {"levels": [1.0, 0.5], "shares": [0.5, 0.5]} if method == "prism" else {}
    one = recipe(method, rounds=3, **({"capacities": levels} if levels else {}))
    run = deployment.control.start(write_app(one, tmp_path / "app", tmp_path / "run"), {})
    finish(deployment, run)
    found, expected = json.loads((tmp_path / "run" / "summary.json").read_text()), inline(one)
    assert {key: found[key] for key in HASHES} == {key: expected[key] for key in HASHES}
    for key in ("bytes_up", "bytes_down", "macs", "failures", "measured"):
        assert found[key] == expected[key], key
    assert found["failures"] == 0


def test_flower_local_runs_a_recipe_and_leaves_nothing_behind(tmp_path: Path) -> None:
    one, told, before = recipe("feddecomp", rounds=2, clients=2), [], own_processes()
    found = run_local(one, tmp_path / "run", on_event=told.append)
    assert {key: found[key] for key in HASHES} == {key: inline(one)[key] for key in HASHES}
    assert [event["event"] for event in told] == ["start", "committed", "round", "committed", "round", "committed"]
    assert own_processes() <= before
    assert not (tmp_path / "run" / "flower").exists()


class CountingProxy:
    """Passes connections on to a port and counts the bytes of each direction."""

    def __init__(self, target: int) -> None:
        self.target, self.up, self.down = target, 0, 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return  # closed
            far = socket.create_connection(("127.0.0.1", self.target))
            self._ends += [near, far]
            threading.Thread(target=self._pass, args=(near, far, "up"), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, "down"), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    setattr(self, direction, getattr(self, direction) + len(data))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return  # one end is gone

    def close(self) -> None:
        for end in (self._server, *self._ends):
            end.close()


def test_three_ways_to_count_bytes_agree(tmp_path: Path) -> None:
    # 1,015,350 weights: a little more than 4 MB in each direction and round.
    one = recipe("fedavg", rounds=2, clients=1, model={"name": "tests.deploy.models:Wide"})
    with Deployment(tmp_path / "flower") as deployment:
        proxy, straight = CountingProxy(deployment.port), deployment.port
        try:
            run = deployment.control.start(write_app(one, tmp_path / "app", tmp_path / "run"), {})
            key = deployment.register("0")
            deployment.port = proxy.port  # where the node goes
            deployment.join("0", {"client": 0, "state-dir": str(tmp_path / "states")}, key)
            deployment.port = straight
            flowers = finish(deployment, run)
        finally:
            proxy.close()
    first, last = events(tmp_path / "run")
    assert first["bytes_down"] > 4_000_000
    for direction, ours, theirs, seen in [
        ("down", last["totals"]["bytes_down"], flowers.bytes_down, proxy.down),
        ("up", last["totals"]["bytes_up"], flowers.bytes_up, proxy.up),
    ]:
        print(f"{direction}: ours {ours}, Flower's {theirs}, the proxy's {seen}")
        assert abs(theirs - ours) / ours < 0.02, (direction, ours, theirs)
        assert abs(seen - ours) / ours < 0.02, (direction, ours, seen)
    assert not listening(straight)
