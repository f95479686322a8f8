"""The documentation says what happens: made pages are complete, and what pages show is run. `make docs` checks links."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fedfactor as library
from fedfactor import registry
from fedfactor.protocol.message import read_weights
from fedfactor.protocol.plan import Reply, whole_plan
from fedfactor.registry import entries
from fedfactor.runs.recipe import override, read, resolve
from fedfactor.tables import compute
from fedfactor.testing import PROMISES
from tests.helpers.command import fedfactor
from tests.helpers.folding import folded
from tests.helpers.grid import Deployment
from tests.helpers.tiny import run

ROOT = Path(__file__).parents[1]


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


PAGES = module(ROOT / "docs" / "pages.py")
PICTURE = module(ROOT / "docs" / "picture.py")


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield language, title and text of every block of code in a page."""
    text = (ROOT / "docs" / page).read_text()
    yield from re.findall(r'^```(\w+)(?: title="(.*?)")?\n(.*?)^```', text, flags=re.M | re.S)


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    rows = compute("feddecomp")
    found: dict[str, str] = PAGES.pages(lambda: rows)
    return found


@pytest.mark.parametrize("name", list(entries("methods")))
def test_every_method_has_a_page_with_all_that_is_known_of_it(name: str, made: dict[str, str]) -> None:
    entry, page = entries("methods")[name], made[f"methods/{name}.md"]
    overview = PAGES.linked((ROOT / "docs" / "methods.md").read_text(), "docs/methods.md")
    assert f"[`{name}`](methods/{name}.md)" in overview
    assert page.startswith(f"# {entry.cls.__name__}\n")
    for heading in ("When to use it", "Fields", "In short", "Evidence"):
        assert f"## {heading}\n" in page, heading
    for item in fields(entry.cls):
        assert f"| `{item.name}` |" in page
    assert ("## Deviations" in page) == ("Deviations:" in (entry.cls.__doc__ or ""))
    assert entry.paper in page
    words = set(re.findall(r"\w{4,}", (entry.cls.__doc__ or "").lower()))  # nothing of the docstring is lost
    assert not words - set(re.findall(r"\w{4,}", page.replace("\\", "").lower())) - {"deviations"}


def test_a_page_says_what_a_method_does_not_go_with(made: dict[str, str]) -> None:
    assert "- goes with every optimizer and codec" in made["methods/fedavg.md"]
    assert "not with `scaffold`" in made["methods/prism.md"]
    assert "| `fold` |" in made["methods/prism.md"] and "| `fold` |" not in made["methods/fedpara.md"]
    assert "## What it does that FedAvg does not" not in made["methods/fedavg.md"]


def test_evidence_and_recipes_of_a_method_are_found(made: dict[str, str]) -> None:
    assert "(../evidence/heterogeneous.md)" in made["methods/flanc.md"]
    assert "evidence/" not in made["methods/pufferfish.md"]
    assert "fedfactor run demo\n" in made["methods/fedpara.md"]
    assert "fedfactor run demo\n" not in made["methods/flanc.md"]


def test_every_optimizer_and_codec_is_described_and_has_its_use(made: dict[str, str]) -> None:
    for kind in ("optimizers", "codecs"):
        for name, entry in entries(kind).items():
            section = made[f"{kind}.md"].partition(f"\n## {name}\n")[2].partition("\n## ")[0]
            assert "Use it" in section, name
            assert all(f"| `{item.name}` |" in section for item in fields(entry.cls))


def test_every_command_and_option_is_in_the_reference(made: dict[str, str]) -> None:
    for command, option in [("run", "--resume"), ("data show", "--data-dir"), ("new", "--out"), ("audit", "--mode")]:
        section = made["commands.md"].partition(f"\n## fedfactor {command}\n")[2].partition("\n## ")[0]
        assert f"`{option}" in section or f", {option}" in section, (command, option)


def test_the_reference_of_recipe_keys_is_that_of_the_schema() -> None:
    page = (ROOT / "docs" / "keys.md").read_text()
    assert page == PAGES.keys_page(), "python docs/pages.py keys.md > docs/keys.md"
    for key in ("name", "data.norm", "train.schedule.milestones", "method.gamma", "evaluate.every", "run.keep_rounds"):
        assert f"\n| `{key}` | " in page, key
    for name in entries("methods"):
        assert f"\n### method.name = `{name}`\n" in page


