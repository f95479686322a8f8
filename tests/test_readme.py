"""What README, the pages beside it and the examples say is what happens."""

from __future__ import annotations

import fnmatch
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from fedfactor.cli import app
from fedfactor.registry import entries
from fedfactor.runs import catalog, compare
from fedfactor.runs import recipe as recipes

ROOT = Path(__file__).parents[1]
MARKDOWN = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not path.relative_to(ROOT).parts[0].startswith(".") and path.relative_to(ROOT).parts[0] not in ("site", "runs")
)


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)


def test_the_five_lines_give_a_plain_model_that_has_learnt() -> None:
    (block,) = blocks("README.md")
    assert len([line for line in block.splitlines() if line]) == 5
    names: dict[str, object] = {}
    torch.manual_seed(0)
    exec(block, names)
    plain = names["plain"]
    assert type(plain) is torch.nn.Sequential
    assert list(plain.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    events = [event for event in names["result"].history if event["event"] == "round"]  # type: ignore[attr-defined]
    assert len(events) == 5
    assert events[-1]["loss"] < events[0]["loss"] < 1.6


def test_factorised_layers_alone() -> None:
    names: dict[str, object] = {}
    exec(blocks("docs/layers.md")[0], names)
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


def test_readme_is_a_landing_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert "docs/tutorial.md" in text and "docs/demo.svg" in text


def test_the_tables_of_methods_are_complete() -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    for kind in ("optimizers", "codecs"):
        assert all(f"`{name}`" in text for name in entries(kind))
    rows = re.findall(r"^\| \[`(\w+)`\]\((.*?)\) \| .* \| (.*?) ?\|$", text, flags=re.M)
    known = entries("methods")
    assert sorted(row[0] for row in rows) == list(known)
    for name, source, paper in rows:
        assert paper == known[name].paper
        assert source == f"../src/{known[name].cls.__module__.replace('.', '/')}.py"


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as both mkdocs and hosting sites make them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_work_without_building_the_site(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]*)\)", re.sub("```.*?```", "", page.read_text(), flags=re.S)):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links {link}, which does not exist"
        assert not anchor or anchor in anchors(path), f"{page.name} links {link}: no such heading"


def commands(page: Path) -> list[str]:
    """Return the commands in a page's shell blocks and indented blocks, without comments and redirections."""
    text = page.read_text().replace("\\\n", "")
    shown = re.findall(r"^```sh\n(.*?)^```", text, flags=re.M | re.S) + re.findall(
        r"^    (fedfactor .*)$", text, flags=re.M
    )
    lines = [re.split(" [#>]", line)[0].strip() for block in shown for line in block.splitlines()]
    return [line for line in lines if line.startswith("fedfactor ") and "$" not in line]  # no shell variables


COMMANDS = [(str(page.relative_to(ROOT)), command) for page in MARKDOWN for command in commands(page)]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands_exist_with_their_options_recipes_and_settings(page: str, command: str) -> None:
    """Check each command that a page shows, without running it."""
    words = shlex.split(command)[1:]
    found: Any = typer.main.get_command(app)
    while hasattr(found, "commands") and words and words[0] in found.commands:
        found = found.commands[words.pop(0)]
    given = found.make_context(found.name, words).params  # raises for an unknown option
    if given.get("recipe") in catalog.names():
        tables = recipes.read(catalog.packaged(given["recipe"]))
        tables = recipes.small(tables) if given.get("small") else tables
        if found.name == "compare":
            assert compare.cells(
                tables, given["methods"].split(","), [1], Path("runs"), settings=given["settings"] or []
            )
            return
        cells = recipes.overridden_cells(tables, given["settings"] or [])
        chosen = [cell for name, cell in cells.items() if fnmatch.fnmatchcase(name, given.get("only", "*"))]
        assert chosen and all(recipes.resolve(cell, command) for cell in chosen)
    else:
        assert given.get("recipe") is None or given["recipe"] == "RECIPE" or given["recipe"].endswith(".toml")
