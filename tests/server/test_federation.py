"""The loop over rounds: what stops it, what it refuses to start or to resume, and what it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedfactor
from fedfactor.data.clients import Examples, FederatedData
from fedfactor.engines import Inline
from fedfactor.optimizers import FedProx
from fedfactor.protocol.engine import Done, Job
from fedfactor.protocol.message import Message, decode, encode
from fedfactor.protocol.setup import Setup
from fedfactor.server.federation import QuorumLost
from fedfactor.server.replies import Diverged, NoValidReply
from fedfactor.testing.federation import Tampering
from tests.helpers.tiny import Tiny, data, run


def test_a_round_that_is_not_finite_is_not_committed(tmp_path: Path) -> None:
    class Exploding(FedProx):
        def step(self, step):  # type: ignore[no-untyped-def]
            return {name: tensor * float("inf") for name, tensor in step.mean.items()}, step.state

    with pytest.raises(Diverged, match=r"round 1: training diverged: the server's .* and client \d sent .* round 0"):
        run(optimizer=Exploding(), directory=tmp_path)
    assert (tmp_path / "checkpoint" / "current").read_text() == "round-0"
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["round"]) == ("diverged", 1) and "is no longer finite" in last["reason"]


def test_statistics_that_are_not_finite_are_told_from_other_failures() -> None:
    def spoilt(change: Callable[[Message], Message]) -> Inline:
        class Spoiling(Inline):
            def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
                for done in super().run(setup, jobs):
                    message = decode(done.reply or b"")
                    bad = encode(change(message)) if message.kind == "calibrated" else done.reply
                    yield replace(done, reply=bad)

        return Spoiling()

    with pytest.raises(Diverged, match="no client sent a valid reply to a job of kind 'calibrate'"):
        run(
            "heterofl",
            engine=spoilt(lambda m: replace(m, tensors={name: t * torch.nan for name, t in m.tensors.items()})),
        )
    with pytest.raises(NoValidReply):
        run("heterofl", engine=spoilt(lambda m: replace(m, tensors={})))


def test_below_the_quorum_the_run_stops_and_keeps_its_last_commit(tmp_path: Path) -> None:
    run(rounds=1, directory=tmp_path)
    clients = [c for e in run(rounds=2).history[2:] for c in e["cohort"]]
    with pytest.raises(QuorumLost, match=r"round 2: 2 of 3 .* quorum is 0.9 .*did not answer.*up to round 1"):
        run(rounds=2, directory=tmp_path, quorum=0.9, engine=Tampering(clients[0], lambda done: None))
    finished = run(rounds=2, directory=tmp_path)
    assert finished.summary["weights_sha256"] == run(rounds=2).summary["weights_sha256"]


def _moved(examples: Examples | None) -> Examples:
    assert examples is not None
    return examples[0] + 1, examples[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 9}, "seed was 5 and is now 9"),
        ({"lr": 0.2}, "lr was 0.05 and is now 0.2"),
        ({"method": "fedpara"}, "method was FedAvg"),
        ({"optimizer": "scaffold"}, "optimizer was FedAvgOptimizer"),
        ({"codec": "int8"}, "codec was Float32"),
        ({"cohort": 4}, "cohort was 3 and is now 4"),
        ({"data": data(even=False)}, "clients was 6"),
        ({"data": replace(data(), train_of=data().train_of[::-1])}, "clients was 6 .split .* and is now 6"),
        ({"data": replace(data(), train=(data().train[0], 9 - data().train[1]))}, "clients was 6 .split .* now 6"),
        ({"data": replace(data(), train=(data().train[0] + 1, data().train[1]))}, "inputs was .* and is now"),
        ({"data": replace(data(), central=_moved(data().central))}, "test data was .* and is now"),
        ({"model": lambda: Tiny(0.5)}, "model was"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_carrying_on_with_other_settings_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    run("fedavg", rounds=1, directory=tmp_path)
    with pytest.raises(ValueError, match=f"started with other settings: .*{message}"):
        run(**{"method": "fedavg", "rounds": 2, "directory": tmp_path, **change})  # type: ignore[arg-type]
    assert run("fedavg", rounds=2, directory=tmp_path).summary["rounds"] == 2


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_training_types(dtype: str) -> None:
    result = run("fedpara", dtype=dtype, rounds=1)
    assert result.summary["totals"]["failures"] == 0
    wanted = torch.float64 if dtype == "float64" else torch.float32  # the server keeps full precision
    assert {t.dtype for t in result.server.tensors.values() if t.is_floating_point()} == {wanted}


@pytest.mark.parametrize("method", ["prism", "orthdrop", "heterofl", "origdrop", "fjord", "flanc", "fedhm"])
def test_capacities_that_change_nothing_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match=r"capacity 0\.5|no (inner )?layer"):
        run(method, model=lambda width=1.0: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), capacities={0.5: 1.0})


def test_a_model_that_cannot_take_the_data_says_so() -> None:
    with pytest.raises(ValueError, match=r"the model cannot process the data, whose inputs are 1 x 8 x 8: .*784"):
        run(model=nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))


def test_events_of_a_run_that_is_resumed(tmp_path: Path) -> None:
    def events(rounds: int) -> list[tuple[str, Any]]:
        heard: list[dict[str, Any]] = []
        run(rounds=rounds, directory=tmp_path, on_event=heard.append)
        assert all(event["of"] == 3 for event in heard if event["event"] == "answered")
        return [(event["event"], event.get("round")) for event in heard]

    start = [("start", None), ("committed", 0)]
    one, two = ([*[("answered", n)] * 3, ("round", n), ("committed", n)] for n in (1, 2))
    assert events(1) == start + one
    assert events(2) == [("resumed", 1), *two]
    assert events(2) == [("resumed", 2)]


def test_totals_are_the_sums_of_the_rounds() -> None:
    result = run(rounds=3, engine=Tampering(0, lambda done: None), cohort=6, quorum=0.5)
    rounds = [event for event in result.history if event["event"] == "round"]
    for key in ("bytes_up", "bytes_down", "macs"):
        assert [event["totals"][key] for event in rounds] == list(accumulate(event[key] for event in rounds))
    assert [event["totals"]["failures"] for event in rounds] == [1, 2, 3]


@pytest.mark.parametrize("quorum", [0.5, 1.0])
def test_the_callers_torch_threads_are_restored(quorum: float) -> None:
    threads: set[int] = set()
    torch.set_num_threads(2)
    try:
        settings = {"cohort": 6, "quorum": quorum, "on_event": lambda event: threads.add(torch.get_num_threads())}
        with nullcontext() if quorum < 1 else pytest.raises(QuorumLost):
            run(engine=Tampering(0, lambda done: None), **settings)
        assert torch.get_num_threads() == 2 and threads == {1}
    finally:
        torch.set_num_threads(1)


X, Y = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
ADVICE = r"Try a smaller learning rate \(lr\), or gradient clipping \(max_grad_norm\), and check the inputs for NaN"


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def test_a_learning_rate_that_is_too_large_is_called_divergence(tmp_path: Path) -> None:
    split = FederatedData((X, Y), list(torch.arange(60).split(20)), (X, Y), list(torch.arange(60).split(20)))
    message = rf"round \d: 0 of 3 clients .* \(client [012].*: training diverged: .*{ADVICE}"
    with pytest.raises(Diverged, match=rf"{message}\)$"):  # nothing is saved without a directory
        fedfactor.simulate(Deep, split, lr=1e6, rounds=5, batch_size=10)
    with pytest.raises(Diverged, match=rf"{message}.*; everything up to round \d is saved"):
        fedfactor.simulate(Deep, split, lr=1e6, rounds=5, batch_size=10, directory=tmp_path)


def test_a_loss_that_is_lost_in_training_is_divergence() -> None:
    """One step from finite weights to finite weights whose outputs are infinite: only the test loss tells."""
    split = FederatedData((X * 1e18, Y), list(torch.arange(60).split(20)), (X * 1e30, Y), [torch.arange(20)] * 3)
    with pytest.raises(Diverged, match=rf"the test loss was finite before the training and is not after it. {ADVICE}"):
        fedfactor.simulate(nn.Linear(4, 3), split, lr=1e-3, rounds=1)


def test_clients_that_diverge_alone_are_named_and_cost_their_own_update() -> None:
    inputs = X.clone()
    inputs[:20] *= 1e30
    result = fedfactor.simulate(nn.Linear(4, 3), FederatedData((inputs, Y), list(torch.arange(60).split(20))), rounds=1)
    (failure,) = result.history[-1]["failures"]
    assert failure["client"] == 0 and failure["reason"].startswith("training diverged: ")
    assert "Try a smaller learning rate" in failure["reason"]
