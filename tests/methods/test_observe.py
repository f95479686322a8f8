"""Figures of a round: what a method sees on the server, and what its clients report."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedfactor.engines import Done
from fedfactor.methods import Diagnostics, Method, ObservedRound, Traits
from fedfactor.protocol.context import Context
from fedfactor.protocol.message import Message, decode, encode
from tests.helpers.tiny import Tampering, run


@dataclass(frozen=True)
class Watched(Method, Diagnostics):
    """FedAvg that looks at everything there is to see."""

    name = "watched"

    @property
    def traits(self) -> Traits:
        return Traits(reports=("bias",))

    def report(self, network: nn.Module, ctx: Context) -> dict[str, float]:
        return {"bias": float(network.fc.bias.detach().norm())}

    def observe(self, outcome: ObservedRound) -> dict[str, Any]:
        key, first = "fc.bias", outcome.first()
        return {
            "round": outcome.round,
            "moved": float((outcome.after[key] - outcome.before[key]).norm()),
            "since_start": float((outcome.after[key] - first[key]).norm()),
            "sent": [float(reply.tensors[key].norm()) for reply in outcome.replies],
            "reported": [reply.figures["bias"] for reply in outcome.replies],
        }


def test_a_hook_that_nothing_would_call_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Blind has hooks of Diagnostics: derive it from Diagnostics too"):
        type("Blind", (Method,), {"observe": lambda self, observed: {}})
    with pytest.raises(TypeError, match=r"Old\.private: methods have no such hook any more; use private_names"):
        type("Old", (Method,), {"private": lambda self, name: True})


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


@pytest.mark.parametrize(
    "figures", [{}, {"bias": 1.0, "more": 1.0}, {"bias": float("nan")}, {"bias": "x"}, [1.0], {"bias": True}], ids=str
)
def test_reports_that_cannot_be_cost_only_the_liar(figures: object) -> None:
    client = next(e for e in run(rounds=1).history if e["event"] == "round")["cohort"][1]

    def lie(done: Done) -> Done:
        message = decode(done.reply or b"")
        return replace(
            done, reply=encode(Message(message.kind, {**message.fields, "figures": figures}, message.tensors))
        )

    result = run(Watched(), engine=Tampering(client, lie), rounds=1)
    assert [f["client"] for f in result.history[-1]["failures"]] == [client]
    assert "finite numbers named bias" in result.history[-1]["failures"][0]["reason"]
    assert len(result.history[-1]["observed"]["sent"]) == 2
    assert all(torch.isfinite(t).all() for t in result.server.tensors.values())


def test_figures_nobody_asked_for_are_refused() -> None:
    def chat(done: Done) -> Done:
        message = decode(done.reply or b"")
        return replace(
            done, reply=encode(Message(message.kind, {**message.fields, "figures": {"x": 1.0}}, message.tensors))
        )

    client = next(e for e in run(rounds=1).history if e["event"] == "round")["cohort"][0]
    result = run(engine=Tampering(client, chat), rounds=1)
    assert [f["client"] for f in result.history[-1]["failures"]] == [client]
