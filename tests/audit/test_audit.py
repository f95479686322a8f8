"""The audit: its figures by hand, a real attack that works, and what the attacker must not know."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from fedfactor.audit import Attack, AttackResult, AuditResult, NothingToAttack, attack_clients, audit
from fedfactor.audit.attack import (
    Colours,
    distance,
    matched,
    observe,
    reconstruct,
    total_variation,
    uploaded_weights,
)
from fedfactor.audit.result import png, psnr
from fedfactor.data.clients import FederatedData
from fedfactor.data.transform import transform
from fedfactor.engines import Job
from fedfactor.protocol.message import Message, decode, encode
from fedfactor.runs import recipe as recipes
from fedfactor.runs.directory import RunError
from fedfactor.runs.execute import run
from fedfactor.server.result import Result
from tests.helpers import tiny
from tests.helpers.command import fedfactor

RECIPE: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"kind": "dirichlet", "clients": 4, "alpha": 0.1},
    "model": {"name": "digits_cnn", "width": 0.125},
    "train": {"rounds": 2, "epochs": 2, "batch_size": 64},
}


def made(folder: Path, keep: list[int], **sections: Any) -> Path:
    tables = recipes.merged(RECIPE, {"run": {"keep_rounds": keep}, **sections})
    run(recipes.resolve(tables, "test"), folder)
    return folder


def job_of(result: Result, client: int) -> Job:
    federation, server = result.federation, result.server
    who = federation.dispatch.participant(client, server.round)
    networks = {who.capacity: federation.setup.network(who.capacity)}
    view = federation.setup.method.prepare(server.tensors, networks, training=True)
    return next(federation.dispatch.jobs("train", server, view, [who], federation.store))


def pictures_of(result: Result, client: int, count: int) -> tuple[Tensor, Tensor]:
    x, y = result.federation.setup.task.data.of(client)
    return x[:count], y[:count]


# Figures by hand.


def test_psnr_by_hand() -> None:
    black, original = torch.zeros(1, 2, 5), torch.zeros(1, 2, 5)
    original[0, 0, 0] = 1.0
    assert psnr(black, original) == pytest.approx(10.0)  # ||x - x*||^2 = 1, m n = 10
    coloured = original.expand(3, 2, 5)
    assert psnr(black.expand(3, 2, 5), coloured) == pytest.approx(5.228787)  # -10 log10(3 / 10): channels add up
    assert psnr(original, original) == pytest.approx(120.0)


def test_total_variation_and_distance_by_hand() -> None:
    picture = torch.tensor([[0.0, 1.0], [0.5, 0.5]])[None, None]
    assert float(total_variation(picture)) == pytest.approx((0.5 + 0.5) / 2 + (1.0 + 0.0) / 2)
    a, b = [torch.tensor([3.0]), torch.tensor([[4.0]])], [torch.tensor([3.0]), torch.tensor([[0.0]])]
    assert float(distance(a, b)) == pytest.approx(1 - 3 / 5)
    assert float(distance([1e-9 * t for t in a], b)) == pytest.approx(1 - 3 / 5)


def test_pictures_are_matched_within_their_label() -> None:
    originals = torch.tensor([0.0, 0.9, 0.5]).view(3, 1, 1, 1)
    found = torch.tensor([0.8, 0.1, 0.9]).view(3, 1, 1, 1)
    labels = torch.tensor([1, 1, 2])
    assert matched(found, labels, originals, labels) == [1, 0, 2]


def test_colours_undo_a_normalisation() -> None:
    stored = torch.randint(0, 256, (6, 3, 4, 4), dtype=torch.uint8)
    stored[0, 0, 0, :2] = torch.tensor([0, 255], dtype=torch.uint8)
    data = FederatedData((stored, torch.arange(6)), [torch.arange(6)], transform=transform("cifar10"))
    colours, inputs = Colours.of(data), data.transform.test(stored)
    torch.testing.assert_close(colours.pictures(inputs), stored / 255, atol=1e-6, rtol=0)
    torch.testing.assert_close(colours.inputs(stored / 255), inputs)


def test_report_has_average_and_maximum_over_pictures_clients_and_rounds() -> None:
    original = torch.zeros(1, 2, 5)
    original[0, 0, 0] = 1.0
    zeros, whole = torch.zeros(1, 1, 2, 5), original[None]
    one = [AttackResult(10, 0, [3], whole, zeros, 0.1), AttackResult(20, 0, [3], whole, whole, 0.0)]
    report = AuditResult("run", "method", {"mode": "gradient"}, one)
    assert report.figures()["average"] == pytest.approx((10 + 120) / 2)
    assert report.figures()["maximum"] == pytest.approx(120)
    assert report.figures(10)["maximum"] == pytest.approx(10)
    flat = -10 * torch.tensor((0.9**2 + 9 * 0.1**2) / 10).log10()  # all pixels 0.1
    assert report.figures()["flat_average"] == pytest.approx(float(flat), abs=1e-5)
    assert report.figures()["better_than_flat"] == 0.5


@pytest.mark.parametrize("channels", [1, 3])
def test_png_is_read_back_by_another_program(channels: int) -> None:
    picture = torch.rand(channels, 4, 7)
    image = Image.open(io.BytesIO(png(picture)))
    assert image.size == (7, 4) and image.mode == {1: "L", 3: "RGB"}[channels]
    values = torch.tensor(list(image.tobytes())).view(4, 7, channels).permute(2, 0, 1)
    assert torch.equal(values, (picture * 255).round().long())


# The attack.


def test_a_picture_is_recovered_from_the_whole_gradient_and_not_without_it() -> None:
    result = tiny.run("fedavg", rounds=1, capacities=None)
    setup = result.federation.setup
    colours, attack = Colours.of(setup.task.data), Attack(images=1, iterations=200)
    x, y = pictures_of(result, 0, 1)
    had = observe(setup, job_of(result, 0), attack, x, y)
    noise = {name: torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) for name, t in had.seen.items()}
    scores = [
        psnr(reconstruct(setup, replace(had, seen=seen), attack, colours)[0][0], colours.pictures(x)[0])
        for seen in (had.seen, noise)
    ]
    flat = psnr(x[0].mean().expand(x[0].shape), x[0])
    assert scores[0] > flat + 10, (scores, flat)
    assert scores[1] < flat + 2, (scores, flat)


def test_noise_of_the_client_covers_the_gradient_too() -> None:
    """Its norm is clipped to 2, and the noise of 300 numbers or more has a norm of about 2 * 0.5 * sqrt(their count)."""
    private = {"clip": 2.0, "noise": 0.5, "delta": 1e-3, "where": "client"}
    # FedBN keeps the statistics of batch norms, which no noise covers, on the client.
    result = tiny.run("fedbn", rounds=1, capacities=None, evaluate_clients="none", privacy=private)
    setup, attack = result.federation.setup, Attack(images=2)
    x, y = pictures_of(result, 0, 2)
    seen, plain = (
        observe(replace(setup, privacy=one), job_of(result, 0), attack, x, y).seen for one in (setup.privacy, None)
    )
    whole, covered = (torch.cat([tensor.flatten() for tensor in part.values()]) for part in (plain, seen))
    noise = covered - whole * min(1.0, 2.0 / float(whole.norm()))
    assert float(noise.norm()) == pytest.approx(2.0 * 0.5 * len(whole) ** 0.5, rel=0.1)
    assert float(noise @ whole / noise.norm() / whole.norm()) == pytest.approx(0, abs=0.15)


@pytest.mark.parametrize("mode", ["gradient", "update"])
@pytest.mark.parametrize("method", [name for name in tiny.METHODS if name != "local"])
def test_every_method_can_be_attacked(method: str, mode: Any) -> None:
    result = tiny.run(method, rounds=1, evaluate_clients="none")
    client = int(result.history[1]["cohort"][0])  # has a state where the method keeps one
    attack = Attack(mode, images=2, iterations=2)
    colours = Colours.of(result.federation.setup.task.data)
    (one,) = attack_clients(result.federation, result.server, [client], attack, colours)
    assert one.round == 1 and one.client == client
    assert 0 <= one.distance < 1.5 and all(0 < value < 60 for value in one.psnr)
    assert one.pictures.min() >= 0 and one.pictures.max() <= 1


@pytest.mark.parametrize("method", ["fedper", "fedbn", "fedrod", "feddecomp", "pfedpara", "fedcac"])
def test_private_tensors_reach_the_attacker_through_the_gradient_alone(method: str) -> None:
    result = tiny.run(method, rounds=1, capacities=None)
    setup, attack = result.federation.setup, Attack(images=2)
    client = int(result.history[1]["cohort"][0])
    job = job_of(result, client)
    assert job.state is not None
    private = setup.method.private_names(setup.network(1.0))
    state = decode(job.state)
    changed = {
        name: tensor * 1.5 + 0.1 if tensor.is_floating_point() and name.removeprefix("kept/") in private else tensor
        for name, tensor in state.tensors.items()
    }
    assert any(not torch.equal(changed[name], state.tensors[name]) for name in changed)
    other = replace(job, state=encode(Message("state", state.fields, changed)))
    x, y = pictures_of(result, client, 2)
    one, two = (observe(setup, which, attack, x, y) for which in (job, other))

    assert one.message.fields == two.message.fields and _same(one.message.tensors, two.message.tensors)
    assert _same(one.kept["kept"], two.kept["kept"]) and torch.equal(one.labels, two.labels)
    start = setup.kept(1.0)
    assert all(torch.equal(tensor, start[name]) for name, tensor in one.kept["kept"].items() if name in private)
    assert not private & set(one.seen) and not private & set(one.message.tensors)
    # FedCAC keeps statistics that training does not read, FedRoD a head that receives gradients but passes none on.
    assert _same(one.seen, two.seen) == (method in ("fedcac", "fedrod"))


def _same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_one_step_on_all_pictures_uploads_the_gradient() -> None:
    whole = tiny.data()
    data = FederatedData(whole.train, [where[:4] for where in whole.train_of])
    result = tiny.run("fedavg", data=data, rounds=1, capacities=None, epochs=1, batch_size=4, lr=0.05)
    setup = result.federation.setup
    x, y = pictures_of(result, 2, 4)
    gradient, update = (observe(setup, job_of(result, 2), Attack(mode), x, y) for mode in ("gradient", "update"))
    assert list(gradient.seen) == [name for name, _ in setup.network(1.0).named_parameters()]
    for name, tensor in gradient.seen.items():
        torch.testing.assert_close(update.seen[name], 0.05 * tensor, atol=1e-6, rtol=1e-3)


def test_same_seed_same_bits_and_another_seed_another_attack() -> None:
    result = tiny.run("fedper", rounds=1, capacities=None)
    colours = Colours.of(result.federation.setup.task.data)

    def found(seed: int) -> AttackResult:
        attack = Attack(images=2, iterations=4, restarts=2, seed=seed)
        (one,) = attack_clients(result.federation, result.server, [1], attack, colours)
        return one

    torch.manual_seed(11)
    one = found(0)
    torch.manual_seed(12)
    two = found(0)
    assert torch.equal(one.pictures, two.pictures) and one.as_dict() == two.as_dict()
    assert not torch.equal(one.originals, found(1).originals)


def test_of_several_starts_the_best_match_counts() -> None:
    result = tiny.run("fedavg", rounds=1, capacities=None)
    setup = result.federation.setup
    colours = Colours.of(setup.task.data)
    x, y = pictures_of(result, 0, 1)
    had = observe(setup, job_of(result, 0), Attack(), x, y)
    scores = [reconstruct(setup, had, Attack(iterations=3, restarts=count), colours)[1] for count in (1, 2, 4, 8)]
    assert scores == sorted(scores, reverse=True) and scores[-1] < scores[0]


# Runs.


def test_what_cannot_be_attacked_is_said(tmp_path: Path) -> None:
    alone = made(tmp_path / "local", [1], method={"name": "local"}, train={"rounds": 1})
    with pytest.raises(NothingToAttack, match="local uploads no trained weight"):
        audit(alone)
    with pytest.raises(RunError, match=r"round 7 .* was not kept; kept rounds: 1"):
        audit(alone, rounds=[7])
    forgetful = made(tmp_path / "none", [], train={"rounds": 1})
    with pytest.raises(RunError, match=r"kept no round .* --set run\.keep_rounds="):
        audit(forgetful)
    flat = FederatedData((torch.randn(6, 20), torch.arange(6)), [torch.arange(6)])
    with pytest.raises(NothingToAttack, match=r"\[6, 20\]"):
        Colours.of(flat)
    for wrong in ({"mode": "both"}, {"images": 0}, {"lr": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Attack(**wrong)  # type: ignore[arg-type]


def test_the_command_writes_pictures_and_figures(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", [1, 2], method={"name": "feddecomp"})
    report = tmp_path / "out" / "report.html"
    words = ["audit", folder, "--clients", 2, "--images", 2, "--iterations", 3, "-o", report]
    done = fedfactor(*words)
    assert done.exit_code == 0, done.stderr
    assert "round 2, client 1" in done.stdout and "average" in done.stdout
    figures = json.loads(report.with_suffix(".json").read_text())
    assert [(one["round"], one["client"]) for one in figures["attacks"]] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    values = [value for one in figures["attacks"] for value in one["psnr"]]
    assert len(values) == 8 and figures["psnr"]["maximum"] == max(values)
    assert figures["psnr"]["average"] == pytest.approx(sum(values) / 8)
    page = report.read_text()
    assert page.count("data:image/png;base64,") == 16 and "http" not in page
    shown = [one[kind][n] for one in figures["attacks"] for n in (0, 1) for kind in ("originals", "recovered")]
    assert shown == re.findall(r"data:image/png;base64,([^\"]+)", page)
    assert Image.open(io.BytesIO(base64.b64decode(shown[0]))).size == (8, 8)
    again = audit(folder, Attack(images=2, iterations=3), clients=2, rounds=[2])
    assert [one.as_dict() for one in again.attacks] == figures["attacks"][2:]


def test_only_shared_trained_weights_are_attacked() -> None:
    result = tiny.run("fedper", rounds=1, capacities=None)
    names = uploaded_weights(result.federation.setup, decode(job_of(result, 0).message))
    assert names == [
        "conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias", "conv2.weight", "bn2.weight", "bn2.bias",
        "hidden.weight", "hidden.bias",
    ]  # fmt: skip