def test_every_verdict_of_the_evidence_is_among_the_results(made: dict[str, str]) -> None:
    for path in PAGES.evidence_pages():
        found, text = PAGES.claims(path), path.read_text()
        assert found, f"{path.name}: no claim that results can show; write '- *claim*: **holds**' below a command"
        assert all(one.commands for one in found), f"{path.name}: every section needs the command that measured it"
        bold = re.findall(r"\*\*(holds|fails|undecided)\*\*", text)
        shown = re.findall(r"\*\*(holds|fails|undecided)\*\*", " ".join(one.found for one in found))
        assert bold == shown, f"{path.name}: verdicts outside of claims"
        assert all(one.claim in " ".join(text.split()) for one in found)


def test_claims_are_read_with_their_command_and_verdict() -> None:
    found = PAGES.claims(ROOT / "docs" / "evidence" / "heterogeneous.md")
    bytes_ = next(one for one in found if one.claim == "FLANC moves fewer bytes")
    assert bytes_.rulings == ["holds"] and bytes_.section.startswith("FLANC against HeteroFL")
    (command,) = bytes_.commands
    assert command.startswith("fedfactor run flanc/table1-fashion-mnist --small ")
    fixed = next(one for one in found if one.claim == "FedHM is ahead of slimming")
    whole = "fedfactor run fedhm/table2-cifar10 --small --set train.rounds=40 "  # no word of the shell's
    assert len(fixed.commands) == 3 and all(one.startswith(whole) for one in fixed.commands)


def test_counts_are_those_of_the_tables(made: dict[str, str]) -> None:
    rows = compute("feddecomp")
    verdicts = [row.verdict for row in rows]
    line = PAGES.counts_table(rows).splitlines()[-1]
    assert [word.strip("* ") for word in line.split("|")[3:8]] == [str(verdicts.count(v)) for v in PAGES.VERDICTS]
    assert PAGES.differences_table(rows).count("\n") - 1 == verdicts.count("misprint") + verdicts.count("off")
    assert PAGES.counts_table(rows) in made["results.md"]


def test_plain_words_stay_plain() -> None:
    assert PAGES.prose("a * b_i |x| <g, w> `c_i | *`") == r"a \* b\_i \|x\| &lt;g, w> `c_i | *`"


def test_marks_in_pages_are_known() -> None:
    for path in (ROOT / "docs").glob("*.md"):
        text = PAGES.with_made(path.read_text())
        assert "<!-- made" not in text
    assert "| `natural` |" in PAGES.with_made("<!-- made: partitions -->")
    assert "| `phone-low` | a phone of 2014 on LTE | `mbps_up` | 6 | Huang" in PAGES.with_made("<!-- made: devices -->")
    with pytest.raises(KeyError):
        PAGES.with_made("<!-- made: nothing -->")


def test_links_of_the_repository_become_links_of_the_site() -> None:
    text = "[a](../CHANGELOG.md#new) [b](extend.md) [`orthdrop`](../src/fedfactor/methods/prism.py) [c](../src/x.py) [d](#e)"
    turned = "[a](changelog.md#new) [b](extend.md) [`orthdrop`](methods/orthdrop.md) c [d](#e)"
    assert PAGES.linked(text, "docs/faq.md") == turned
    assert (
        PAGES.linked("[a](../recipes.md) [b](https://x.org)", "docs/evidence/one.md")
        == "[a](../recipes.md) [b](https://x.org)"
    )
    assert PAGES.linked("[a](../docs/evidence/README.md)", "benchmarks/README.md") == "[a](evidence/README.md)"
    assert PAGES.linked("![a](demo.svg)", "docs/index.md") == "![a](demo.svg)"


