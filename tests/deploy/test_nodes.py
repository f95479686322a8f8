"""`flower up` and `flower join` as their users see them: what they say, own data with options, the model at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedfactor.engines.flower.programs import free_port
from fedfactor.protocol.message import read_weights
from tests.helpers.command import fedfactor
from tests.helpers.deployment import command, wait_for

pytestmark = pytest.mark.deploy

RECIPE = """
name = "hospitals"
data = { name = "digits" }
partition = { kind = "iid", clients = 2 }
model = { name = "tests.helpers.tiny:Tiny" }
method = { name = "fedper" }
train = { rounds = 1, cohort = 2, epochs = 1, batch_size = 32, lr = 0.05, quorum = 1.0 }
evaluate = { clients = "all" }
"""


def test_nodes_with_their_own_data_say_what_happens_and_export_their_models(tmp_path: Path) -> None:
    recipe, out, site, port = tmp_path / "recipe.toml", tmp_path / "run", tmp_path / "site", free_port()
    recipe.write_text(RECIPE)
    logs = [tmp_path / f"{client}.log" for client in range(2)]

    def join(client: int, options: str) -> list[str]:
        words = ["flower", "join", f"127.0.0.1:{port}", "--client", str(client), "--ca", str(site / "ca.crt")]
        words += ["--key", str(tmp_path / f"key-{client}"), "--state", str(tmp_path / f"state-{client}")]
        return [*words, "--config", "data=digits", "--config", options]

    serve = ["flower", "up", str(recipe), "--out", str(out), "--site", str(site), "--host", "127.0.0.1"]
    serve += ["--listen", "127.0.0.1", "--port", str(port), "--config", "data=nodes"]
    up = tmp_path / "up.log"
    with command(*serve, log=up):
        wait_for(lambda: (site / "ca.crt").exists(), 400, "the certificates")
    with (  # the server is gone again: the nodes are started first, as they are in hospitals
        command(*join(0, 'data-options={"test_share": 0.8, "split_seed": 3}'), log=logs[0]),
        command(*join(1, "data-options.test_share=0.8"), log=logs[1]),
    ):
        for client, log in enumerate(logs):
            wait_for(lambda log=log: "Connection refused" in log.read_text(), 60, "the reason")
            assert f"the log of this node is {tmp_path}/state-{client}/flower/node.log" in log.read_text()
            (site / "keys" / f"{client}.pub").write_bytes((tmp_path / f"key-{client}.pub").read_bytes())
        with command(*serve, log=up) as server:
            assert server.wait(600) == 0, up.read_text()[-3000:]
        for log in logs:
            wait_for(lambda log=log: "received the last model" in log.read_text(), 60, "the model")
            assert "connected to 127.0.0.1" in log.read_text()
    assert "did not receive" not in up.read_text()
    scores = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["all"]["each"]
    assert scores[0] != scores[1], "each is tested on its own data"
    for client, score in enumerate(scores):
        (directory,) = (tmp_path / f"state-{client}").glob(f"*/client-{client}")
        model = tmp_path / f"{client}.safetensors"
        done = fedfactor("export", str(directory), "-o", str(model))
        assert done.exit_code == 0 and f"accuracy {score:.4f}" in done.stdout, done.output
        assert read_weights(model)
