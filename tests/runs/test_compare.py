"""`fedfactor compare`: the same clients for every method, nothing run twice, and honest intervals."""

from __future__ import annotations

import csv
import io
import json
import re
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


def test_time_to_a_target_on_a_fleet_has_an_interval_over_seeds(tmp_path: Path) -> None:
    timed = {
        **TABLES,
        "fleet": {"devices": {"phone": {"profile": "phone-low"}}},
        "evaluate": {"target": 0.05, "every": 1},
    }
    chosen = cells(timed, ["fedavg", "fedpara"], [1, 2], tmp_path)
    found = lines(run_cells(chosen))
    for line in found:
        totals = [events(cell)[-1]["totals"] for cell in chosen if cell.label == line.label]
        assert line.seconds is not None and line.seconds.half is not None
        assert line.seconds.value == pytest.approx(sum(one["simulated_seconds"] for one in totals) / 2)
        assert line.to_target is not None and line.to_target.count == 2 and line.to_target.value <= line.seconds.value
    console = Console(file=io.StringIO(), width=200)
    console.print(table(found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"GMAC\s+time\s+to 5 %\s+energy", text) and "on its simulated fleet" in text
    assert "simulated_seconds_to_target_halfwidth" in csv_text(found)
    plain = lines(run_cells(cells(TABLES, ["fedavg"], [1], tmp_path / "plain")))
    assert plain[0].seconds is None and "simulated" not in csv_text(plain)
    with pytest.raises(RecipeError, match=r"cannot be compared: fleet\.devices"):
        cells(timed, ["fedavg", "fedpara"], [1], tmp_path, settings=["fedpara:fleet.devices.phone.speed=1e9"])


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
    assert data["fedavg, seed 1"] != data["fedavg, seed 2"]  # each seed has its own partition


def test_a_setting_gives_all_seeds_the_same_partition(tmp_path: Path) -> None:
    drawn = [cell.recipe.tables["partition"]["seed"] for cell in cells(TABLES, ["fedavg"], [4, 5], tmp_path)]
    assert drawn == [4, 5]
    own = {**TABLES, "partition": {**TABLES["partition"], "seed": 7}}  # the recipe's own seed does not fix it
    for settings, expected in ((), [4, 5]), (["partition.seed=7"], [7, 7]), (["fedavg:partition.seed=7"], [7, 7]):
        found = cells(own, ["fedavg"], [4, 5], tmp_path, settings=settings)
        assert [cell.recipe.tables["partition"]["seed"] for cell in found] == expected


def test_the_capacity_that_was_trained_is_recorded(tmp_path: Path) -> None:
    expected = {"fedavg": {1.0}, "slim": {0.5}, "heterofl": {1.0, 0.5}, "pfedgate": {1.0, 0.5}}
    chosen = cells(override(TABLES, ["train.cohort=6", "train.rounds=1"]), list(expected), [1], tmp_path)
    for outcome in run_cells(chosen):
        (event,) = events(outcome.cell)
        assert set(event["capacities"]) == {1.0, 0.5}
        trained = expected[outcome.cell.method]
        assert set(event["trained_capacities"]) == trained and len(event["trained_capacities"]) == 6
        assert outcome.summary and set(outcome.summary["trained_capacities"]) == trained
        after = event["selected_after"]
        accuracy = dict(zip(after["who"], after["each"], strict=True))
        half = [accuracy[who] for who, level in zip(event["cohort"], event["capacities"], strict=True) if level == 0.5]
        assert after["at"]["0.5"] == pytest.approx(sum(half) / len(half))
        assert outcome.summary["measured"]["selected_after"]["at"] == after["at"]


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
        settings=["fedpara:method.gamma=0.3", "fedpara:train.lr=0.3", "train.lr=0.2"],
    )  # fmt: skip
    assert (found[0].recipe.method.gamma, found[0].recipe.method.tanh) == (0.3, True)
    assert found[1].recipe.method.name == "low_rank" and [cell.recipe.training.lr for cell in found] == [0.3, 0.2]
    own = {**TABLES, "method": {"name": "fedpara", "gamma": 0.7}, "train": {**TABLES["train"], "seed": 9}}
    found = cells(own, ["fedavg", "fedpara"], [4], tmp_path)
    assert [cell.recipe.method.name for cell in found] == ["fedavg", "fedpara"]
    assert found[1].recipe.method.gamma == 0.7 and [cell.recipe.training.seed for cell in found] == [4, 4]
    for words, setting in (
        ("'flanc' is none of the compared methods, fedavg, fedpara", "flanc:method.r1=1"),
        ("did you mean 'gamma'", "fedpara:method.gama=1"),
        ("there is no key 'trian'", "trian.lr=1"),
        ("name the method, as in --set fedavg:method.gamma=1", "method.gamma=1"),
        ("fedavg and fedpara cannot be compared: train.rounds is 2 and 3", "fedpara:train.rounds=3"),
    ):
        with pytest.raises(RecipeError, match=words):
            cells(own, ["fedavg", "fedpara"], [4], tmp_path, settings=[setting])
    with pytest.raises(RecipeError, match="without repetitions"):
        cells(TABLES, ["fedavg", "fedavg"], [1], tmp_path)
    twice = {**TABLES, "sweep": {"method.gamma": [0.1, 0.2]}, "method": {"name": "fedpara"}}
    with pytest.raises(
        RecipeError, match=r"several cells of the sweep use fedpara: gamma=0\.1, gamma=0\.2; choose one with --only"
    ):
        cells(twice, ["fedpara"], [1], tmp_path)
    assert cells(twice, ["fedpara"], [1], tmp_path, only="*0.2")[0].recipe.method.gamma == 0.2


