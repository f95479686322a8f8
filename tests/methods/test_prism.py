"""PriSM against its paper: sub-models, sampling, Eq. 5."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedfactor import models
from fedfactor.cost import measure
from fedfactor.data.clients import FederatedData
from fedfactor.factor import effective_rank
from fedfactor.methods import OrthDrop, Participant, PriSM
from fedfactor.nn import factor_weights
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.plan import Piece, Reply, pull
from fedfactor.rng import torch_rng
from fedfactor.runs.tasks import model_factory
from tests.helpers.folding import folded
from tests.helpers.networks import Text
from tests.helpers.tiny import Tiny, decaying, run


def resnet(width: float) -> nn.Module:
    return models.build("resnet18", width=width, scale_stem=False, shortcut="slice")


@pytest.mark.parametrize(("keep", "count"), [(0.8, 7_951_219), (0.6, 4_490_031), (0.4, 2_001_817), (0.2, 509_800)])
def test_sub_models_are_really_small(keep: float, count: int) -> None:
    """Table 1 with whole ranks: what `fedfactor tables` notes beside the paper's real-valued r."""
    network = PriSM().network(resnet, keep)
    split = factor_weights(network)
    assert len(split) == 16
    assert sum(f.numel() for w in split.values() for f in w.factors.values()) == count
    outputs = {
        name: len(module.weight) for name, module in network.named_modules() if isinstance(module, nn.BatchNorm2d)
    }
    assert outputs["layer4.1.bn2"] == -(-512 * keep // 1) and outputs["bn1"] == 64


def test_o2_puts_out_twice_as_many_channels() -> None:
    network = PriSM(outputs=2).network(resnet, 0.2)
    conv = factor_weights(network)["layer3.1.conv2"]
    assert conv.factors["u"].shape[:2] == (104, 52) and conv.factors["v"].shape[:2] == (52, 104)
    wide = factor_weights(PriSM(outputs=2).network(resnet, 0.8))["layer3.1.conv2"]
    assert wide.factors["u"].shape[:2] == (256, 205)


def test_o2_in_a_recipe_counts_channels_too() -> None:
    build = model_factory({"name": "resnet18", "width": 1.0, "scale_stem": False, "shortcut": "slice"}, 10)
    conv = factor_weights(PriSM(outputs=2).network(build, 0.2))["layer3.1.conv2"]
    assert conv.factors["u"].shape[:2] == (104, 52)  # ceil(0.4 x 256) would be 103


def test_a_sub_model_costs_less_when_it_runs() -> None:
    x = torch.randn(2, 3, 32, 32)
    full, small = (measure(PriSM().network(resnet, keep), x) for keep in (1.0, 0.2))
    assert small.macs < 0.08 * full.macs and small.activations < 0.4 * full.activations


def test_a_recurrent_sub_model_is_cut_within_its_gates() -> None:
    def build(width: float) -> nn.Module:
        return models.build("lstm_imdb", width=width, hidden=8, embedding=6, layers=1, tokens=11)

    method = PriSM()
    networks = {keep: method.network(build, keep) for keep in (1.0, 0.5)}
    server = method.initial(networks.__getitem__)
    view = method.prepare(server, networks, training=True)
    plan = method.plan(view, Participant(0, 0.5, 0), networks[0.5], torch.Generator().manual_seed(3))
    rows = [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27]
    assert plan["lstm.weight_hh_l0.u"].index[0].tolist() == plan["lstm.bias_ih_l0"].index[0].tolist() == rows
    down = pull(view, plan)
    assert down["lstm.weight_hh_l0.u"].shape == (16, 4) and down["lstm.weight_hh_l0.v"].shape == (4, 4)
    assert down["lstm.weight_ih_l0.u"].shape == (16, 3) and down["lstm.weight_ih_l0.v"].shape == (3, 6)
    method.load(networks[0.5], down, {}, training=True)
    assert networks[0.5](torch.randint(11, (2, 5))).shape == (2, 1)


SIGMA = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.5])


