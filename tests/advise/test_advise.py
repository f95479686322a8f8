"""`fedfactor plan`: what it measures is what runs have, and what it writes runs."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fedfactor.advise import (
    Advice,
    Device,
    Gauge,
    PlanError,
    Request,
    advise,
    as_dict,
    link,
    render,
    request_of,
    sentence,
    to_recipe,
)
from fedfactor.advise.devices import WORDS
from fedfactor.advise.fitting import needs_of
from fedfactor.protocol.message import Message, encode
from fedfactor.registry import create
from fedfactor.runs.execute import run
from fedfactor.runs.recipe import override, resolve
from tests.helpers import tiny

TINY = "tests.helpers.tiny:Tiny"


def linear(classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))


class Deep(nn.Sequential):
    def __init__(self, classes: int = 10) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))


class Looking(Deep):
    """A model that looks at its numbers."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x / (2 if x.max() > 100 else 1))
        return found


class Uncounted(Deep):
    """A model that refuses to be counted."""

    def forward(self, x: Tensor) -> Tensor:
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("no modes here")
        found: Tensor = super().forward(x)
        return found


def pooled() -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 10))


def asked(*devices: str, model: str = TINY, settings: tuple[str, ...] = (), **options: Any) -> Request:
    settings = ("train.batch_size=10", "train.epochs=2", *settings)
    return request_of(model, "1x8x8", 10, devices or ("any: 100 %",), settings=settings, **options)


# What is measured is what a run has.


@pytest.mark.parametrize("method", tiny.METHODS)
def test_sizes_are_those_of_a_real_round(method: str) -> None:
    result = tiny.run(method, rounds=1, cohort=6, evaluate_clients="none")
    epochs = result.federation.setup.training.epochs
    gauge = Gauge(asked(settings=(f"train.epochs={epochs}",)))
    ready = gauge.ready(create("methods", method, **tiny.FIELDS.get(method, {})), [1.0, 0.5])
    event, setup = result.history[-1], result.federation.setup.at(0)
    sizes = [gauge.size(ready, level) for level in event["capacities"]]
    slack = 6 * 200  # plain fields of the replies: lengths of numbers, scores of a round that is measured
    assert sum(size.down for size in sizes) == pytest.approx(event["bytes_down"], abs=slack)
    assert sum(size.up for size in sizes) == pytest.approx(event["bytes_up"], abs=slack)
    for level in (1.0, 0.5):
        size = gauge.size(ready, level)
        assert size.parameters == sum(p.numel() for p in setup.network(level).parameters())
        assert size.macs == pytest.approx(result.federation.costs.macs(level))


def test_methods_that_cannot_fine_tune_are_named() -> None:
    found = advise(asked(settings=('tune.train=["fc"]',), methods=("fedavg", "lora", "flora", "fjord")))
    assert {fit.method.name for fit in found.fits} == {"fedavg", "lora", "flora"}
    assert found.misfits["fjord"].startswith("fjord cannot fine-tune a frozen base ([tune])")


def test_fine_tuning_counts_what_travels(tmp_path: Path) -> None:
    body = {name: tensor for name, tensor in tiny.Tiny().state_dict().items() if not name.startswith("fc")}
    (tmp_path / "body.safetensors").write_bytes(encode(Message("model", {}, body)))
    tune = {"tune.targets": ["hidden"], "tune.train": ["fc"], "model.pretrained": str(tmp_path / "body.safetensors")}
    settings = tuple(f"{key}={json.dumps(value)}" for key, value in tune.items())
    found = advise(asked("any: 1 GB", settings=settings, methods=("lora", "heterofl")))
    assert found.misfits["heterofl"].startswith("heterofl cannot fine-tune a frozen base ([tune])")
    (fit,) = found.fits
    rank = fit.rows[0].settings["rank"]
    assert rank == 32, "64 is above the rank of the layer"
    assert 0 < fit.rows[0].size.up - 4 * (rank * (256 + 32) + 330) < 2000, "factors of one layer and the classifier"


