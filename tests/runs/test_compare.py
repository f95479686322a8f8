"""`fedfactor compare`: the same clients for every method, nothing run twice, and honest intervals."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rich.console import Console

import fedfactor
from fedfactor.report.comparison import csv_text, latex, lines, table
from fedfactor.runs.compare import Cell, CellOutcome, cells, run_cells
from fedfactor.runs.directory import RunError
from fedfactor.runs.recipe import RecipeError, override
from tests.helpers.command import fedfactor as call
from tests.helpers.command import fedfactor_process

TABLES: dict[str, Any] = {
    "name": "side",
    "data": {"name": "digits", "test_share": 0.8},
    "partition": {"kind": "dirichlet", "clients": 6, "alpha": 0.5},
    "model": {"name": "tests.helpers.tiny:Tiny"},
    "capacities": {"levels": [1.0, 0.5], "shares": [0.5, 0.5]},
    "train": {"rounds": 2, "cohort": 3, "epochs": 2, "batch_size": 20, "lr": 0.05},
}
METHODS = ("fedavg", "fedpara", "heterofl")
ROOT = Path(__file__).parents[2]


def events(cell: Cell) -> list[dict[str, Any]]:
    return [event for event in fedfactor.load(cell.directory).metrics if event["event"] == "round"]


def hashes(outcomes: list[CellOutcome]) -> list[str]:
    return [str(outcome.summary and outcome.summary["weights_sha256"]) for outcome in outcomes]


# The same for every method.


def test_methods_of_a_seed_see_the_same_clients_and_data(tmp_path: Path) -> None:
    chosen = cells(TABLES, METHODS, [1, 2], tmp_path)
    assert [cell.directory for cell in chosen][:2] == [tmp_path / "fedavg" / "seed-1", tmp_path / "fedpara" / "seed-1"]
    run_cells(chosen)
    cohorts = {cell.name: [event["cohort"] for event in events(cell)] for cell in chosen}
    capacities = {cell.name: [event["capacities"] for event in events(cell)] for cell in chosen}
    data = {
        cell.name: fedfactor.load(cell.directory).result().federation.setup.task.data.fingerprint for cell in chosen
    }
    for seed in (1, 2):
        names = [f"{method}, seed {seed}" for method in METHODS]
        for seen in (cohorts, capacities, data):
            assert all(seen[name] == seen[names[0]] for name in names)
    assert cohorts["fedavg, seed 1"] != cohorts["fedavg, seed 2"]


def test_what_would_differ_is_refused(tmp_path: Path) -> None:
    cases = [
        {"name": "a", "method": {"name": "fedavg"}},
        {"name": "b", "method": {"name": "fedpara"}, "partition": {"alpha": 0.1}},
    ]
    with pytest.raises(RecipeError, match=r"fedavg and fedpara cannot be compared: partition is .*alpha"):
        cells({**TABLES, "sweep": {"cases": cases}}, ["fedavg", "fedpara"], [1], tmp_path)


def test_settings_of_a_method_come_from_the_recipe_or_from_the_command(tmp_path: Path) -> None:
    cases = [{"name": "a", "method": {"name": "fedpara", "gamma": 0.4, "tanh": True}}]
    found = cells(
        {**TABLES, "sweep": {"cases": cases}}, ["fedpara", "low_rank"], [1], tmp_path,
        settings=["train.lr=0.2"], method_settings=["fedpara.gamma=0.3"],
    )  # fmt: skip
    assert (found[0].recipe.method.gamma, found[0].recipe.method.tanh) == (0.3, True)
    assert found[1].recipe.method.name == "low_rank" and [cell.recipe.training.lr for cell in found] == [0.2, 0.2]
    own = {**TABLES, "method": {"name": "fedpara", "gamma": 0.7}, "train": {**TABLES["train"], "seed": 9}}
    found = cells(own, ["fedavg", "fedpara"], [4], tmp_path)
    assert [cell.recipe.method.name for cell in found] == ["fedavg", "fedpara"]
    assert found[1].recipe.method.gamma == 0.7 and [cell.recipe.training.seed for cell in found] == [4, 4]
    for words, options in (
        ("one of fedavg, fedpara, got 'flanc.r1=1'", {"method_settings": ["flanc.r1=1"]}),
        ("did you mean 'gamma'", {"method_settings": ["fedpara.gama=1"]}),
        ("--set gamma|there is no key 'trian'", {"settings": ["trian.lr=1"]}),
    ):
        with pytest.raises(RecipeError, match=words):
            cells(own, ["fedavg", "fedpara"], [4], tmp_path, **options)
    with pytest.raises(RecipeError, match="without repetitions"):
        cells(TABLES, ["fedavg", "fedavg"], [1], tmp_path)
    twice = {**TABLES, "sweep": {"method.gamma": [0.1, 0.2]}, "method": {"name": "fedpara"}}
    with pytest.raises(
        RecipeError, match=r"several cells of the sweep use fedpara: gamma=0\.1, gamma=0\.2; choose one with --only"
    ):
        cells(twice, ["fedpara"], [1], tmp_path)
    assert cells(twice, ["fedpara"], [1], tmp_path, only="*0.2")[0].recipe.method.gamma == 0.2


# Running.


def test_processes_give_the_same_bits_and_finished_runs_stay(tmp_path: Path) -> None:
    ours, theirs = (cells(TABLES, ["fedavg", "heterofl"], [1, 2], tmp_path / place) for place in ("a", "b"))
    started: list[str] = []

    def on_start(cell: Cell) -> Any:
        started.append(cell.name)
        return lambda event: None

    here, apart = run_cells(ours, on_start=on_start), run_cells(theirs, jobs=2)
    assert len(started) == 4 and hashes(here) == hashes(apart) and None not in [one.summary for one in here]
    more = cells(TABLES, ["fedavg", "heterofl", "fedpara"], [1, 2], tmp_path / "a")
    del started[:]
    again = run_cells(more, on_start=on_start)
    assert started == ["fedpara, seed 1", "fedpara, seed 2"]
    assert {one.cell.name: one.summary for one in here}.items() <= {one.cell.name: one.summary for one in again}.items()
    with pytest.raises(RunError, match=r"started with another recipe: train\.lr was 0\.05 and is now 0\.1"):
        run_cells(cells(TABLES, ["fedavg"], [1], tmp_path / "a", settings=["train.lr=0.1"]))


def test_a_run_that_fails_costs_itself_only(tmp_path: Path) -> None:
    chosen = cells(TABLES, ["fedavg", "local"], [1], tmp_path)
    broken = cells(TABLES, ["fedavg"], [2], tmp_path, settings=["train.lr=1e30"])
    for jobs in (1, 2):
        found = run_cells([*broken, *chosen], jobs=jobs)
        assert "is no longer finite" in found[0].failure or "sent a valid reply" in found[0].failure
        assert found[0].summary is None and found[1].summary and found[2].summary
    line = lines(found)[0]
    assert line.seeds == 1 and line.failed[0].startswith("seed 2: ")


def test_an_interrupted_comparison_carries_on_to_the_same_end(tmp_path: Path) -> None:
    tables = override(TABLES, ["train.rounds=15"])
    (tmp_path / "side.toml").write_text(tomli_w.dumps(tables))
    words = ("compare", tmp_path / "side.toml", "--methods", "heterofl", "--seeds", "1,2", "--json")
    process = subprocess.Popen(
        fedfactor_process(*words, "--jobs", 2, "-o", tmp_path / "cut"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
    )
    journals = [tmp_path / "cut" / "heterofl" / f"seed-{seed}" / "metrics.jsonl" for seed in (1, 2)]
    while process.poll() is None and not any(path.exists() and path.read_text().count("\n") > 2 for path in journals):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130 and "interrupted; run the same command again to resume" in said
    assert not all(path.with_name("summary.json").exists() for path in journals)
    again = call(*words, "-o", tmp_path / "cut", cwd=ROOT)
    assert again.exit_code == 0, again.stderr
    assert [line["seeds"] for line in json.loads(again.stdout)] == [2]
    assert (tmp_path / "cut" / "report.html").read_text().count("heterofl") > 1
    whole = run_cells(cells(tables, ["heterofl"], [1, 2], tmp_path / "whole", where="side.toml"))
    ends = [json.loads(path.with_name("summary.json").read_text()) for path in journals]
    assert [end["weights_sha256"] for end in ends] == hashes(whole)


# Summing up.


def outcome(method: str, seed: int, final: float, size: int, measured: tuple[str, ...] = ("global",)) -> CellOutcome:
    (cell,) = cells(TABLES, [method], [seed], Path("nowhere"))
    scores = {key: {"final": final, "best": final + 0.01} for key in measured}
    return CellOutcome(cell, {"measured": scores, "bytes_up": size, "bytes_down": size, "macs": 4e9, "failures": 0})


def test_lines_by_hand() -> None:
    outcomes = [outcome("fedavg", 1, 0.8, 4_000_000), outcome("fedavg", 2, 0.9, 4_000_000)]
    outcomes += [outcome("fedpara", 1, 0.7, 1_000_000), outcome("fedpara", 2, 0.7, 1_000_000)]
    first, second = lines(outcomes)
    assert first.accuracy and second.accuracy
    # Of two values: t of one degree of freedom times half their distance.
    assert (first.accuracy.value, first.accuracy.half) == (pytest.approx(0.85), pytest.approx(12.7062047 * 0.05))
    assert (second.accuracy.value, second.accuracy.half) == (pytest.approx(0.7), pytest.approx(0))
    assert (first.ratio, second.ratio, second.bytes) == (1.0, 4.0, 2_000_000)
    assert table([first, second]).row_count == 2
    rows = list(csv.DictReader(io.StringIO(csv_text([first, second]))))
    assert float(rows[0]["accuracy_mean"]) == pytest.approx(0.85) and rows[1]["bytes_ratio"] == "4.0"
    text = latex([first, second])
    assert r"fedpara & 2 & 70.00 $\pm$ 0.00 & 71.00 $\pm$ 0.00 & 2 & 4.00x & 4 \\" in text
    assert r"accuracy \%" in text and "\n\\begin{tabular}{lrrrrrr}\n" in text
    assert text.startswith("% Test data: central. Mean")
    narrow = Console(file=io.StringIO(), width=80)
    narrow.print(table([first, second]))
    assert "85.00 ± 63.53" in narrow.file.getvalue()  # type: ignore[attr-defined]  # nothing is cut


def test_methods_are_compared_by_what_all_of_them_have() -> None:
    both, own = ("global", "selected_after"), ("selected_after",)
    found = lines([outcome("fedavg", 1, 0.8, 4, both), outcome("fedper", 1, 0.9, 2, own)])
    assert [line.measured for line in found] == ["cohort's own, just trained"] * 2
    found = lines([outcome("fedavg", 1, 0.8, 4, ("global",)), outcome("fedper", 1, 0.9, 2, own)])
    assert [line.measured for line in found] == ["central", "cohort's own, just trained"]
    assert " & cohort's own, just trained & " in latex(found)
    assert found[0].accuracy and found[0].accuracy.half is None  # one seed says nothing of others
