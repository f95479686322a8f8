"""FedDecomp: its limits, a round by hand, what travels, what is observed, pre-trained sigma."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedfactor
from fedfactor.data.clients import FederatedData
from fedfactor.factor import Additive
from fedfactor.methods import FedDecomp
from fedfactor.models import build
from fedfactor.nn import factor_weights, factorize
from fedfactor.protocol.message import decode
from fedfactor.runs.recipe import RecipeError, resolve
from fedfactor.server.result import Result
from tests.helpers.tiny import Recording, Tiny, run

LAYERS = {"conv1", "conv2", "hidden", "fc"}


def kept(result: Result, client: int) -> dict[str, torch.Tensor]:
    state = result.federation.store.read("client", client)
    return {name.removeprefix("kept/"): tensor for name, tensor in decode(state).tensors.items()} if state else {}


def norm(differences: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(d.double().square().sum()) for d in differences))


def test_without_lora_epochs_it_is_fedavg_to_the_bit() -> None:
    plain, ours = run("fedavg", cohort=6), run(FedDecomp(lora_epochs=0), cohort=6)
    start = run("fedavg", rounds=0).server.tensors
    moved = {name for name, tensor in plain.server.tensors.items() if not torch.equal(tensor, start[name])}
    assert "conv1.weight" in moved and "bn1.running_mean" in moved
    renamed = {name.replace(".sigma", ".weight"): tensor for name, tensor in ours.server.tensors.items()}
    assert renamed.keys() == plain.server.tensors.keys()
    assert all(torch.equal(tensor, renamed[name]) for name, tensor in plain.server.tensors.items())
    assert not any(tensor.any() for name, tensor in kept(ours, 0).items() if name.endswith(".b"))


def test_without_global_epochs_it_is_local_training_of_the_low_rank_part() -> None:
    def without_statistics() -> nn.Module:
        model = Tiny()
        model.bn1, model.bn2 = nn.GroupNorm(1, 8), nn.GroupNorm(1, 16)  # frozen batch norms would keep their statistics
        return model

    def frozen() -> nn.Module:
        model = factorize(without_statistics(), Additive(), keep_weights=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith((".a", ".b")))
        return model

    local = run("local", model=frozen, epochs=2, cohort=6)
    ours = run(FedDecomp(lora_epochs=2), model=without_statistics, epochs=2, cohort=6)
    start = run(FedDecomp(), model=without_statistics, rounds=0).server.tensors
    assert all(torch.equal(tensor, start[name]) for name, tensor in ours.server.tensors.items())
    for client in range(6):
        alone, mine = kept(local, client), kept(ours, client)
        assert {name.rpartition(".")[2] for name in mine} == {"a", "b"}
        assert all(torch.equal(tensor, alone[name]) and tensor.any() for name, tensor in mine.items())


def test_private_factors_start_equal_on_all_clients_and_compose_to_nothing() -> None:
    one, two = (run(FedDecomp(), rounds=0).federation.setup.kept(1.0) for _ in range(2))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert all(bool(tensor.any()) == name.endswith(".a") for name, tensor in one.items())


def test_a_round_of_two_clients_by_hand() -> None:
    """One linear layer of two inputs and two outputs, rank 1, full batches: tau first, then sigma, then the mean.

    In the mean a client of three examples counts like one of one.
    """
    x = torch.tensor([[1.0, 0.5], [-1.0, 2.0], [0.3, 1.0], [2.0, -0.5]])
    y = torch.tensor([0, 1, 1, 0])
    data = FederatedData((x, y), [torch.tensor([0, 1, 2]), torch.tensor([3])])
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    settings = {"rounds": 1, "epochs": 3, "batch_size": 4, "lr": 0.5, "evaluate_clients": "none"}
    result = fedfactor.simulate(model, data, method=FedDecomp(linear=0.5, lora_epochs=1), **settings)
    first = result.federation.setup.kept(1.0)["0.a"]
    trained = []
    for rows in data.train_of:
        sigma = model[0].weight.detach().clone().requires_grad_()
        b, a = torch.zeros(2, 1, requires_grad=True), first.clone().requires_grad_()
        for moving in ([a, b], [sigma], [sigma]):
            loss = nn.functional.cross_entropy(x[rows] @ (sigma + (b @ a).T).T, y[rows])
            for parameter, gradient in zip(moving, torch.autograd.grad(loss, moving), strict=True):
                with torch.no_grad():
                    parameter -= 0.5 * gradient
        trained.append((sigma.detach(), b.detach(), a.detach()))
    torch.testing.assert_close(result.server.tensors["0.sigma"], (trained[0][0] + trained[1][0]) / 2)
    for client in (0, 1):
        torch.testing.assert_close(kept(result, client)["0.b"], trained[client][1])
        torch.testing.assert_close(kept(result, client)["0.a"], trained[client][2])
    assert trained[0][1].any()


@pytest.mark.parametrize(
    ("share", "travels"),
    [("sigma", {"sigma", "bias"}), ("tau", {"a", "b"}), ("both", {"sigma", "a", "b", "bias"}), ("none", set())],
)
def test_what_travels(share: str, travels: set[str]) -> None:
    engine = Recording()
    result = run(FedDecomp(share=share), engine=engine)  # type: ignore[arg-type]
    sent = {name.removeprefix("model/") for message in [*engine.up, *engine.down] for name in decode(message).tensors}
    assert {name.rpartition(".")[2] for name in sent if name.partition(".")[0] in LAYERS} == travels
    assert ("bn1.running_mean" in sent) == (share in ("sigma", "both"))
    setup = result.federation.setup
    assert set(kept(result, result.history[1]["cohort"][0])) == setup.method.private_names(setup.network(1.0))


def test_options_act() -> None:
    options = [{}, {"simultaneous": True}, {"code_rank": True}, {"code_scale": True}, {"linear": 0.2}, {"conv": 0.2}]
    hashes = {run(FedDecomp(**option)).summary["weights_sha256"] for option in options}  # type: ignore[arg-type]
    assert len(hashes) == len(options)


def test_sharing_both_parts_at_once_is_fedavg_on_the_decomposed_network() -> None:
    given = run("fedavg", model=lambda: factorize(Tiny(), Additive(), keep_weights=True))
    assert given.summary["weights_sha256"] == run(FedDecomp(share="both", simultaneous=True)).summary["weights_sha256"]


def test_the_authors_sizes() -> None:
    """With the code's ranks ResNet-8 (.6, 4 of 10) has sigma 1,235,274 and tau 1,826,938; ResNet-10 likewise."""
    for name, classes, conv, sigma, tau in [
        ("resnet8", 10, 0.6, 1_235_274, 1_826_938),
        ("resnet10", 100, 0.8, 4_957_092, 9_374_121),
    ]:
        method = FedDecomp(linear=0.4, conv=conv, code_rank=True)
        network = method.network(
            lambda width, name=name, classes=classes: build(name, classes=classes, stem="imagenet"), 1
        )
        low = sum(p.numel() for n, p in network.named_parameters() if n.endswith((".a", ".b")))
        assert (sum(p.numel() for p in network.parameters()) - low, low) == (sigma, tau)