def tracked_pages() -> list[str]:
    words = ["git", "ls-files", "*.md"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as code hosts make them."""
    found = set[str]()
    for heading in re.findall("^#+ (.*)$", without_code(text), flags=re.M):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()).replace(
            " ", "-"
        )
        found.add(next(name for name in (words, *(f"{words}-{n}" for n in range(1, 100))) if name not in found))
    return found


def without_code(text: str) -> str:
    return re.sub("^ *```.*?^ *```", "", text, flags=re.M | re.S)


@pytest.mark.parametrize("source", tracked_pages())
def test_links_work_in_the_repository_without_building_the_site(source: str) -> None:
    page = ROOT / source
    text = re.sub("`[^`]*`", "", without_code(page.read_text()))
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{source} links {target}, which does not exist"
        assert found.is_relative_to(ROOT), f"{source} links {target}, which is outside of the repository"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found.read_text()), f"{source} links {target}, which is no heading of that page"


# What pages show.


def test_the_tutorial_works_from_start_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = followed("tutorial.md", tmp_path, monkeypatch, capsys)
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert summary["rounds"] == 6 and summary["final_accuracy"] > 0.5
    assert f"Sequential {summary['final_accuracy']}" in said
    assert "torch.Size([1, 10])" in said and (tmp_path / "model.card.md").exists()
    assert "<html" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "runs" / "side" / "fedavg" / "seed-1" / "summary.json").exists()
    state = torch.load(tmp_path / "net.pt", weights_only=True)
    assert list(state) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def followed(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Write the files of a page to a folder and run its commands there; return what they print."""
    monkeypatch.chdir(folder)
    said = ""
    for language, title, body in blocks(page):
        if title and language != "text":
            Path(title).write_text(body)
        for line in body.splitlines() if language == "sh" else []:
            program, *words = shlex.split(line)
            if line == "export PYTHONPATH=.":
                monkeypatch.syspath_prepend(folder)
            elif program == "python":
                runpy.run_path(words[0], run_name="__main__")
                said += capsys.readouterr().out
            else:
                assert program == "fedfactor", line
                done = fedfactor(*words)
                assert done.exit_code == 0, (line, done.output)
                said += done.stdout
    return said


def test_three_hospitals_tune_a_transformer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one machine as the page says, then with the page's `join` commands as nodes of a grid in this process."""
    followed("hospitals.md", tmp_path, monkeypatch, capsys)
    trial, common = (
        json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("trial", "common")
    )
    assert trial["final_accuracy"] > 0.9 and 0.6 < common["final_accuracy"] < 0.7, "as the page says"
    texts = {title: body for language, title, body in blocks("hospitals.md") if language == "text" and title}

    def settings(command: str) -> dict[str, Any]:
        """Return what `--config` and `--client` of a command set, as the command line reads it."""
        words = shlex.split(command)
        found = override({}, [words[i + 1] for i, word in enumerate(words) if word == "--config"])
        named = {"client": words[words.index("--client") + 1]} if "--client" in words else {}
        options = {"data-options": json.dumps(found.pop("data-options"))} if "data-options" in found else {}
        return named | found | options

    nodes = [settings(line) for line in texts["hospitals"].splitlines()]
    assert [node["client"] for node in nodes] == ["north", "south", "west"]
    chosen = resolve(read(tmp_path / "hospitals.toml"))
    deployed = Deployment(tmp_path / "deployed", chosen, configs=nodes, **settings(texts["server"]))
    result = deployed.serve()
    scores = result.history[-1]["all"]["each"]
    assert result.summary["failures"] == 0 and min(scores) > 0.8
    (directory,) = (tmp_path / "deployed" / "node-2").glob("*/client-2")  # names are numbered in their order
    line = texts["export"].replace("state/RUN/client-2", str(directory))
    done = fedfactor(*shlex.split(line)[1:])
    assert done.exit_code == 0 and f"accuracy {scores[2]:.4f}" in done.stdout, done.output
    weights, base = read_weights(tmp_path / "west.safetensors"), torch.load(tmp_path / "base.pth", weights_only=True)
    assert torch.equal(weights["embedding.weight"], base["embedding.weight"])
    assert not torch.equal(weights["encoder.layers.0.linear1.weight"], base["encoder.layers.0.linear1.weight"])


def test_the_files_of_the_page_on_local_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = {title: body for _, title, body in blocks("training.md") if title}
    for title, body in files.items():
        Path(title).write_text(body)
    runpy.run_path("adamw.py", run_name="__main__")
    done = fedfactor("run", "adamw.toml", "--out", "run", "--quiet")
    assert done.exit_code == 0, done.output


def test_the_recipe_of_the_page_on_privacy_runs(tmp_path: Path) -> None:
    ((_, title, body),) = [block for block in blocks("privacy.md") if block[1]]
    (tmp_path / title).write_text(body)
    quick = ("--set", "train.rounds=1", "--set", "train.cohort=4", "--set", "privacy.sampling=none")
    done = fedfactor("run", title, *quick, "--out", "run", cwd=tmp_path)
    assert done.exit_code == 0 and "epsilon 7.9" in done.output, done.output


def test_the_tasks_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for title, body in [(title, body) for _, title, body in blocks("tasks.md") if title]:
        Path(title).write_text(body)
        runpy.run_path(title, run_name="__main__")
    loss, *lines = capsys.readouterr().out.splitlines()
    accuracy = next(line for line in lines if line.startswith("global: accuracy"))
    assert float(loss) < 1.4 and float(accuracy.split()[2]) > 0.9


def test_the_example_of_the_metrics_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {title: body for _, title, body in blocks("metrics.md") if title}
    (tmp_path / "prices.py").write_text(files["prices.py"])
    found = runpy.run_path(str(tmp_path / "prices.py"))["result"].summary
    assert found["best_mae"] < 0.5 and found["measured"]["global"]["reached"]["round"] <= 10
    assert "global: mae" in capsys.readouterr().out and "final_large_error" in found


@pytest.fixture
def own_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type:
    monkeypatch.setitem(registry._table, "methods", registry.entries("methods"))  # forgets it again after the test
    files = {title: body for _, title, body in blocks("extend.md") if title}
    assert len(files["own_biases.py"].strip().splitlines()) <= 35
    for title, body in files.items():
        (tmp_path / title).write_text(body)
    return module(tmp_path / "own_biases.py").OwnBiases


def test_the_method_of_the_page_passes_the_test_of_the_page(own_biases: type, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_own_biases.py"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(registry.__file__).parents[1])},
    )  # fmt: skip
    assert f"{len(PROMISES)} passed" in done.stdout, done.stdout
    assert library.list_methods("own*") == ["own_biases"]
    assert library.create_method("own_biases", power=0.3) == own_biases(power=0.3)


def test_the_method_of_the_page_does_what_it_says(own_biases: type) -> None:
    view, plan = {"w": torch.zeros(1)}, whole_plan(["w"])
    sent = [(100, torch.tensor([3.0])), (400, torch.tensor([6.0]))]
    replies = [Reply(client, 1.0, samples, plan, view, {"w": w}, {}) for client, (samples, w) in enumerate(sent)]
    mean, _ = folded(own_biases(), view, replies)
    assert mean["w"].item() == pytest.approx((10 * 3.0 + 20 * 6.0) / 30)
    setup = run(own_biases(), rounds=0).federation.setup
    private = setup.method.private_names(setup.network(1.0))
    assert private == {"conv1.bias", "bn1.bias", "bn2.bias", "hidden.bias", "fc.bias"}


def test_the_fold_of_the_page_shortens_changes(own_biases: type, tmp_path: Path) -> None:
    method = module(tmp_path / "clipped.py").Clipped(longest=2.0)
    view, plan = {"w": torch.zeros(2)}, whole_plan(["w"])
    replies = [Reply(0, 1.0, 1, plan, view, {"w": torch.tensor(w)}, {}) for w in ([3.0, 4.0], [0.0, 1.0])]
    assert folded(method, view, replies)[0]["w"].tolist() == pytest.approx([1.2 / 2, (1.6 + 1.0) / 2])
    assert run(method, rounds=1).server.round == 1


def test_the_picture_is_drawn_from_run_directories(tmp_path: Path) -> None:
    for name, size in {"wide": 4_000_000, "narrow": 500_000}.items():
        lines = [{"event": "start"}]
        for number in (1, 2):
            totals = {"bytes_up": size * number, "bytes_down": size * number}
            scores = {"global": {"1": {"accuracy": number / 2}, "0.5": {"accuracy": 0.1}}}
            lines.append({"event": "round", "round": number, "totals": totals, **scores})
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    curves = {name: PICTURE.curve(tmp_path / name) for name in ("wide", "narrow")}
    assert curves == {"wide": [(8.0, 0.5), (16.0, 1.0)], "narrow": [(1.0, 0.5), (2.0, 1.0)]}
    drawn = ET.fromstring(PICTURE.draw(curves))
    inner = PICTURE.WIDTH - PICTURE.LEFT - PICTURE.RIGHT
    paths = [node.get("d") for node in drawn.iter("{http://www.w3.org/2000/svg}path") if node.get("class") == "line"]
    middle = PICTURE.TOP + (PICTURE.HEIGHT - PICTURE.TOP - PICTURE.BOTTOM) / 2
    ends = [PICTURE.LEFT + inner * share / 20 for share in (8, 16)]  # the axis ends at 20 MB
    assert paths[0] == f"M{ends[0]} {middle}L{ends[1]} {PICTURE.TOP:.1f}"
    assert "wide: 1.000 after 16.0 MB; narrow: 1.000 after 2.0 MB" in PICTURE.draw(curves)


def test_the_committed_picture_has_the_demos_two_methods() -> None:
    text = (ROOT / "docs" / "demo.svg").read_text()
    ET.fromstring(text)
    assert re.search(r"fedavg: 0\.9\d+ after 228\.\d MB; fedpara: 0\.9\d+ after 29\.\d MB", text)


def test_the_bytes_and_seconds_of_the_evidence_are_computed(capsys: pytest.CaptureFixture[str]) -> None:
    """The script prints the numbers of the page on time."""
    costs = runpy.run_path(str(ROOT / "docs" / "evidence" / "times.py"))
    costs["main"]("fedpara/figure3-cifar10", "fedpara-0.1-iid", "500")
    *_, line = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:8] == ["6,197,952", "6,197,984", "337.9", "47.29 s", "9.46 s", "1.89 s"]
    page = (ROOT / "docs" / "evidence" / "time.md").read_text()
    assert all(number in page for number in cells[2:4])
