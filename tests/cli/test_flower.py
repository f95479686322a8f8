"""`fedfactor flower ...`: apps that it writes, and mistakes that it names."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedfactor.cli.flower import app as commands
from fedfactor.cli.main import app
from fedfactor.engines.flower.control import RegisteredNode
from fedfactor.engines.flower.programs import DeploymentError
from tests.helpers.grid import recipe


def test_the_command_writes_an_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(recipe("fedpara").to_toml())
    words = [
        "flower",
        "app",
        "mine.toml",
        "out",
        "--set",
        "train.rounds=7",
        "--config",
        "data=nodes",
        "--config",
        "deadline=9",
    ]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and "flwr run out" in done.stdout
    config = tomllib.loads(Path("out/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config["data"] == "nodes" and config["deadline"] == 9.0
    assert config["run-dir"] == str(tmp_path / "runs" / "flower")
    assert tomllib.loads(config["recipe"])["train"]["rounds"] == 7


def test_of_a_sweep_one_cell_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sweep.toml").write_text(recipe("fedpara").to_toml() + "\n[sweep]\n'train.lr' = [0.1, 0.2]\n")
    done = CliRunner().invoke(app, ["flower", "app", "sweep.toml", "out"])
    assert done.exit_code == 2 and "2 cells of sweep.toml match '*': lr=0.1, lr=0.2" in done.stderr
    CliRunner().invoke(app, ["flower", "app", "sweep.toml", "out", "--only", "*0.2"], catch_exceptions=False)
    config = tomllib.loads(Path("out/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert tomllib.loads(config["recipe"])["train"]["lr"] == 0.2
    assert config["run-dir"] == str(tmp_path / "runs" / "flower" / "lr=0.2")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["status", "--site", "nowhere"], "nowhere/ca.crt does not exist"),
        (["up", "r.toml", "--out", "run"], "give the name or address under which nodes reach this machine"),
        (
            ["up", "r.toml", "--out", "run", "--host", "a", "--listen", "10.0.0.1"],
            "--listen must be 0.0.0.0 or 127.0.0.1",
        ),
        (["join", "a:1", "--client", "0"], r"ca\.crt is not a certificate .*No such file.* copy ca\.crt"),
        (["join", "a", "--client", "0"], "must be HOST:PORT, .* got 'a'"),
        (["join", "a:80000", "--client", "0"], "must be HOST:PORT, .* got 'a:80000'"),
        (["join", "a:1", "--client", "0", "--ca", "garbage.crt"], r"garbage\.crt is not a certificate"),
        (["join", "a:1", "--client", "0", "--config", "capacity=2"], r"capacity must be a share .* got 2"),
        (["join", "a:1", "--client", "0", "--config", "data-options=[1]"], "data-options must be a JSON object"),
        (["join", "a:1", "--client", "0", "--config", 'data-options={"a": }'], "data-options must be a JSON object"),
        (["join", "a:1", "--client", "0", "--config", "data-options.test_share=0.5"], "set `data` too"),
        (
            ["join", "a:1", "--client", "0", "--config", "data=digits", "--config", 'data-options={"shore": 1}'],
            "digits has no option 'shore'",
        ),
        (["join", "a:1", "--client", "0", "--config", "data=diggits"], "did you mean 'digits'"),
        (["join", "a:1", "--client", "0", "--config", "capacty=1"], "a node has no setting 'capacty'; did you mean"),
    ],
)
def test_commands_say_what_is_missing(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("garbage.crt").write_text("garbage")
    with pytest.raises((ValueError, DeploymentError), match=reason):
        CliRunner().invoke(commands, words, catch_exceptions=False)


def test_status_names_nodes_that_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Link:
        def __init__(self, *_: object) -> None:
            pass

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *_: None  # noqa: E731

        def nodes(self) -> list[RegisteredNode]:
            return [RegisteredNode(7, "ward", "online", b"k"), RegisteredNode(8, "clinic", "online", b"l")]

    monkeypatch.setattr("fedfactor.engines.flower.control.Control", Link)
    (tmp_path / "ca.crt").touch()
    clients = {str(i): {"name": "", "key": hashlib.sha256(key).hexdigest()} for i, key in enumerate([b"k", b"l"])}
    (tmp_path / "flower.json").write_text(json.dumps({"clients": clients, "start": {}, "run": "r"}))
    lines = [{"event": "round"}, {"event": "round", "left_out": [1]}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"left_out": [0')
    words = ["flower", "status", "--site", str(tmp_path), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "clients left out because of invalid replies: 1" in done.output.replace("\n", " ")
    assert "1, left out" in done.output and "0, left out" not in done.output