def test_of_a_transformer_attention_and_classifier_are_decomposed() -> None:
    network = FedDecomp().network(lambda width: build("transformer", vocabulary=50, dim=8, layers=1, hidden=16), 1.0)
    assert set(factor_weights(network)) == {
        "encoder.layers.0.self_attn.in_proj",
        "encoder.layers.0.self_attn.out_proj",
        "fc",
    }


def test_epochs_that_cannot_be_split_are_refused() -> None:
    network = FedDecomp().network(Tiny, 1.0)
    assert [phase.epochs for phase in FedDecomp().phases(network, 5)] == [2, 3]
    assert [phase.epochs for phase in FedDecomp().phases(network, 2)] == [1, 1]
    assert [phase.epochs for phase in FedDecomp(lora_epochs=5).phases(network, 5)] == [5, 0]
    with pytest.raises(ValueError, match=r"a round has fewer than two epochs .*: set two, or lora_epochs"):
        run(FedDecomp(), epochs=1)
    with pytest.raises(RecipeError, match=r"lora_epochs must lie in \[0, 5\].* got 6"):
        resolve(
            {
                "data": {"name": "digits"},
                "model": {"name": "mlp"},
                "method": {"name": "feddecomp", "lora_epochs": 6},
                "train": {"epochs": 5},
            }
        )


def test_a_models_own_parameter_called_a_is_no_factor_but_shared() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.a = nn.Linear(64, 10), nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a * self.fc(x.flatten(1))

    result = run(FedDecomp(), model=Named)
    assert float(result.server.tensors["a"]) != 1.0 and "a" not in result.federation.setup.kept(1.0)


