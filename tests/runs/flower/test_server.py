"""The ServerApp: settings that it refuses, and how it enrols clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedfactor.rng import numpy_rng
from fedfactor.runs.execute import run as run_inline
from fedfactor.server.federation import QuorumLost
from tests.helpers.grid import FIRST_ID, Deployment, outcome, recipe


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run-dir": "runs/x"}, "run-dir must be an absolute path"),
        ({"data": "clouds"}, "data must be one of recipe, nodes"),
        ({"identity": "face"}, "identity must be one of config, key"),
        ({"lost-state": "cry"}, "lost-state must be one of fail, restart"),
        ({"deadline": -1.0}, "deadline must be a positive number of seconds"),
        ({"recipe": "seed = "}, "the run's recipe is not TOML"),
    ],
)
def test_a_run_that_cannot_be_says_why(changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, recipe())
    with pytest.raises(ValueError, match=reason):
        deployed.serve(**changes)


def test_without_a_quorum_the_run_stops_and_can_be_carried_on(tmp_path: Path) -> None:
    chosen = recipe("pfedpara", train={"rounds": 2, "quorum": 0.75})
    deployed = Deployment(tmp_path, chosen, wait=0.1)
    deployed.grid.offline = {FIRST_ID, FIRST_ID + 1}
    with pytest.raises(QuorumLost, match=r"2 of 4 clients connected within 0.1 seconds, the quorum is 0.75"):
        deployed.serve()
    deployed.grid.offline = set()
    assert outcome(deployed.serve()) == outcome(run_inline(chosen))


def test_the_clock_of_a_fleet_is_that_of_the_other_engines(tmp_path: Path) -> None:
    devices = {
        "old": {"profile": "phone-low", "share": 0.5, "failure": 0.3, "mbps_up": 0.3},
        "new": {"profile": "workstation"},
    }
    chosen = recipe("pfedpara", train={"quorum": 0.1}, fleet={"devices": devices, "deadline": 0.3})
    found = outcome(Deployment(tmp_path, chosen).serve())
    assert found == outcome(run_inline(chosen))
    assert sum(event["clock"]["late"] for event in found["events"][1:]) > 0


PRIVATE = {
    "model": {"name": "digits_cnn"},
    "privacy": {"clip": 1.0, "delta": 1e-3, "noise": 1.0},
    "evaluate": {"clients": "none"},
    "train": {"rounds": 2, "cohort": 2},
}


def test_a_deployment_draws_cohorts_and_noise_from_a_secret_seed(tmp_path: Path) -> None:
    chosen = recipe("heterofl", **PRIVATE)
    deployed = Deployment(tmp_path, chosen)
    secret = deployed.run_dir / "checkpoint" / "secret"
    found = deployed.serve()
    assert secret.stat().st_mode & 0o777 == 0o600 and found.summary["privacy"]["seed"] == "secret"
    inline = run_inline(chosen)
    assert found.summary["weights_sha256"] != inline.summary["weights_sha256"]
    written = [path for path in deployed.run_dir.rglob("*") if path.is_file() and path != secret]
    messages = [str(message.content) for message in deployed.grid.pushed]
    assert not any(secret.read_bytes() in path.read_bytes() for path in written)
    assert not any(secret.read_text() in message for message in messages)
    secret.unlink()
    with pytest.raises(ValueError, match="the run's secret seed, is missing or damaged"):
        deployed.serve()


def test_a_deployment_with_the_same_seed_computes_the_same_bits(tmp_path: Path) -> None:
    chosen = recipe("heterofl", **PRIVATE)
    deployed = Deployment(tmp_path, chosen)
    (deployed.run_dir / "checkpoint").mkdir(parents=True)
    (deployed.run_dir / "checkpoint" / "secret").write_text(str(chosen.training.seed))
    assert deployed.serve().summary["weights_sha256"] == run_inline(chosen).summary["weights_sha256"]


def test_a_deployment_goes_on_after_an_empty_cohort(tmp_path: Path) -> None:
    chosen = recipe("heterofl", **PRIVATE)
    deployed, seed = Deployment(tmp_path, chosen), 0
    while (numpy_rng(seed, "cohort", 0).random(4) < 0.5).any():
        seed += 1
    (deployed.run_dir / "checkpoint").mkdir(parents=True)
    (deployed.run_dir / "checkpoint" / "secret").write_text(str(seed))
    first, second = deployed.serve().history[1:]
    assert first["cohort"] == [] and second["round"] == 2


def test_nodes_that_add_the_noise_have_secrets_of_their_own(tmp_path: Path) -> None:
    local = {"clip": 1.0, "delta": 1e-3, "noise": 1.0, "where": "client"}
    deployed = Deployment(tmp_path, recipe(**{**PRIVATE, "privacy": local}))
    deployed.serve()
    secrets = [path for node in tmp_path.glob("node-*") for path in node.rglob("secret")]
    assert len({path.read_text() for path in secrets}) == len(secrets) >= 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in secrets)


def test_a_deployment_refuses_scores_of_clients(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="clients would send their scores without noise"):
        Deployment(tmp_path, recipe(**{**PRIVATE, "evaluate": {"clients": "all"}})).serve()