def test_the_first_kernel_is_drawn_by_eq_2() -> None:
    rng, draws = torch.Generator().manual_seed(0), 4000
    first = [int(PriSM(kappa=1.5).drawn(SIGMA, 2, Participant(0, 0.5, 0), rng)[0]) for _ in range(draws)]
    p = SIGMA**1.5 / (SIGMA**1.5).sum()
    counts = np.bincount(first, minlength=5)
    chi_square = float((((torch.from_numpy(counts) - draws * p) ** 2) / (draws * p)).sum())
    assert chi_square < 13.28  # 99 % of chi-square with 4 degrees of freedom


def test_kernels_are_included_as_often_as_by_drawing_one_after_another() -> None:
    rng, draws, simulated = torch.Generator().manual_seed(1), 6000, np.zeros(5)
    counts = np.zeros(5)
    for _ in range(draws):
        counts[PriSM(kappa=2.0).drawn(SIGMA, 3, Participant(0, 0.5, 0), rng).numpy()] += 1
    source = np.random.default_rng(7)
    for _ in range(draws):
        left, p = list(range(5)), SIGMA.numpy().astype(float) ** 2
        for _ in range(3):
            i = source.choice(len(left), p=p[left] / p[left].sum())
            simulated[left.pop(i)] += 1
    assert counts.sum() == 3 * draws
    # A frequency over 6000 draws has a standard error of at most 0.0065, the difference of two 0.0091.
    assert np.abs(counts - simulated).max() / draws < 3.3 * 0.0091


def test_small_clients_sample_more_sharply_and_dead_kernels_come_last() -> None:
    rng = torch.Generator().manual_seed(2)
    small = sum(int(PriSM().drawn(SIGMA, 1, Participant(0, 0.2, 0), rng)[0]) == 0 for _ in range(600))
    large = sum(int(PriSM().drawn(SIGMA, 1, Participant(0, 0.4, 0), rng)[0]) == 0 for _ in range(600))
    assert small > large + 40
    sigma = torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert set(PriSM().drawn(sigma, 2, Participant(0, 0.4, 0), rng).tolist()) == {0, 2}
    assert len(set(PriSM().drawn(sigma, 3, Participant(0, 0.4, 0), rng).tolist())) == 3


def test_layers_and_clients_draw_independently_and_orthdrop_never() -> None:
    network, method = PriSM().network(Tiny, 0.5), PriSM(kappa=0.5)
    server = method.initial(lambda _: method.network(Tiny, 1.0))
    view = method.prepare(server, {0.5: network}, training=True)

    def kernels(method: PriSM, seed: int) -> list[list[int]]:
        plan = method.plan(view, Participant(seed, 0.5, 0), network, torch.Generator().manual_seed(seed))
        assert plan["conv2.u"].index[1] is plan["conv2.v"].index[0]
        return [plan[f"{layer}.v"].index[0].tolist() for layer in ("conv2", "hidden")]

    # Which kernels one layer has says nothing about which another has: inclusions together are products.
    draws = 600
    has = [torch.zeros(draws, count) for count in (16, 32)]
    for client in range(draws):
        for layer, picked in zip(has, kernels(method, client), strict=True):
            layer[client, picked] = 1.0
    alone, together = [layer.mean(0) for layer in has], has[0].T @ has[1] / draws
    error = (alone[0] * (1 - alone[0])).sqrt().outer((alone[1] * (1 - alone[1])).sqrt()) / draws**0.5
    assert ((together - alone[0].outer(alone[1])).abs() <= 4.2 * error).all()  # 512 pairs: 1 in 70 by chance; seeded
    assert kernels(OrthDrop(), 1) == kernels(OrthDrop(), 2) == [list(range(8)), list(range(16))]
    # Where a model is used, not trained, nothing is drawn: its channels' own kernels, as many as are trained.
    used, whole = method.prepare(server, {0.5: network}, training=False), Participant(0, 0.5, 0)
    assert pull(used, method.plan(used, whole, network, None))["conv2.v"].shape[0] == 8