def test_variants_of_a_method_stand_side_by_side(tmp_path: Path) -> None:
    found = cells(
        {**TABLES, "method": {"name": "fedpara", "tanh": True}}, ["fedpara", "fedpara@wide", "fedavg"], [1], tmp_path,
        settings=["fedpara:train.lr=0.2", "fedpara@wide:method.gamma=0.5"],
    )  # fmt: skip
    assert [cell.label for cell in found] == ["fedpara", "fedpara@wide", "fedavg"]
    assert [cell.method for cell in found] == ["fedpara", "fedpara", "fedavg"]
    assert found[1].directory == tmp_path / "fedpara@wide" / "seed-1" and found[1].recipe.method.gamma == 0.5
    assert found[0].recipe.method.gamma != 0.5 and found[0].recipe.method.tanh and found[1].recipe.method.tanh
    assert [cell.recipe.training.lr for cell in found] == [0.2, 0.05, 0.05]
    with pytest.raises(RecipeError, match=r"METHOD@NAME, such as fedpara@wide, got 'fedpara@a/b'"):
        cells(TABLES, ["fedpara@a/b"], [1], tmp_path)


# Running.


def test_processes_give_the_same_bits_and_finished_runs_stay(tmp_path: Path) -> None:
    ours, theirs = (cells(TABLES, ["fedavg", "heterofl"], [1], tmp_path / place) for place in ("a", "b"))
    started: list[str] = []

    def on_start(cell: Cell) -> Any:
        started.append(cell.name)
        return lambda event: None

    here, apart = run_cells(ours, on_start=on_start), run_cells(theirs, jobs=2)
    assert len(started) == 2 and hashes(here) == hashes(apart) and None not in [one.summary for one in here]
    more = cells(TABLES, ["fedavg", "heterofl"], [1, 2], tmp_path / "a")
    del started[:]
    again = run_cells(more, on_start=on_start)
    assert started == ["fedavg, seed 2", "heterofl, seed 2"]
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
    tables = override(TABLES, ["train.rounds=15", "train.epochs=1"])
    (tmp_path / "side.toml").write_text(tomli_w.dumps(tables))
    words = ("compare", tmp_path / "side.toml", "--methods", "fedavg", "--seeds", "1,2", "--json")
    process = subprocess.Popen(
        fedfactor_process(*words, "--jobs", 2, "-o", tmp_path / "cut"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
    )
    journals = [tmp_path / "cut" / "fedavg" / f"seed-{seed}" / "metrics.jsonl" for seed in (1, 2)]
    while process.poll() is None and not any(path.exists() and path.read_text().count("\n") > 2 for path in journals):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130 and "interrupted; run the same command again to resume" in said
    assert not all(path.with_name("summary.json").exists() for path in journals)
    again = call(*words, "-o", tmp_path / "cut", cwd=ROOT)
    assert again.exit_code == 0, again.stderr
    assert [line["seeds"] for line in json.loads(again.stdout)] == [2]
    assert (tmp_path / "cut" / "report.html").read_text().count("fedavg") > 1
    whole = run_cells(cells(tables, ["fedavg"], [1, 2], tmp_path / "whole", where="side.toml"))
    ends = [json.loads(path.with_name("summary.json").read_text()) for path in journals]
    assert [end["weights_sha256"] for end in ends] == hashes(whole)


# Summing up.


def outcome(
    method: str, seed: int, final: float, size: int, measured: tuple[str, ...] = ("global",), *settings: str,
    levels: tuple[float, ...] = (1.0,),
) -> CellOutcome:  # fmt: skip
    (cell,) = cells(TABLES, [method], [seed], Path("nowhere"), settings=settings)
    at = {f"{level:g}": final * level for level in levels}
    scores = {key: {"final": final, "best": final + 0.01, "at": at} for key in measured}
    sums = {"bytes_up": size, "bytes_down": size, "macs": 4e9, "failures": 0}
    return CellOutcome(cell, {"measured": scores, "trained_capacities": list(levels), **sums})


def test_lines_by_hand() -> None:
    outcomes = [outcome("fedavg", 1, 0.8, 4_000_000), outcome("fedavg", 2, 0.9, 4_000_000)]
    outcomes += [outcome("fedpara", 1, 0.7, 1_000_000), outcome("fedpara", 2, 0.7, 1_000_000)]
    first, second = lines(outcomes)
    assert first.score and second.score
    # Of two values: t of one degree of freedom times half their distance.
    assert (first.score.value, first.score.half) == (pytest.approx(0.85), pytest.approx(12.7062047 * 0.05))
    assert (second.score.value, second.score.half) == (pytest.approx(0.7), pytest.approx(0))
    assert (first.ratio, second.ratio, second.bytes) == (1.0, 4.0, 2_000_000)
    rows = list(csv.DictReader(io.StringIO(csv_text([first, second]))))
    assert float(rows[0]["accuracy_mean"]) == pytest.approx(0.85) and rows[1]["bytes_ratio"] == "4.0"
    text = latex([first, second])
    assert r"fedpara & 2 & 70.00 $\pm$ 0.00 & 71.00 $\pm$ 0.00 & 2 & 4.00x & 4 \\" in text
    assert r"accuracy \%" in text and "\n\\begin{tabular}{lrrrrrr}\n" in text
    assert text.startswith("% Test data: central. Trained capacity: 1. Mean")
    assert "over seeds, each with its own split of the data; bytes against FedAvg's" in text
    narrow = Console(file=io.StringIO(), width=80)
    narrow.print(table([first, second]))
    assert "85.00 ± 63.53" in narrow.file.getvalue()  # type: ignore[attr-defined]  # nothing is cut


def test_another_metric_has_its_name_and_no_percent() -> None:
    found = outcome("fedavg", 1, 12.3456, 4_000_000)
    assert isinstance(found.summary, dict)
    found.summary["metric"] = {"name": "mae", "higher_is_better": False}
    text = latex(lines([found]))
    assert "mae & best &" in text and "12.35 & 12.36" in text and r"\%" not in text
    assert "mae_mean" in csv_text(lines([found]))
    found.summary["measured"]["global"] |= {"target": 12.5, "reached": {"simulated_seconds": 90.0}}
    found.summary["simulated_seconds"] = 120.0
    timed = latex(lines([found]))
    assert "time & to mae 12.5" in timed and "90 s" in timed and r"\%" not in timed
    mixed = latex(lines([found, outcome("fedpara", 1, 0.7, 1_000_000)]))
    assert "score & best" in mixed and "mae 12.35" in mixed and r"accuracy \% 70.00" in mixed
    with pytest.raises(RecipeError, match=r"evaluate\.best is '' and 'loss'"):
        cells(TABLES, ["fedavg", "fedpara"], [1], Path("nowhere"), settings=["fedpara:evaluate.best=loss"])


def test_operations_that_were_not_counted_stay_empty() -> None:
    known, unknown = outcome("fedavg", 1, 0.8, 4), outcome("fedper", 1, 0.9, 2)
    assert unknown.summary is not None
    unknown.summary["macs"] = None
    found = lines([known, unknown])
    assert [line.macs for line in found] == [4e9, None]
    assert latex(found).count(r" & - \\") == 1 and csv_text(found).splitlines()[2].split(",")[-3] == ""


def test_methods_are_compared_by_what_all_of_them_have() -> None:
    both, own = ("global", "selected_after"), ("selected_after",)
    found = lines([outcome("fedavg", 1, 0.8, 4, both), outcome("fedper", 1, 0.9, 2, own)])
    assert [line.measured for line in found] == ["cohort's own, just trained"] * 2
    found = lines([outcome("fedavg", 1, 0.8, 4, ("global",)), outcome("fedper", 1, 0.9, 2, own)])
    assert [line.measured for line in found] == ["central", "cohort's own, just trained"]
    assert " & cohort's own, just trained & " in latex(found)
    assert found[0].score and found[0].score.half is None  # one seed says nothing of others


def test_capacities_have_their_own_accuracy() -> None:
    widths = {"levels": (1.0, 0.5)}
    outcomes = [outcome("fedavg", seed, 0.8, 4) for seed in (1, 2)]
    outcomes += [outcome("heterofl", seed, 0.6, 2, **widths) for seed in (1, 2)]
    found = lines(outcomes)
    assert [line.trained for line in found] == [(1.0,), (1.0, 0.5)]
    rows = list(csv.DictReader(io.StringIO(csv_text(found))))
    assert [row["trained_capacities"] for row in rows] == ["1", "1, 0.5"]
    assert [row["accuracy_at_0.5_mean"] for row in rows] == ["", "0.3"]
    text = latex(found)
    assert "run & seeds & trained & " in text and "heterofl & 2 & 1, 0.5 & 60.00" in text
    assert r"fedavg & 80.00 $\pm$ 0.00 & - \\" in text
    assert r"heterofl & 60.00 $\pm$ 0.00 & 30.00 $\pm$ 0.00 \\" in text
    assert "the server's model of that capacity; -: there is none" in text
    own = latex(lines([outcome("heterofl", 1, 0.6, 2, ("all",), **widths)]))
    assert "the clients of that capacity, whatever capacity they trained" in own
    narrow = Console(file=io.StringIO(), width=60)
    narrow.print(table(found))
    assert "…" not in narrow.file.getvalue()  # type: ignore[attr-defined]  # nothing is cut


def test_intervals_say_whether_they_include_the_split_and_variants_share_no_reference() -> None:
    fixed = "partition.seed=0"
    found = lines([outcome("fedavg", seed, 0.8, 4, ("global",), fixed) for seed in (1, 2)])
    assert (found[0].seeds, found[0].splits) == (2, 1)
    assert "over seeds on the same split of the data" in latex(found)
    two = lines([outcome("fedavg", 1, 0.8, 4), outcome("fedavg@other", 1, 0.8, 8)])
    assert [line.ratio for line in two] == [2, 1] and "against the largest run's" in latex(two)


def test_cells_of_a_sweep_are_summarised_over_their_seeds(tmp_path: Path) -> None:
    tables = {**override(TABLES, ["train.rounds=1"]), "sweep": {"train.lr": [0.05, 0.1], "seed": [1, 2]}}
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps(tables))
    words = ("run", tmp_path / "sweep.toml", "--out", tmp_path / "runs")
    ran = call(*words, "--csv", cwd=ROOT)
    assert ran.exit_code == 0, ran.stderr
    rows = list(csv.DictReader(io.StringIO(ran.stdout)))
    assert [(row["run"], row["method"], row["seeds"]) for row in rows] == [
        ("lr=0.05", "fedavg", "2"),
        ("lr=0.1", "fedavg", "2"),
    ]
    ended = [
        run.summary["final_accuracy"] for name, run in fedfactor.load(tmp_path / "runs").items() if "lr=0.1" in name
    ]
    assert float(rows[1]["accuracy_mean"]) == pytest.approx(sum(ended) / 2)
    again = call(*words, "--resume", "--latex", "--profile", cwd=ROOT)
    assert again.stdout.count("lr=0.") == 2 and "seconds of" not in again.stdout and "seconds of" in again.stderr
    refused = call(*words, "--latex", "--csv", cwd=ROOT)
    assert refused.exit_code == 2 and "exclude each other" in refused.stderr
