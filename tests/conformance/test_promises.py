"""The promises of the design (docs/architecture.md), for everything that is registered."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedfactor.engines import Done
from fedfactor.factor import Hadamard, LowRank
from fedfactor.methods import FedHM, FedPer, FedRep, HeteroFL
from fedfactor.nn import factorize
from fedfactor.nn.state import weights_sha256
from fedfactor.optimizers import FedProx
from fedfactor.protocol.coding import sections
from fedfactor.protocol.message import Message, decode, encode
from fedfactor.registry import create
from fedfactor.testing import check_method
from fedfactor.testing.federation import Recording, Tampering
from fedfactor.testing.promises import combinations
from tests.helpers.tiny import CODECS, FIELDS, METHODS, OPTIMIZERS, Tiny, odd, run

# Every promise of `fedfactor.testing` for every registered method.


@pytest.mark.parametrize("method", METHODS)
def test_promises(method: str) -> None:
    """In one test, since promises share runs; the error has one line per promise that is broken."""
    check_method(create("methods", method, **FIELDS.get(method, {})))


def test_all_pairs_of_optimizers_and_codecs_are_among_the_combinations() -> None:
    pairs = {(method, *pair) for method in METHODS for pair in combinations(create("methods", method))}
    assert {(m, c) for m, _, c in pairs} == {(m, c) for m in METHODS for c in CODECS}
    assert {(m, o) for m, o, _ in pairs} == {(m, o) for m in METHODS for o in OPTIMIZERS}
    assert {(o, c) for _, o, c in pairs} == {(o, c) for o in OPTIMIZERS for c in CODECS}


# 1. Same seed, same bits.


def test_another_process_with_other_thread_settings_has_the_same_bits() -> None:
    code = "from tests.helpers.tiny import run; print(run('fedpara').summary['weights_sha256'])"
    done = subprocess.run(
        [sys.executable, "-c", f"import torch; torch.set_num_threads(2); {code}"],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == run("fedpara").summary["weights_sha256"]


def test_the_cohort_does_not_depend_on_the_method() -> None:
    cohorts = [[e["cohort"] for e in run(m).history if e["event"] == "round"] for m in ("fedavg", "pfedpara", "fedhm")]
    assert cohorts[0] == cohorts[1] == cohorts[2]


# 3. The reported bytes are the length of what was encoded.


def test_codecs_make_messages_smaller() -> None:
    up = {codec: run(codec=codec, evaluate_clients="none").summary["totals"]["bytes_up"] for codec in CODECS}
    assert up["int8"] < up["float16"] < up["float32"]
    assert up["fedpaq"] == pytest.approx(up["float16"], rel=0.01)
    assert up["topk"] < 0.35 * up["float32"]


# 4. A private tensor never appears in a decoded upload.


PRIVATE = {
    "local",
    "fedper",
    "fedrep",
    "fedbn",
    "lg_fedavg",
    "pfedpara",
    "feddecomp",
    "fedrod",
    "fedcac",
    "pfedgate",
    "fedsa_lora",
}


@pytest.mark.parametrize("method", METHODS)
def test_no_tensor_is_private_by_accident(method: str) -> None:
    setup = run(method, rounds=0).federation.setup
    assert bool(setup.kept(1.0)) == bool(setup.method.private_names(setup.network(1.0))) == (method in PRIVATE)


def test_private_factors_of_pfedpara_and_of_feddecomp() -> None:
    for method, factors in (("pfedpara", {"x2", "y2", "t2"}), ("feddecomp", {"a", "b"})):
        assert {name.rpartition(".")[2] for name in run(method, rounds=0).federation.setup.kept(1.0)} == factors


# 5. The neutral setting of a method is FedAvg.


NEUTRAL = {
    "heterofl": (HeteroFL(scaler=False, static_norm=False), {"capacities": {1.0: 1.0}}),
    "fedhm": (FedHM(), {"capacities": {1.0: 1.0}}),
    "fedper": (FedPer(head=""), {}),
    "fedrep": (FedRep(head="", head_epochs=0), {}),
    "fedprox": ("fedavg", {"optimizer": FedProx(mu=0.0)}),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_setting_is_fedavg(name: str) -> None:
    method, settings = NEUTRAL[name]
    reference, neutral = run("fedavg"), run(method, **settings)
    start = run("fedavg", rounds=0)
    assert weights_sha256(reference.server.tensors) != weights_sha256(start.server.tensors)
    assert weights_sha256(neutral.server.tensors) == weights_sha256(reference.server.tensors)


@pytest.mark.parametrize(
    ("method", "scheme"),
    [("fedpara", Hadamard(gamma=0.1)), ("low_rank", LowRank(ratio=0.2))],
    ids=["fedpara", "low_rank"],
)
def test_a_factorised_method_is_fedavg_on_the_factorised_network(method: str, scheme: Hadamard | LowRank) -> None:
    given = run("fedavg", model=lambda: factorize(Tiny(), scheme))
    assert weights_sha256(given.server.tensors) == run(method).summary["weights_sha256"]


AVERAGED = [m for m in METHODS if m not in ("local", "hetlora") and create("methods", m).traits.space == "slice"]


@pytest.mark.parametrize("method", AVERAGED)
def test_a_mean_is_over_the_clients_of_the_round(method: str) -> None:
    """Clients that sat out do not count, and norm statistics are averaged like everything else."""
    engine = Recording()
    result = run(method, engine=engine, capacities=None, evaluate_clients="none")
    last = [decode(m) for m in engine.up if decode(m).kind == "trained" and decode(m).fields["round"] == 1]
    assert {message.fields["client"] for message in last} == set(result.history[-1]["cohort"])
    server = {name.removesuffix("@1"): tensor for name, tensor in result.server.tensors.items()}  # FLANC's full width
    sent = [sections(message.tensors)["model"] for message in last]
    assert any(name.endswith("bias") for name in sent[0])
    for name in sent[0]:
        mean = torch.stack([tensors[name].double() for tensors in sent]).mean(0)
        torch.testing.assert_close(server[name].double(), mean, rtol=1e-5, atol=1e-6, msg=name)


# 6. A client that dies, lies or is late costs its own update only.


def _upload(done: Done, change: Callable[[Message], Message]) -> Done:
    assert done.reply is not None
    return replace(done, reply=encode(change(decode(done.reply))))


LIES = {
    "nan": (
        lambda d: _upload(d, lambda m: replace(m, tensors={name: t * torch.nan for name, t in m.tensors.items()})),
        "NaN, infinity",
    ),
    "round": (lambda d: _upload(d, lambda m: replace(m, fields={**m.fields, "round": 7})), "expected one of kind"),
    "truncated": (lambda d: replace(d, reply=d.reply[:-5]), "lies at|belong to"),
    "garbage": (lambda d: replace(d, reply=b"\xff" * 100), "does not fit"),
    "dies": (lambda d: replace(d, reply=None, failure="worker killed"), "worker killed"),
    "silent": (lambda d: None, "did not answer"),
}
"""One per way to fail; `protocol/test_validation.py` has all that an upload may lie about."""


def _victim(method: str) -> int:
    return next(e for e in run(method, rounds=1).history if e["event"] == "round")["cohort"][1]


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_costs_only_the_liar(lie: str) -> None:
    change, reason = LIES[lie]
    client = _victim("fedavg")
    without = run(engine=Tampering(client, lambda done: None))
    result = run(engine=Tampering(client, change))
    failures = [f for event in result.history for f in event.get("failures", [])]
    assert failures and all(f["client"] == client for f in failures)
    assert re.search(reason, failures[0]["reason"]), failures[0]["reason"]
    assert result.summary["weights_sha256"] == without.summary["weights_sha256"]
    assert result.summary["totals"]["failures"] == len(failures)


@pytest.mark.parametrize("lie", ["garbage", "round", "silent", "dies"])
def test_lies_in_evaluation_and_calibration_cost_only_the_liar(lie: str) -> None:
    client = _victim("heterofl")
    settings = {"evaluate_clients": "all", "rounds": 1}
    honest = run(HeteroFL(static_norm=True), **settings)
    result = run(HeteroFL(static_norm=True), engine=Tampering(client, LIES[lie][0]), **settings)
    assert result.history[-1]["all"]["clients"] == honest.history[-1]["all"]["clients"] - 1
    assert "1" in result.history[-1]["global"]


# 7. What is deployed computes what was trained.


def test_methods_that_would_silently_be_fedavg_are_refused() -> None:
    plain = torch.nn.Sequential(torch.nn.AvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(16, 10))
    with pytest.raises(ValueError, match="has no layer 'fc' to keep private; its layers are 0, 1, 2"):
        run("fedper", model=plain)
    for method in ("fedpara", "pfedpara"):
        with pytest.raises(ValueError, match=f"{method} finds no layer to factorise.*2: full rank takes"):
            run(method, model=plain)
    with pytest.raises(ValueError, match="needs one class per example, which this binary task does not have"):
        run(HeteroFL(masked_loss=True), kind="binary", data=odd())


@pytest.mark.parametrize("settings", [{"optimizer": "fedadam"}, {"codec": "topk"}, {"codec": "float16"}], ids=str)
def test_tied_weights_stay_tied(settings: dict[str, str]) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
            self.b.weight = self.a.weight
            self.fc = torch.nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.b(self.a(x.flatten(1)).relu()).relu())

    engine = Recording()
    result = run(model=Tied, engine=engine, **settings)
    model = result.model
    assert model.a.weight is model.b.weight
    sent = {name.partition(":")[0] for reply in engine.up for name in decode(reply).tensors}
    assert "model/a.weight" in sent and "model/b.weight" not in sent