def looking() -> nn.Module:
    """Return a network that needs its initial values, so it cannot be built without them."""
    model = tiny.Tiny()
    assert float(model.hidden.weight.detach().sum()) != 0
    return model


def test_the_base_of_a_model_that_needs_its_values_does_not_travel() -> None:
    settings = ('tune.targets=["hidden"]', 'tune.train=["fc"]')
    for model in ("tests.advise.test_advise:looking", "tests.helpers.tiny:Tiny"):
        size = Gauge(asked(model=model, settings=settings)).size(create("methods", "lora", rank=4), 1.0)
        factors = 4 * (4 * (256 + 32) + 330)
        assert 0 < size.up - factors < 2000 and 0 < size.down - factors < 2000, model


def test_memory_by_hand() -> None:
    weights, inputs = 4 * (64 * 10 + 10), 4 * 10 * 64
    for momentum, copies in ((0.0, 2), (0.9, 3)):
        request = asked(model="tests.advise.test_advise:linear", settings=(f"train.momentum={momentum}",))
        size = Gauge(request).size(create("methods", "fedavg"), 1.0)
        assert (size.parameters, size.macs, size.activations) == (650, 640, inputs)
        assert size.memory == copies * weights + inputs


def test_seconds_and_joules_by_hand() -> None:
    request = asked("a: 1 GMAC/s", mbps=8.0, joules_per_mb=2.0, joules_per_gmac=3.0, examples=100)
    size = Gauge(request).size(create("methods", "fedavg"), 1.0)
    found = needs_of(request.devices[0], size, request)
    work = 3 * size.macs * 100 * 2  # forward and backward, examples, epochs
    assert found["seconds"] == pytest.approx((size.up + size.down) / 2**20 + work / 1e9)
    assert found["joules"] == pytest.approx(2 * (size.up + size.down) / 1e6 + 3 * work / 1e9)


def test_a_codec_makes_messages_smaller() -> None:
    sizes = [
        Gauge(asked(settings=(f"codec.name={codec}",))).size(create("methods", "fedavg"), 1.0)
        for codec in ("float32", "int8")
    ]
    assert sizes[1].up < 0.35 * sizes[0].up and sizes[0].macs == sizes[1].macs


# What fits.


def found_for(*devices: str, **options: Any) -> Advice:
    return advise(asked(*devices, model="digits_cnn", **options))


DEVICES = ("phone: 100 kB up, 1 MMAC, 1 MB", "gateway: 2 MB up, 40 %")


def test_every_limit_is_kept_and_the_next_larger_size_breaks_one() -> None:
    found = found_for(*DEVICES)
    assert {fit.method.name for fit in found.fits} >= {"heterofl", "fedhm", "prism", "flanc", "fjord", "slim"}
    assert "fedavg" in found.misfits and "phone has 100 kB" in found.misfits["fedavg"]
    for fit in found.fits:
        for device, row in zip(found.request.devices, fit.rows, strict=True):
            needs = needs_of(device, row.size, found.request)
            assert all(needs[key] <= getattr(device, key) for key in WORDS if getattr(device, key) is not None)
    heterofl = next(fit for fit in found.fits if fit.method.name == "heterofl")
    phone, gateway = heterofl.rows
    ladder = found.request.capacities
    larger = found.gauge.size(found.gauge.ready(heterofl.method, [1.0]), ladder[ladder.index(phone.capacity) - 1])
    broken = needs_of(found.request.devices[0], larger, found.request)
    assert phone.stopped_by and all(broken[key] > getattr(found.request.devices[0], key) for key in phone.stopped_by)
    assert gateway.capacity == 1.0 and gateway.stopped_by == ()
    assert gateway.bytes_ratio == pytest.approx(1, abs=0.01) and phone.bytes_ratio > 2


