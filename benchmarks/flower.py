"""Seconds per round on a Flower deployment against Flower's own round in which nothing is done, measured in turn.

TLS on loopback, two nodes. Flower starts a process for each message. The process of the empty round imports torch, as a
ClientApp that trains does, and its nodes are Flower's own `flower-supernode`. Ours keep a worker process with torch
loaded. The time of training is subtracted.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import emit, note
from fedfactor.cost import link_seconds
from fedfactor.runs.recipe import resolve
from fedfactor.server.costs import LINKS_MBPS

NODES, ROUNDS, TURNS = 2, 4, 2
"""Nodes, rounds in a turn of each (the first of which is not counted), and turns."""

RECIPE: dict[str, Any] = {
    "name": "resnet18",
    "data": {"name": "digits"},
    "partition": {"kind": "iid", "clients": NODES},
    "model": {"name": "resnet18", "channels": 1},
    "method": {"name": "fedpara", "gamma": 0.1},
    "train": {"rounds": ROUNDS, "cohort": NODES, "local_steps": 5, "batch_size": 64, "lr": 0.01},
    "evaluate": {"every": 0},
}

EMPTY = {
    "pyproject.toml": """
        [project]
        name = "empty"
        version = "1.0.0"
        [tool.flwr.app]
        publisher = "benchmarks"
        [tool.flwr.app.components]
        serverapp = "empty.server_app:app"
        clientapp = "empty.client_app:app"
        [tool.flwr.app.config]
        rounds = 1
        file = ""
    """,
    "empty/__init__.py": "",
    "empty/client_app.py": """
        import torch
        from flwr.app import Message, RecordDict
        from flwr.clientapp import ClientApp
        app = ClientApp()
        @app.train()
        def train(message, context):
            return Message(RecordDict(), reply_to=message)
    """,
    "empty/server_app.py": """
        import json, time
        from pathlib import Path
        from flwr.app import Message, RecordDict
        from flwr.serverapp import ServerApp
        app = ServerApp()
        @app.main()
        def main(grid, context):
            seconds = []
            for number in range(context.run_config["rounds"]):
                nodes = sorted(grid.get_node_ids())
                start = time.perf_counter()
                jobs = [Message(RecordDict(), dst_node_id=n, message_type="train", group_id=str(number)) for n in nodes]
                replies = list(grid.send_and_receive(jobs, timeout=300))
                assert len(replies) == len(nodes) and not any(reply.has_error() for reply in replies)
                seconds.append(time.perf_counter() - start)
            Path(context.run_config["file"]).write_text(json.dumps(seconds))
    """,
}
"""Flower's own loop over a message without content."""


def run() -> None:
    from fedfactor.runs.flower.app import write_app
    from fedfactor.runs.flower.local import Deployment

    recipe = resolve(RECIPE, "benchmarks")
    empty, ours, training = list[float](), list[float](), list[float]()
    with (
        tempfile.TemporaryDirectory() as folder,
        Deployment(Path(folder) / "plain") as plain,
        Deployment(Path(folder) / "flower") as deployment,
    ):
        place = Path(folder)
        for client in range(NODES):
            deployment.join(str(client), {"client": client, "state-dir": str(place / "states")})
            _join_plain(plain, str(client))
        for each in (plain, deployment):
            while sum(node.status == "online" for node in each.control.nodes()) < NODES:
                time.sleep(0.5)
        for path, text in EMPTY.items():
            file = place / "empty" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_plain(text))
        for turn in range(TURNS):
            times = place / f"empty-{turn}.json"
            _finish(plain, place / "empty", {"rounds": ROUNDS, "file": str(times)})
            empty += json.loads(times.read_text())[1:]
            directory = place / f"run-{turn}"
            _finish(deployment, write_app(recipe, place / f"app-{turn}", directory), {})
            events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
            for event in [event for event in events if event["event"] == "round"][1:]:
                ours.append(event["seconds"])
                size = (event["bytes_down"] + event["bytes_up"]) / NODES
                mbps = LINKS_MBPS[-1]
                training.append(event["link_seconds"][f"{mbps}"] - link_seconds(size, mbps, transfers=1))
            note(f"empty {empty}, ours {ours}, training {training}")
    base, whole, trained = (statistics.median(each) for each in (empty, ours, training))
    emit("flower_empty_round_seconds", base, "s per round", "none, for comparison")
    emit("flower_round_seconds", whole, "s per round", "none, for comparison")
    emit("flower_training_seconds", trained, "s per round, slowest client", "none, for comparison")
    emit("flower_round_without_training_over_empty", (whole - trained) / base, "ratio", "<= 0.5")


def _join_plain(deployment: Any, name: str) -> None:
    """Start Flower's own SuperNode with Flower's own pauses and without a worker."""
    from fedfactor.engines.flower.programs import RestartingProgram, free_port, node_command, script

    key, home = deployment.register(name), deployment.home / "nodes" / name
    ours = node_command(deployment.address, deployment.certificates.authority, key, free_port(), {}, home)
    command = [script("flower-supernode"), *ours[ours.index("--superlink") :]]
    extra = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1.0"}
    log = deployment.logs / f"{name}.log"
    deployment.nodes[name] = RestartingProgram(name, lambda: command, home, log, extra)


def _finish(deployment: Any, app: Path, config: dict[str, Any]) -> None:
    """Start a run and wait for its end."""
    started = deployment.control.start(app, config)
    while not (progress := deployment.control.progress(started)).finished:
        time.sleep(0.5)
    if progress.status != "finished:completed":
        raise RuntimeError(f"{app.name}: {progress.status}: {progress.details}; {deployment.superlink.log_tail()}")


def _plain(text: str) -> str:
    import textwrap

    return textwrap.dedent(text).strip() + "\n"
