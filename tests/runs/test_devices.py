"""Fleets in recipes, and files with one device per client."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fedfactor.protocol.fleet import Device
from fedfactor.runs.devices import read_devices
from fedfactor.runs.recipe import RecipeError, override, resolve
from tests.helpers.recipes import BASE

PHONES = ["fleet.devices.phone.profile=phone-low", "fleet.devices.phone.mbps_up=2"]


def test_a_recipe_without_a_fleet_has_no_such_section() -> None:
    assert "fleet" not in resolve(BASE).tables and resolve(BASE).fleet is None


def test_a_resolved_fleet_has_all_numbers_and_resolves_to_itself() -> None:
    found = resolve(override(BASE, [*PHONES, "fleet.deadline=30"]))
    assert found.fleet is not None and found.fleet.deadline == 30.0
    assert found.fleet.devices == {"phone": Device(profile="phone-low", mbps_up=2.0)}
    written = found.tables["fleet"]["devices"]["phone"]
    assert written["mbps_up"] == 2.0 and written["speed"] == 10.2e9 and "file" not in found.tables["fleet"]
    again = resolve(tomllib.loads(found.to_toml()))
    assert again.tables == found.tables and again.fleet == found.fleet


def test_a_file_has_one_row_per_client(tmp_path: Path) -> None:
    path = tmp_path / "devices.csv"
    path.write_text("profile,mbps_up,name\nphone-low,2,\ngateway,,\nphone-low,2,\nphone-mid,,mine\n")
    found = resolve(override(BASE, [f"fleet.file={path}"]))
    assert found.fleet is not None
    assert found.fleet.of_clients == ("phone-low-2", "gateway", "phone-low-2", "mine")
    assert found.fleet.devices["phone-low-2"] == Device(profile="phone-low", mbps_up=2.0)
    path.unlink()  # the resolved recipe needs it no more
    assert resolve(tomllib.loads(found.to_toml())).fleet == found.fleet


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read from"),
        ("profile\n", "has no rows"),
        ("profil\ngateway\n", "did you mean 'profile'"),
        ("profile,speed\ngateway,\ngateway,fast\n", "client 1: Device: speed should be a number"),
        ("name,profile\na,gateway\na,phone-low\n", "client 1: another row gives device 'a' other numbers"),
    ],
    ids=["missing", "empty", "column", "value", "name"],
)
def test_files_that_make_no_sense(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "devices.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_devices(path)
    with pytest.raises(RecipeError, match=message):
        resolve(override(BASE, [f"fleet.file={path}"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["fleet.devices.phone.profil=phone-low"], r"no key 'fleet\.devices\.phone\.profil'; did you mean 'profile'\?"),
        (["fleet.devices.phone.profile=iphone"], r"fleet\.devices\.phone\.profile must be a built-in profile"),
        (["fleet.deadline=3"], r"fleet\.devices is missing"),
        ([*PHONES, "fleet.deadlin=3"], "did you mean 'deadline'"),
        ([*PHONES, "fleet.devices.phone.share=0.5"], "add up to 50 %, not 100 %"),
    ],
)
def test_fleets_of_recipes_that_make_no_sense(settings: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        resolve(override(BASE, settings))
