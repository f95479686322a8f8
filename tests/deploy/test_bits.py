"""The same bits over TLS as in one process; the traffic as we count it, as Flower does, and as the network does."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from fedfactor.runs.flower.app import write_app
from fedfactor.runs.flower.local import Deployment
from tests.helpers.deployment import HASHES, events, finish, inline, listening, recipe

pytestmark = pytest.mark.deploy


def test_the_same_bits_as_in_one_process_of_three_runs_at_once(deployment: Deployment, tmp_path: Path) -> None:
    halves = {"levels": [1.0, 0.5], "shares": [0.5, 0.5]}
    recipes = {
        "fedpara": recipe("fedpara", rounds=3),
        "prism": recipe("prism", rounds=3, capacities=halves),
        "feddecomp": recipe("feddecomp", rounds=3),
    }
    runs = {}
    for method, one in recipes.items():
        runs[method] = deployment.control.start(write_app(one, tmp_path / f"{method}-app", tmp_path / method), {})
    for method, run in runs.items():
        finish(deployment, run)
        found, expected = json.loads((tmp_path / method / "summary.json").read_text()), inline(recipes[method])
        for key in (*HASHES, "bytes_up", "bytes_down", "macs", "failures", "measured"):
            assert found[key] == expected[key], (method, key)
        assert found["failures"] == 0


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
    one = recipe("fedavg", rounds=2, clients=1, model={"name": "tests.helpers.networks:Wide"})
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
