"""The abstract method: hooks that would never be called, defaults by hand, and figures of a round."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedfactor.protocol.context import Context
from fedfactor.protocol.method import (
    RENAMED_HOOKS,
    Diagnostics,
    Method,
    ObservedRound,
    Traits,
    has_global_model,
    split_epochs,
)
from fedfactor.protocol.plan import Reply, whole_plan
from fedfactor.registry import create
from tests.helpers.folding import folded
from tests.helpers.tiny import Tiny, run


@dataclass(frozen=True)
class Watched(Method, Diagnostics):
    """FedAvg that looks at everything there is to see."""

    name = "watched"

    @property
    def traits(self) -> Traits:
        return Traits(reports=("bias",), rereads=True)

    def report(self, network: nn.Module, ctx: Context) -> dict[str, float]:
        return {"bias": float(network.fc.bias.detach().norm())}

    def observe(self, outcome: ObservedRound) -> dict[str, Any]:
        key, first = "fc.bias", outcome.first()
        return {
            "round": outcome.round,
            "moved": float((outcome.after[key] - outcome.before[key]).norm()),
            "since_start": float((outcome.after[key] - first[key]).norm()),
            "sent": [float(reply.tensors[key].norm()) for reply in outcome.replies],
            "reported": [figures["bias"] for figures in outcome.figures],
        }


def test_hooks_of_diagnostics_without_the_mixin_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Blind has hooks of Diagnostics: derive it from Diagnostics too"):
        type("Blind", (Method,), {"observe": lambda self, observed: {}})


@pytest.mark.parametrize(("hook", "instead"), RENAMED_HOOKS.items())
def test_a_removed_hook_is_refused_with_its_replacement(hook: str, instead: str) -> None:
    with pytest.raises(TypeError, match=rf"Old\.{hook}: methods have no such hook any more; use {instead}"):
        type("Old", (Method,), {hook: lambda self, network: None})
    for part in instead.split(" or "):
        assert hasattr(Method, part)


def test_a_hook_that_remembers_all_replies_at_once_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Old\.remember: it gets one reply now, and returns what to store for its cli"):
        type("Old", (Method,), {"remember": lambda self, replies: {}})


def test_replies_are_read_again_only_if_the_method_says_so() -> None:
    class Careless(Watched):
        @property
        def traits(self) -> Traits:
            return Traits(reports=("bias",))

    with pytest.raises(ValueError, match=r"watched: set Traits\.rereads to read the replies of a round in observe"):
        run(Careless(), rounds=1)


def test_epochs_are_split_by_hand() -> None:
    assert split_epochs("head_epochs", 3, 0.5, 5) == (3, 2)
    assert split_epochs("head_epochs", 0, 0.5, 1) == (0, 1)
    assert split_epochs("head_epochs", None, 0.9, 5) == (4, 1)  # at least one epoch per phase
    assert split_epochs("head_epochs", None, 0.1, 5) == (1, 4)
    assert split_epochs("head_epochs", None, 0.5, 0) == (0, 0)
    assert split_epochs("head_epochs", None, 0.4, 2.5) == (1, 1.5)
    with pytest.raises(
        ValueError, match="a round has fewer than two epochs \\(or local_steps\\): set two, or head_epochs = 0 or 1"
    ):
        split_epochs("head_epochs", None, 0.5, 1)
    with pytest.raises(
        ValueError, match=r"head_epochs must lie in \[0, 2\], the epochs \(or local_steps\) of a round, got 3"
    ):
        split_epochs("head_epochs", 3, 0.5, 2)


def test_who_has_a_global_model() -> None:
    found = {name: has_global_model(create("methods", name), Tiny()) for name in ("fedavg", "fedper", "fedamp")}
    assert found == {"fedavg": True, "fedper": False, "fedamp": False}


@pytest.mark.parametrize(("weighting", "mean"), [("samples", 1.0), ("uniform", 2.0)])
def test_the_default_mean_by_hand(weighting: str, mean: float) -> None:
    """Changes 0 and 4 of clients with 3 examples and 1: 1 weighted by examples, 2 weighted equally."""
    method = type("Weighted", (Method,), {"traits": property(lambda self: Traits(weighting=weighting))})()
    server, plan = {"w": torch.full((2,), 10.0)}, whole_plan(["w"])
    replies = [Reply(0, 1.0, 3, plan, server, server, {}), Reply(1, 1.0, 1, plan, server, {"w": server["w"] + 4}, {})]
    found, held = folded(method, server, replies)
    assert found["w"].tolist() == [10 + mean] * 2 and held["w"] == 2


def test_what_a_method_observes_is_in_the_rounds_event() -> None:
    result = run(Watched(), rounds=2)
    start = run(rounds=0).server.tensors["fc.bias"]
    seen = [event["observed"] for event in result.history if event["event"] == "round"]
    assert [entry["round"] for entry in seen] == [1, 2]
    assert seen[0]["moved"] == seen[0]["since_start"] > 0
    assert seen[1]["since_start"] == float((result.server.tensors["fc.bias"] - start).norm()) != seen[1]["moved"]
    assert all(len(entry["sent"]) == 3 and entry["sent"] == entry["reported"] for entry in seen)
    assert json.loads(json.dumps(seen)) == seen


def test_observing_changes_nothing_and_survives_a_resume(tmp_path: Path) -> None:
    run(Watched(), rounds=1, directory=tmp_path)
    resumed, whole = run(Watched(), rounds=2, directory=tmp_path), run(Watched(), rounds=2)
    assert [e.get("observed") for e in resumed.history] == [e.get("observed") for e in whole.history]
    assert run(rounds=2).summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert "observed" not in run(rounds=1).history[-1]