def test_the_choice_and_its_reason() -> None:
    roomy, thin, weak = (found_for(limit) for limit in ("pc: 1 GB", "phone: 150 kB up", "sensor: 1 MMAC"))
    assert roomy.choice and roomy.choice.method.name == "fedavg" and "all devices can train" in sentence(roomy)
    assert thin.choice and thin.choice.method.name == "fedpara"  # few bytes, all operations
    assert "a larger size is limited by the upload" in sentence(thin)
    assert weak.choice and weak.choice.rows[0].size.macs <= 1e6 and "operations" in sentence(weak)
    personal = found_for("phone: 150 kB up", personal=True)
    assert personal.choice and personal.choice.personal and personal.choice.method.name != thin.choice.method.name
    alone = found_for("pc: 1 GB", personal=True, methods=("local", "fedper"))  # no message is smaller than local's
    assert alone.choice and alone.choice.method.name == "fedper" and "the only method" in sentence(alone)
    assert [fit.method.name for fit in alone.fits] == ["fedper", "local"]
    assert found_for("pc: 1 GB", personal=True, methods=("local",)).choice is None
    nothing = found_for("dust: 1 kB up", methods=("fedavg", "heterofl"))
    assert nothing.choice is None and sentence(nothing).startswith("No federated method with a global model")
    with pytest.raises(PlanError, match="there is no choice to write"):
        to_recipe(nothing, "x")


def test_methods_that_make_no_sense_say_why() -> None:
    found = advise(request_of("tests.advise.test_advise:pooled", "1x8x8", 10, ["any: 1 GB"]))
    assert "finds no layer to factorise" in found.misfits["fedpara"]
    thin = advise(request_of("tests.advise.test_advise:pooled", "1x8x8", 10, ["any: 500 B up"], methods=("heterofl",)))
    assert "one size only" in thin.misfits["heterofl"]
    assert "fewer than two epochs (or local_steps): set two" in found.misfits["fedrep"]
    assert found.choice and found.choice.method.name == "fedavg"


def test_a_plan_as_plain_data() -> None:
    found = json.loads(json.dumps(as_dict(found_for(*DEVICES), rounds=7)))
    assert found["choice"] and found["why"].startswith(f"Use {found['choice']}")
    for row in found["fits"]:
        assert row["total_bytes"] == 7 * (row["size"]["up"] + row["size"]["down"])
    assert [device["share"] for device in found["devices"]] == [None, 0.4]


# What is written runs.


@pytest.mark.parametrize("method", sorted({*tiny.METHODS} - {"local"}))  # which is never the choice
def test_a_recipe_of_every_method_that_fits_runs(method: str) -> None:
    personal = not any(not fit.personal for fit in advise(asked("any: 1 GB", methods=(method,))).fits)
    found = advise(asked("phone: 1 GB, 50 %", "pc: 1 GB", methods=(method,), personal=personal, capacities=(0.5,)))
    tables = tomllib.loads(to_recipe(found, "planned"))
    assert tables["method"]["name"] == method
    small = ["partition.clients=4", "train.cohort=2", "train.rounds=1", "data.test_share=0.9"]
    result = run(resolve(override(tables, small)))
    assert result.summary["rounds"] == 1 and result.summary["totals"]["failures"] == 0


def test_a_recipe_has_the_fleet_if_the_devices_have_speeds() -> None:
    devices = ("phone: phone-low, 2 Mbps up, 50 %", "pc: 5 GMAC/s, 1 GB")
    found = advise(asked(*devices, mbps=10.0, methods=("heterofl",), capacities=(1.0, 0.5)))
    recipe = resolve(tomllib.loads(to_recipe(found, "planned")))
    assert recipe.fleet is not None and recipe.fleet.fit_capacities
    assert recipe.fleet.devices["phone"].mbps_up == 2.0 and recipe.fleet.devices["phone"].speed == 10.2e9
    assert recipe.fleet.devices["pc"].mbps_up == 10.0 and recipe.fleet.devices["pc"].memory == 1e9
    assert resolve(tomllib.loads(to_recipe(found_for(*DEVICES), "planned"))).fleet is None