class Two(nn.Module):
    """A 2 x 2 inner layer and a classifier."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        self.a, self.fc = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.a(x))


def test_eq_5_by_hand() -> None:
    """Kernel 0: two holders, of one and of two outputs. Kernel 1: nobody."""
    method, network = PriSM(), PriSM().network(Two, 1.0)
    server = {"a.weight": torch.diag(torch.tensor([4.0, 1.0])), "fc.weight": torch.zeros(1, 2)}
    view = {**server, "a.u": torch.diag(torch.tensor([2.0, 1.0])), "a.v": torch.diag(torch.tensor([2.0, 1.0]))}

    def reply(client: int, outputs: int, u: list[list[float]], v: list[list[float]], fc: list[float]) -> Reply:
        kernel = torch.tensor([0])
        plan = {
            "a.u": Piece("a.u", (outputs, kernel)),
            "a.v": Piece("a.v", (kernel, None)),
            "fc.weight": Piece("fc.weight", (None, outputs)),
        }
        tensors = {"a.u": torch.tensor(u), "a.v": torch.tensor(v), "fc.weight": torch.tensor([fc])}
        # The second client has far more data: it counts the same.
        return Reply(client, 0.5, 10 if client == 0 else 1000, plan, pull(view, plan), tensors, {})

    replies = [reply(0, 1, [[3.0]], [[2.0, 1.0]], [1.0]), reply(1, 2, [[4.0], [2.0]], [[4.0, 0.0]], [3.0, 5.0])]
    mean, _ = folded(method, server, replies, lambda _: network, view)
    # u_0 = ((3 + 4) / 2, 2), v_0 = (3, .5), and the kernel nobody had: (0, 1) (0, 1)^T.
    expected = torch.tensor([[3.5 * 3, 3.5 * 0.5], [2 * 3, 2 * 0.5 + 1]])
    torch.testing.assert_close(mean["a.weight"], expected)
    torch.testing.assert_close(mean["fc.weight"], torch.tensor([[2.0, 5.0]]))
    nobody, held = folded(method, server, replies[:0], lambda _: network, view)
    assert torch.equal(nobody["a.weight"], server["a.weight"]) and held["a.weight"] == 0


def test_frobenius_decay_takes_weight_decay_s_place() -> None:
    network = PriSM().network(Tiny, 0.5)
    decays = decaying(PriSM(), network)
    assert not decays["conv2.u"] and decays["conv1.weight"]
    assert decaying(PriSM(frobenius=False), network)["conv2.u"]
    weights = {f: run(PriSM(frobenius=f), weight_decay=0.1).summary["weights_sha256"] for f in (True, False)}
    assert weights[True] != weights[False]


def test_ranks_and_picks_are_logged() -> None:
    result = run("prism", capacities={0.5: 1.0})
    observed = result.history[-1]["observed"]
    before, who = run("prism", capacities={0.5: 1.0}, rounds=1), result.history[-1]["cohort"]
    method, networks = result.federation.setup.method, {0.5: result.federation.setup.network(0.5)}
    view, picks = method.prepare(before.server.tensors, networks, training=True), [0] * 16
    for client in who:
        rng = torch_rng(result.federation.setup.training.seed, "plan", 1, client)
        for kernel in method.plan(view, Participant(client, 0.5, 1), networks[0.5], rng)["conv2.v"].index[0].tolist():
            picks[kernel] += 1
    assert len(who) == 3 and observed["picks"]["conv2"] == picks
    p = torch.linalg.svdvals(before.server.tensors["conv2.weight"].flatten(1))
    entropy = -(p / p.sum() * (p / p.sum()).log()).sum()
    assert observed["effective_rank"]["conv2"] == pytest.approx(float(entropy.exp()), rel=1e-3)
    assert effective_rank(torch.ones(7)) == pytest.approx(7) and effective_rank(torch.tensor([3.0, 0.0])) == 1


def test_the_server_s_full_model_is_measured_and_smaller_ones_are_its_first_channels() -> None:
    result = run("prism", capacities={0.5: 1.0})
    assert list(result.history[-1]["global"]) == ["1", "0.5"]
    small, full = tensors_of(result.model_at(0.5))["conv2.weight"], result.server.tensors["conv2.weight"]
    torch.testing.assert_close(small, full[:8, :4], rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in result.model_at(0.5).parameters()) < sum(
        p.numel() for p in result.model_at(1.0).parameters()
    )
    assert tensors_of(result.model_at(1.0))["conv2.weight"].equal(result.server.silenced()["conv2.weight"])


def test_a_model_whose_width_changes_its_layers_is_refused() -> None:
    def build(width: float = 1.0) -> nn.Module:
        return models.build("resnet8", width=width, scale_stem=False)

    images = (torch.randn(6, 3, 8, 8), torch.arange(6))
    data = FederatedData(images, [torch.arange(6)], images)
    with pytest.raises(ValueError, match=r"has 'layer1.0.downsample.0.weight', which the full one lacks.*shortcut"):
        run("prism", model=build, data=data, cohort=1, capacities={0.5: 1.0})


def test_a_recurrent_network_trains_within_its_gates() -> None:
    result, start = (run("prism", model=Text, capacities={0.5: 1.0}, rounds=n) for n in (1, 0))
    moved = result.server.tensors["lstm.bias_hh_l0"] != start.server.tensors["lstm.bias_hh_l0"]
    assert moved.view(4, 8).tolist() == [[True] * 4 + [False] * 4] * 4
    assert not torch.equal(result.server.tensors["lstm.weight_hh_l0"], start.server.tensors["lstm.weight_hh_l0"])


def test_a_server_optimizer_leaves_alone_what_nobody_could_move() -> None:
    result, start = (run("prism", optimizer="fedadam", capacities={0.5: 1.0}, rounds=n) for n in (2, 0))
    new, old = (r.server.tensors["conv2.weight"] for r in (result, start))
    assert torch.equal(new[8:, 4:], old[8:, 4:])
    assert (new[:8, :4] != old[:8, :4]).all()


def test_with_all_outputs_only_kernels_are_sampled() -> None:
    """r (M k^2 + N) parameters of the inner layer, r = ceil(0.25 * 16); every channel is trained."""
    method = PriSM(outputs="all")
    network = method.network(Tiny, 0.25)
    assert {name: list(p.shape) for name, p in network.named_parameters() if "conv2" in name} == {
        "conv2.u": [16, 4, 1, 1], "conv2.v": [4, 8, 3, 3],
    }  # fmt: skip
    result = run(method, capacities={0.25: 1.0})
    assert "untrained" not in result.history[-1] and [*result.history[-1]["global"]] == ["1", "0.25"]
    sliced = run(PriSM(), capacities={0.25: 1.0})
    assert sliced.history[-1]["untrained"]["conv2.weight"] == 12
    with pytest.raises(ValueError, match="outputs must be a whole number, at least 1, got 'some'"):
        PriSM(outputs="some")  # type: ignore[arg-type]


def test_warm_up_trains_the_leading_kernels() -> None:
    rng, method = torch.Generator().manual_seed(0), PriSM(warm_up=2)
    assert method.drawn(SIGMA, 2, Participant(0, 0.5, 1), rng).tolist() == [0, 1]
    assert {tuple(method.drawn(SIGMA, 2, Participant(0, 0.5, 2), rng).tolist()) for _ in range(50)} > {(0, 1)}


def test_the_effective_rank_of_the_authors_code() -> None:
    assert effective_rank(torch.tensor([2.0, 1.0, 1.0]), code=True) == pytest.approx(1 / (1 / 4 + 1 / 16 + 1 / 16))
    assert effective_rank(torch.ones(7), code=True) == pytest.approx(7)
