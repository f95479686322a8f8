"""What README and examples say is what happens."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


def test_the_five_lines_give_a_plain_model_that_has_learnt() -> None:
    assert len([line for line in BLOCKS[0].splitlines() if line]) == 5
    names: dict[str, object] = {}
    torch.manual_seed(0)
    exec(BLOCKS[0], names)
    plain = names["plain"]
    assert type(plain) is torch.nn.Sequential
    assert list(plain.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    events = [event for event in names["result"].history if event["event"] == "round"]  # type: ignore[attr-defined]
    assert len(events) == 5
    assert events[-1]["loss"] < events[0]["loss"] < 1.6


def test_factorised_layers_alone() -> None:
    names: dict[str, object] = {}
    exec(BLOCKS[1], names)
    count = {key: sum(p.numel() for p in names[key].parameters()) for key in ("dense", "small", "plain")}  # type: ignore[attr-defined]
    assert count["dense"] == count["plain"] == 15_253_578
    assert count["small"] == pytest.approx(1.55e6, rel=0.01)


def test_the_plain_example_learns_in_about_60_lines() -> None:
    example = ROOT / "examples" / "plain_fedavg.py"
    code = [
        line for line in example.read_text().splitlines() if line.strip() and not line.lstrip().startswith(("#", '"""'))
    ]
    assert len(code) <= 60
    assert "fedfactor" not in "".join(code)
    assert runpy.run_path(str(example))["main"]() > 0.8


def test_the_table_of_methods_is_complete() -> None:
    from fedfactor.registry import entries

    text = (ROOT / "README.md").read_text()
    for kind in ("optimizers", "codecs"):
        assert all(f"`{name}`" in text for name in entries(kind))
    rows = re.findall(r"^\| \[`(\w+)`\]\((.*?)\) \| .* \| (.*?) ?\|$", text, flags=re.M)
    known = entries("methods")
    assert sorted(row[0] for row in rows) == list(known)
    for name, source, paper in rows:
        assert paper == known[name].paper
        assert source == f"src/{known[name].cls.__module__.replace('.', '/')}.py"


def test_every_link_leads_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    links = [link for link in re.findall(r"\]\((.*?)\)", text) if "://" not in link]
    assert "docs/tutorial.md" in links and "docs/demo.svg" in links
    assert [link for link in links if not (ROOT / link).exists()] == []
