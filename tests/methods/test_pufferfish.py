"""Pufferfish: a run whose network changes its form."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedfactor import cost
from fedfactor.engines import Pool
from fedfactor.methods import Pufferfish
from fedfactor.nn import compose, factor_weights
from fedfactor.nn.state import fill, tensors_of, weights_sha256
from fedfactor.protocol.coding import sections
from fedfactor.protocol.message import decode
from fedfactor.protocol.plan import Reply, whole_plan
from fedfactor.tables.counting import network, parameters
from tests.helpers.folding import folded
from tests.helpers.measured import Measured
from tests.helpers.tiny import CODECS, OPTIMIZERS, lasting, refusal, run


@pytest.mark.parametrize(("first", "ratio"), [(5, 0.332), (8, 0.441)])
def test_sub_models_have_the_sizes_of_fedparas_table_10(first: int, ratio: float) -> None:
    full = network("vgg16")
    small = Pufferfish(first=first, dense=("classifier",)).network(lambda width: full, 1.0)
    assert parameters(small) / parameters(full) == pytest.approx(ratio, abs=5e-4)


def test_resnet18_has_the_authors_size() -> None:
    """3,336,138 without the stem's norm, which their code lacks: stem, first block, shortcuts and classifier full."""
    small = Pufferfish(first=3).network(lambda width: network("resnet18"), 1.0)
    assert parameters(small) == 3_336_138 + 128


def test_a_weight_is_split_as_by_hand() -> None:
    """[[3, 0], [4, 5]] at rank 1: U sqrt(s) = (.819036, 2.457109), V sqrt(s) = (1.831421, 1.831421), up to a sign."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    server = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(model).items()}
    server |= {"1.weight": torch.tensor([[3.0, 0.0], [4.0, 5.0]]), "1.bias": torch.tensor([7.0, 8.0])}
    split = Pufferfish(ratio=0.5).convert(server, model)
    assert set(split) == {"0.weight", "0.bias", "1.u", "1.v", "1.bias", "2.weight", "2.bias"}
    assert split["1.u"].abs().flatten().tolist() == pytest.approx([0.819036, 2.457109], abs=1e-5)
    assert split["1.v"].abs().flatten().tolist() == pytest.approx([1.831421, 1.831421], abs=1e-5)
    torch.testing.assert_close(split["1.u"] @ split["1.v"], torch.tensor([[1.5, 1.5], [4.5, 4.5]]))
    assert split["1.bias"].tolist() == [7.0, 8.0]


def test_factors_are_averaged_as_they_are() -> None:
    """u of 1 and 4, by 3 examples and 1: a mean of factors, not of products."""
    server = {"u": torch.zeros(1)}
    replies = [
        Reply(0, 1.0, n, whole_plan(server), server, {"u": torch.tensor([x])}, {}) for n, x in ((3, 1.0), (1, 4.0))
    ]
    assert folded(Pufferfish(), server, replies)[0]["u"].tolist() == pytest.approx([1.75])


def test_warm_up_is_fedavg_and_then_the_form_changes() -> None:
    warm = run(Pufferfish(warmup=2), rounds=1)
    assert weights_sha256(warm.server.tensors) == run("fedavg", rounds=1).summary["weights_sha256"]
    full = run("fedavg", rounds=2).server.tensors
    split = run(Pufferfish(warmup=2), rounds=2).server.tensors
    for layer in ("conv2", "hidden"):
        weight = full[f"{layer}.weight"]
        rank = int(0.25 * min(len(weight), weight[0].numel()))
        u, s, vh = torch.linalg.svd(weight.flatten(1), full_matrices=False)
        best = (u[:, :rank] * s[:rank]) @ vh[:rank]
        torch.testing.assert_close(
            split[f"{layer}.u"].flatten(1) @ split[f"{layer}.v"].flatten(1), best, rtol=0, atol=1e-3
        )
        assert f"{layer}.weight" not in split
    for name in ("conv1.weight", "bn2.running_var", "bn1.weight", "fc.weight", "hidden.bias"):
        assert torch.equal(split[name], full[name])


def test_costs_and_the_deployed_model_follow_the_form() -> None:
    result = run(Pufferfish(warmup=1), rounds=2, cohort=6)
    first, second = (event for event in result.history if event["event"] == "round")
    assert second["bytes_down"] < 0.6 * first["bytes_down"] and second["bytes_up"] < 0.6 * first["bytes_up"]
    costs = result.federation.costs
    assert first["macs"] == costs.macs(1.0, 0) * 240 and second["macs"] == costs.macs(1.0, 1) * 240
    assert second["macs"] < first["macs"]
    small = result.federation.setup.network(1.0)
    fill(small, result.server.tensors)
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(result.model.eval()(x), compose(small).eval()(x))
    assert factor_weights(small) and not factor_weights(result.model)
    unfinished = run(Pufferfish(warmup=5), rounds=2)
    assert torch.equal(unfinished.model.conv2.weight, run("fedavg", rounds=2).model.conv2.weight)


def test_a_live_client_holds_no_more_than_the_cost_row_of_its_round_says() -> None:
    setup = run(Pufferfish(warmup=1), rounds=2).federation.setup
    x, y = (part[:10].clone() for part in setup.task.data.of(0))
    rows = []
    for round in (0, 1):
        form = setup.at(round)
        live = form.network(1.0).train()
        rows.append(cost.measure(form.method.network(setup.task.build, 1.0).train(), x))
        assert parameters(live) == rows[-1].parameters
        with Measured(live) as step:
            loss = form.method.objective(live, (x, y), SimpleNamespace(task=setup.task))  # type: ignore[arg-type]
        assert step.trace.saved_bytes <= rows[-1].activation_bytes + 800
        assert step.macs == rows[-1].macs
        loss.backward()
    assert rows[1].parameters < rows[0].parameters and rows[1].macs < rows[0].macs


@pytest.mark.parametrize("optimizer", ["fedadam", "scaffold", "feddyn"])
def test_optimizers_start_anew(optimizer: str) -> None:
    """At the change every tensor of the server's state is as at a start, in the new form."""
    changed = run(Pufferfish(warmup=1), optimizer=optimizer, rounds=1).server
    fresh = run(Pufferfish(), optimizer=optimizer, rounds=0).server
    assert {k: set(v) for k, v in changed.optimizer.items()} == {k: set(v) for k, v in fresh.optimizer.items()}
    for kind, tensors in fresh.optimizer.items():
        assert all(torch.equal(changed.optimizer[kind][name], tensor) for name, tensor in tensors.items())