# What is said wrong.


def test_devices_are_read() -> None:
    device = Device.parse("phone: 2 MB up, 500kB down, 60 MMAC, 40 MiB, 30 s, 5 J, 2 GMAC/s, 10 Mbps, 30 %")
    assert device == Device(
        name="phone", up=2e6, down=5e5, memory=40 * 2**20, macs=60e6, seconds=30.0, joules=5.0, speed=2e9,
        mbps_down=10.0, mbps_up=10.0, share=0.3,
    )  # fmt: skip
    phone = Device.parse("phone: phone-low, 2 Mbps up, 30 s")
    assert (phone.mbps_down, phone.mbps_up, phone.speed) == (13.0, 2.0, 10.2e9)
    assert link("2Mbps") == 2.0 and link("500 kbps") == 0.5
    assert asked("a: 20 %", "b: 1 GB", "c: 1 GB").shares == [0.2, pytest.approx(0.4), pytest.approx(0.4)]


@pytest.mark.parametrize(
    ("words", "devices", "options"),
    [
        ("a device must be a name and its limits", ["phone"], {}),
        ("'2 apples' is not a limit; give bytes", ["phone: 2 apples"], {}),
        ("gives its memory twice", ["phone: 2 MB, 3 MB memory"], {}),
        ("devices need different names", ["phone: 2 MB", "phone: 3 MB"], {}),
        ("add up to 110 %", ["a: 60 %", "b: 50 %"], {}),
        ("add up to 90 %", ["a: 40 %", "b: 50 %"], {}),
        ("give the speed of the link", ["phone: 3 s"], {}),
        ("give --joules-per-mb and", ["phone: 3 J"], {}),
        ("did you mean 'fedpara'", ["phone: 1 MB"], {"methods": ("fedparra",)}),
        ("capacities must lie in", ["phone: 1 MB"], {"capacities": (2.0,)}),
    ],
)
def test_mistakes_are_named(words: str, devices: list[str], options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=words):
        advise(asked(*devices, **options))


def test_inputs_that_do_not_fit_are_named() -> None:
    with pytest.raises(PlanError, match="must look like 3x32x32, got '3by32'"):
        request_of("resnet18", "3by32", 10, ["a: 1 MB"])
    with pytest.raises(PlanError, match="cannot take inputs of shape 5 x 8 x 8"):
        advise(request_of("digits_cnn", "5x8x8", 10, ["a: 1 MB"]))
    with pytest.raises(PlanError, match="give the shape of an input"):
        request_of(TINY, None, 10, ["a: 1 MB"])
    with pytest.raises(PlanError, match="a recipe needs a data set"):
        to_recipe(advise(request_of("digits_cnn", "1x9x9", 10, ["a: 1 GB"])), "x")


def test_models_that_look_at_their_numbers_are_counted_on_numbers() -> None:
    here, methods = "tests.advise.test_advise", ("fedavg", "low_rank")
    plain, looking = (as_dict(advise(asked(model=f"{here}:{name}", methods=methods))) for name in ("Deep", "Looking"))
    assert looking["dense"] == plain["dense"] and looking["dense"]["macs"] == 64 * 32 + 320


def test_a_model_that_cannot_be_counted_is_planned_by_its_bytes() -> None:
    with pytest.warns(UserWarning, match="no modes here. Operations, memory .* their limits not checked"):
        found = advise(asked("phone: 9 kB up, 1 kB, 1 GMAC/s", model="tests.advise.test_advise:Uncounted"))
    text, data = str(sentence(found)), as_dict(found)
    assert found.choice is not None and "Operations are not known; dense FedAvg sends" in text
    assert data["dense"]["macs"] is None and data["dense"]["memory"] is None and data["dense"]["up"] > 9000
    assert json.loads(json.dumps(data), parse_constant=pytest.fail) == data
    Console(file=io.StringIO(), width=160).print(render(found))
