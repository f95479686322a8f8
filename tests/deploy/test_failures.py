"""Nodes that are killed, strangers, liars, sleepers; a SuperLink and a server that are killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from fedfactor.engines.flower.certificates import server_certificates
from fedfactor.engines.flower.programs import RestartingProgram, free_port
from fedfactor.runs.flower.app import write_app
from fedfactor.runs.flower.local import Deployment, committed
from tests.helpers.deployment import (
    HASHES,
    command,
    events,
    finish,
    inline,
    lying,
    own_processes,
    process_named,
    processes_about,
    recipe,
    wait_for,
)

pytestmark = pytest.mark.deploy


def test_liars_and_sleepers_cost_their_own_updates(tmp_path: Path) -> None:
    liars = {1: "nan", 2: "shape", 3: "foreign", 4: "garbage", 5: "sleep", 6: "large"}
    one = recipe(
        "fedpara", rounds=1, clients=7, train={"rounds": 1, "cohort": 7, "batch_size": 32, "lr": 0.05, "quorum": 0.1}
    )
    with Deployment(tmp_path / "flower") as deployment:
        app = write_app(one, tmp_path / "app", tmp_path / "run", config={"deadline": 60.0})
        run = deployment.control.start(app, {})
        deployment.join("0", {"client": 0, "state-dir": str(tmp_path / "states")})
        for client, behaviour in liars.items():
            with lying(behaviour, seconds=3600):
                deployment.join(str(client), {"client": client, "state-dir": str(tmp_path / "states")})
        finish(deployment, run)
        assert deployment.superlink is not None
        assert '"POST /v1/fleet/push-messages HTTP/1.1" 413' in deployment.superlink.output()
        large = (deployment.logs / "node-6.log").read_text()
    assert "the answer has 19 pieces, the message allows 6" in large or "413" in large, large[-2000:]
    (event,) = events(tmp_path / "run")
    reasons = {failure["client"]: failure["reason"] for failure in event["failures"]}
    assert sorted(reasons) == sorted(liars)
    assert "holds NaN" in reasons[1]
    assert "expected torch.float32 [" in reasons[2]
    assert "got a reply of kind" in reasons[3]
    assert "header" in reasons[4]
    assert reasons[5] == "did not answer within 60 seconds"
    assert reasons[6].startswith("the SuperLink refused the answer: the answer has ")
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["weights_sha256"] == inline(one, without=liars)["weights_sha256"]


def test_a_node_killed_in_the_middle_of_a_round_comes_back_with_its_private_state(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 7
    monkeypatch.setattr(RestartingProgram, "LONGEST", 5.0)  # it is refused until Flower takes it for gone: a minute
    one = recipe("feddecomp", rounds=rounds)
    directory = tmp_path / "run"
    run = deployment.control.start(write_app(one, tmp_path / "app", directory), {})
    wait_for(lambda: len(events(directory)) >= 1, 400, "a round")
    node = deployment.nodes["1"]
    starts = node.starts
    assert node.program is not None
    # In the middle: its ClientApp is at work.
    supervisor = node.program.supervisor
    wait_for(lambda: _runs("flwr-clientapp", supervisor), 400, "the next job")
    os.kill(process_named("supernode.py", supervisor), signal.SIGKILL)
    finish(deployment, run, 900)
    assert node.starts > starts
    done = events(directory)
    assert any(failure["client"] == 1 for event in done for failure in event["failures"]), "it should be named"
    assert len(done) == rounds
    assert not done[-1]["failures"], done[-1]["failures"]  # it is back, and what it builds on is there
    states = deployment.home.parent / "states" / "1"
    name = json.loads((directory / "flower.json").read_text())["run"]
    assert list((states / name / "client-1").glob(f"{rounds}.*"))


def _runs(name: str, of: int) -> bool:
    try:
        process_named(name, of)
    except AssertionError:
        return False
    return True


RECIPE = """
name = "digits"
seed = 5
data = { name = "digits", test_share = 0.5 }
partition = { kind = "iid", clients = 2 }
model = { name = "tests.helpers.tiny:Tiny" }
method = { name = "feddecomp" }
train = { rounds = ROUNDS, cohort = 2, epochs = 2, batch_size = 32, lr = 0.05, quorum = 1.0 }
evaluate = { every = ROUNDS, clients = "none" }
"""


def test_a_killed_superlink_serverapp_or_server_carries_on(tmp_path: Path) -> None:
    rounds = 5
    recipe_file, out, site, port = tmp_path / "digits.toml", tmp_path / "run", tmp_path / "site", str(free_port())
    recipe_file.write_text(RECIPE.replace("ROUNDS", str(rounds)))
    before = own_processes()
    serve = ["flower", "up", str(recipe_file), "--out", str(out), "--site", str(site), "--host", "127.0.0.1"]
    serve += ["--listen", "127.0.0.1", "--port", port]

    def join(client: int) -> list[str]:
        words = ["flower", "join", f"127.0.0.1:{port}", "--client", str(client), "--ca", str(site / "ca.crt")]
        return [*words, "--key", str(tmp_path / f"key-{client}"), "--state", str(tmp_path / f"state-{client}")]

    log = tmp_path / "up.log"
    with command(*serve, log=log) as server:
        wait_for(lambda: (site / "ca.crt").exists(), 400, "the certificates")
        with command(*join(0), log=tmp_path / "0.log"), command(*join(1), log=tmp_path / "1.log"):
            for client in range(2):
                public = tmp_path / f"key-{client}.pub"
                wait_for(public.exists, 400, "a node's key")
                (site / "keys" / f"{client}.pub").write_bytes(public.read_bytes())
            wait_for(lambda: committed(out) >= 1, 400, "the first round")
            _kill_below(server.pid, "superlink.py")
            wait_for(lambda: committed(out) >= 2, 400, "a round after the SuperLink was killed")
            _kill_below(server.pid, "flwr-serverapp")
            wait_for(lambda: committed(out) >= 3, 400, "a round after the ServerApp was killed")
            server.kill()
            server.wait()
            assert committed(out) < rounds
            with command(*serve, log=log) as again:
                assert again.wait(900) == 0, log.read_text()[-3000:]
    found = json.loads((out / "summary.json").read_text())
    from fedfactor.runs.recipe import read, resolve

    expected = inline(resolve(read(recipe_file)))
    assert {key: found[key] for key in HASHES} == {key: expected[key] for key in HASHES}, log.read_text()[-3000:]
    assert own_processes() <= before


def _kill_below(process: int, name: str) -> None:
    os.kill(process_named(name, process), signal.SIGKILL)


def test_flower_local_leaves_nothing_after_ctrl_c_sigterm_or_sigkill_and_carries_on(tmp_path: Path) -> None:
    recipe_file, out, log = tmp_path / "digits.toml", tmp_path / "run", tmp_path / "log"
    recipe_file.write_text(RECIPE.replace("ROUNDS", "3"))
    words = ["run", str(recipe_file), "--engine", "flower-local", "--out", str(out), "--resume"]
    for number, code in [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)]:
        rounds = committed(out)
        with command(*words, log=log) as process:
            ready = (
                (lambda rounds=rounds: committed(out) > rounds)
                if number == signal.SIGINT
                else (out / "flower" / "keys" / "1").exists
            )
            wait_for(ready, 400, f"what {number.name} will stop")
            process.send_signal(number)  # Ctrl-C stops at the next commit
            assert process.wait(400) == code, log.read_text()[-3000:]
        wait_for(lambda: not processes_about(out), 60, f"the end of all processes after {number.name}")
        assert (out / "flower").exists() == (number == signal.SIGKILL)
        assert not (out / "summary.json").exists()
    with command(*words, log=log) as process:
        assert process.wait(900) == 0, log.read_text()[-3000:]
    assert not (out / "flower").exists()
    from fedfactor.runs.recipe import read, resolve

    found, expected = json.loads((out / "summary.json").read_text()), inline(resolve(read(recipe_file)))
    assert {key: found[key] for key in HASHES} == {key: expected[key] for key in HASHES}


def test_a_stranger_and_a_false_server_are_refused_in_words(deployment: Deployment, tmp_path: Path) -> None:
    assert deployment.certificates is not None
    false = server_certificates(tmp_path / "false", ["127.0.0.1"], 1)

    def join(authority: Path) -> list[str]:
        words = ["flower", "join", deployment.address, "--client", "4", "--ca", str(authority)]
        return [*words, "--key", str(tmp_path / "key"), "--state", str(tmp_path / "state")]

    def status() -> str:
        return next((node.status for node in deployment.control.nodes() if node.name == "stranger"), "none")

    log = tmp_path / "false.log"
    with command(*join(false.authority), log=log) as process:
        assert process.wait(400) == 2
    assert "does not match ca.crt" in log.read_text()
    log = tmp_path / "stranger.log"
    with command(*join(deployment.certificates.authority), log=log) as process:
        wait_for(lambda: "does not accept this node's key" in log.read_text(), 400, "the refusal")
        assert process.poll() is None  # it tries again
        deployment.control.register(tmp_path / "key.pub", "stranger")
        wait_for(lambda: status() == "online", 400, "the node")
        process.terminate()
        assert process.wait(60) == 0
    assert status() == "offline", "it took its leave"
