"""The pins of `constraints.txt` fit together, also for packages that the development environment does not have."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.peft

ROOT = Path(__file__).resolve().parents[2]


def test_no_pinned_package_refuses_the_pin_of_another() -> None:
    lines = (Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1].isalnum())
    pins = {canonicalize_name(line.name): str(line.specifier).removeprefix("==") for line in lines}
    here = {canonicalize_name(one.name): one for one in metadata.distributions()}
    checked = {name: one for name, one in here.items() if pins.get(name) == one.version}
    assert {"transformers", "tokenizers", "huggingface-hub"} <= checked.keys()
    refused = [
        f"{name} {pins[name]} needs {needed}, pinned is {pins[canonicalize_name(needed.name)]}"
        for name, one in checked.items()
        for needed in map(Requirement, one.requires or [])
        if (needed.marker is None or needed.marker.evaluate({"extra": ""}))
        and canonicalize_name(needed.name) in pins
        and not needed.specifier.contains(pins[canonicalize_name(needed.name)], prereleases=True)
    ]
    assert not refused