def test_clients_drop_what_they_kept_of_the_form_before() -> None:
    """Else c would no longer be the mean of all c_i, for good."""
    result = run(Pufferfish(warmup=1), optimizer="scaffold", rounds=2, cohort=4)
    store, c = result.federation.store, result.server.optimizer["c"]
    states = [decode(store.read("client", client) or b"") for client in store.clients("client")]
    late = [sections(state.tensors)["optimizer"] for state in states if state.fields["round"] >= 1]
    assert any(state.fields["round"] == 0 for state in states)  # one who was asked in the first round only
    for name, tensor in c.items():
        torch.testing.assert_close(tensor, sum(state[name] for state in late) / 6, rtol=1e-4, atol=1e-6)
    assert any(tensor.abs().max() > 0 for tensor in c.values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_codec_lives_through_the_change(optimizer: str) -> None:
    for codec in CODECS:
        if not refusal("pufferfish", optimizer, codec):
            settings = {"rounds": 3, "cohort": 4, "evaluate_every": 0, "evaluate_clients": "none"}
            result = run(Pufferfish(warmup=1), optimizer=optimizer, codec=codec, **settings)
            assert result.summary["totals"]["failures"] == 0


def test_the_pool_has_the_same_bits() -> None:
    alone = run(Pufferfish(warmup=1), rounds=3, optimizer="scaffold", codec="topk")
    with Pool(workers=2) as pool:
        pooled = run(Pufferfish(warmup=1), rounds=3, optimizer="scaffold", codec="topk", engine=pool)
    assert lasting(pooled) == lasting(alone)


def test_a_run_may_stop_on_either_side_of_the_change(tmp_path: Path) -> None:
    whole = run(Pufferfish(warmup=2), rounds=4, optimizer="scaffold")
    for rounds in (1, 2, 3, 4):
        parts = run(Pufferfish(warmup=2), rounds=rounds, optimizer="scaffold", directory=tmp_path)
    assert parts.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert parts.summary["private_sha256"] == whole.summary["private_sha256"]


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="warmup must be a whole number, at least 0"):
        Pufferfish(warmup=-1)
    with pytest.raises(ValueError, match="pufferfish finds no layer to factorise"):
        run(Pufferfish(warmup=1), model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
