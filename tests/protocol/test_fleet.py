"""Devices and fleets: profiles, shares, and mistakes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from fedfactor.protocol.fleet import ASSUMED, PROFILES, Device, Fleet


@pytest.mark.parametrize("name", PROFILES)
def test_every_number_of_a_profile_has_a_source_or_is_marked_as_assumed(name: str) -> None:
    numbers = PROFILES[name].numbers
    device = Device(profile=name)
    assert all(getattr(device, key) == value for key, (value, _) in numbers.items())
    assert all(source == ASSUMED or len(source) > 20 for _, source in numbers.values())
    assert "ncnn" in numbers["speed"][1]
    Fleet({name: device})  # complete


def test_what_is_given_replaces_the_profile() -> None:
    device = Device(profile="phone-low", mbps_up=2, spread=0)
    assert (device.mbps_up, device.spread, device.mbps_down) == (2.0, 0.0, 13.0)
    assert Device(speed=2_000_000_000).speed == 2e9 and isinstance(Device(speed=2_000_000_000).speed, float)
    assert Device(availability=0.25, on_seconds=60).off_seconds == 180


def test_shares_hold_exactly_and_the_seed_decides_who_has_what() -> None:
    fleet = Fleet.of_profiles({"phone-low": 0.5, "phone-mid": 0.3, "gateway": 0.2})
    kinds = fleet.assign(1, 100)
    assert np.bincount(kinds).tolist() == [50, 30, 20]
    assert (kinds == fleet.assign(1, 100)).all() and (kinds != fleet.assign(2, 100)).any()
    rest = Fleet(
        {"a": Device(profile="gateway", share=0.4), "b": Device(profile="gateway"), "c": Device(profile="gateway")}
    )
    assert np.bincount(rest.assign(0, 10)).tolist() == [4, 3, 3]
    own = Fleet(rest.devices, of_clients=("c", "a"))
    assert own.assign(0, 2).tolist() == [2, 0]
    with pytest.raises(ValueError, match="devices are given for 2 clients, but there are 3"):
        own.assign(0, 3)


GATEWAY = {"profile": "gateway"}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"devices": {}}, "at least 1 item"),
    ({"devices": {"a": Device(share=0.5, **GATEWAY), "b": Device(share=0.4, **GATEWAY)}}, "add up to 90 %, not 100 %"),
    ({"devices": {"a": Device(share=1.0, **GATEWAY), "b": Device(**GATEWAY)}}, "leave no clients for the devices"),
    ({"devices": {"a": Device(speed=1e9)}}, "devices.a has no mbps_down and no mbps_up: give it, or a profile"),
    ({"devices": {"a": Device(**GATEWAY)}, "deadline": 0.0}, "deadline should be greater than 0, got 0.0"),
    ({"devices": {"a": Device(**GATEWAY)}, "overselect": 0.5}, "overselect should be at least 1, got 0.5"),
    ({"devices": {"a": Device(**GATEWAY)}, "of_clients": ("b",)}, "devices that are not described: b"),
]


@pytest.mark.parametrize(("given", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_fleets_that_make_no_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Fleet(**given)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"profile": "fone-low"}, "did you mean 'phone-low'? there are phone-low, phone-mid"),
        ({"speed": "fast"}, "speed should be a number or 'measured', got 'fast'"),
        ({"availability": 0.0}, "availability should be greater than 0"),
        ({"failure": 1.0}, "failure"),
    ],
)
def test_devices_that_make_no_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Device(**given)