def test_figure_6_and_table_6_are_observed() -> None:
    engine = Recording()
    result = run(FedDecomp(distances=True), engine=engine, cohort=6, evaluate_clients="none")
    seen, network = result.history[-1]["observed"], result.federation.setup.network(1.0)
    weights = [name for name, _ in network.named_parameters() if not name.endswith((".a", ".b"))]
    first, last = run(FedDecomp(), rounds=0).server.tensors, result.server.tensors

    assert seen["sigma_change"] == pytest.approx(norm([last[name] - first[name] for name in weights]))
    replies = [decode(reply).tensors for reply in engine.up[-6:]]
    distances = [norm([reply[f"model/{name}"] - last[name] for name in weights]) for reply in replies]
    assert seen["sigma_distance"] == pytest.approx(sum(distances) / 6)
    assert "sigma_distance" not in run(FedDecomp(), rounds=1).history[-1]["observed"]
    with pytest.raises(ValueError, match="distances compare a shared sigma, but share = 'tau' keeps it private"):
        FedDecomp(distances=True, share="tau")
    assert len(set(distances)) == 6
    taus = []
    for client in range(6):
        mine = kept(result, client)
        taus.append(norm([mine[f"{layer}.b"] @ mine[f"{layer}.a"] for layer in LAYERS]))
    assert seen["tau_change"] == pytest.approx(sum(taus) / 6)
    assert 0 < seen["tau_change"] != result.history[1]["observed"]["tau_change"]


def test_alternating_moves_sigma_less_than_training_at_once() -> None:
    """Figure 6: clients' sigmas differ less when tau is trained first."""
    settings = {"epochs": 4, "cohort": 6, "rounds": 1, "evaluate_clients": "none"}
    apart, once = (run(FedDecomp(simultaneous=at_once, distances=True), **settings) for at_once in (False, True))
    assert apart.history[-1]["observed"]["sigma_distance"] < once.history[-1]["observed"]["sigma_distance"]


def test_sigma_starts_from_pretrained_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    trained, path = Tiny(), tmp_path / "tiny.safetensors"
    save_file(trained.state_dict(), path)
    server = run(FedDecomp(pretrained=str(path)), rounds=0).server.tensors
    given = trained.state_dict()
    assert all(torch.equal(tensor, given[name.replace(".sigma", ".weight")]) for name, tensor in server.items())
    result = run(FedDecomp(pretrained=str(path)), rounds=1)
    moved = [
        result.server.tensors[name] - server[name]
        for name in server
        if name.endswith((".sigma", "bias", "n1.weight", "n2.weight"))
    ]
    assert result.history[-1]["observed"]["sigma_change"] == pytest.approx(norm(moved))
    start = run(FedDecomp(), rounds=0).server.tensors
    parts = run(FedDecomp(pretrained=str(path), fresh=("fc",)), rounds=0).server.tensors
    assert torch.equal(parts["fc.sigma"], start["fc.sigma"]) and not torch.equal(server["fc.sigma"], start["fc.sigma"])
    assert torch.equal(parts["conv1.sigma"], server["conv1.sigma"])


def test_tau_follows_the_runs_seed_beside_pretrained_weights(tmp_path: Path) -> None:
    path = tmp_path / "tiny.safetensors"
    save_file(Tiny().state_dict(), path)
    drawn = run(FedDecomp(share="both"), rounds=0).server.tensors
    for seed in (1, 2):
        torch.manual_seed(seed)  # whatever the program drew before
        server = run(FedDecomp(share="both", pretrained=str(path)), rounds=0).server.tensors
        assert all(
            torch.equal(server[f"{layer}.{factor}"], drawn[f"{layer}.{factor}"]) for layer in LAYERS for factor in "ab"
        )
        assert not torch.equal(server["fc.sigma"], drawn["fc.sigma"])


def test_pretrained_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.safetensors"
    save_file({k: v for k, v in Tiny().state_dict().items() if not k.startswith("fc")}, path)
    with pytest.raises(ValueError, match=r"tiny.safetensors does not fit: .*fc.bias.*`fresh` lists tensors not in it"):
        run(FedDecomp(pretrained=str(path)))
    assert run(FedDecomp(pretrained=str(path), fresh=("fc",)), rounds=0).server.tensors
    save_file({k: v * float("nan") if k == "fc.bias" else v for k, v in Tiny().state_dict().items()}, path)
    with pytest.raises(ValueError, match=r"'fc.bias' is not finite"):
        run(FedDecomp(pretrained=str(path)))
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        run(FedDecomp(pretrained=str(path)))
    with pytest.raises(ValueError, match="there is no file"):
        run(FedDecomp(pretrained=str(tmp_path / "none")))
    with pytest.raises(ValueError, match="share = 'tau' keeps it private"):
        FedDecomp(pretrained="x", share="tau")
