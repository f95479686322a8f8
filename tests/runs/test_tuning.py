"""`fedfactor compare --tune`: settings chosen for each method on validation data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import fedfactor
from fedfactor.report.comparison import csv_text, latex, lines
from fedfactor.runs.compare import SAME, Cell, CellOutcome, compare
from fedfactor.runs.directory import RunError, diverged, find_runs
from fedfactor.runs.recipe import RecipeError, values
from fedfactor.runs.tuning import Candidate, Search, Tuning, directory_name, grid
from fedfactor.task import Decider
from tests.helpers.command import fedfactor as call

TABLES: dict[str, Any] = {
    "name": "side",
    "data": {"name": "digits", "test_share": 0.8},
    "partition": {"kind": "iid", "clients": 4},
    "model": {"name": "tests.helpers.tiny:Tiny"},
    "train": {"rounds": 2, "cohort": 2, "epochs": 3, "batch_size": 10, "lr": 0.05},
    "run": {"keep_rounds": [2]},
}
ROOT = Path(__file__).parents[2]


# Candidates.


def test_values_are_read_as_in_a_recipe() -> None:
    assert values("0.01, 1,true") == [0.01, 1, True]
    assert values("[1, 2],[3]") == [[1, 2], [3]]
    assert values("constant,cosine") == ["constant", "cosine"]


def test_several_keys_make_a_grid_and_one_method_may_have_its_own() -> None:
    labels = ["fedavg", "fedpara", "fedpara@wide"]
    tune = ["train.lr=0.1,0.2", "train.weight_decay=0,1", "fedpara:train.lr=1,2,3", "fedpara@wide:method.gamma=0.1,0.5"]
    found = grid(labels, tune, ["fedpara@wide:train.weight_decay=0.5", "train.momentum=0.9"], SAME)
    assert [len(found[label]) for label in labels] == [4, 6, 4]
    assert found["fedavg"][1] == {"train.lr": 0.1, "train.weight_decay": 1}
    assert found["fedpara"][-1] == {"train.lr": 3, "train.weight_decay": 1}
    assert found["fedpara@wide"][1] == {"train.lr": 0.1, "method.gamma": 0.5}
    assert set(grid(labels, ["fedpara:train.lr=1,2"], ["train.lr=3"], SAME)) == {"fedpara"}


@pytest.mark.parametrize(
    ("tune", "words"),
    [
        (["train.lr=0.1"], r"at least two different values, got 'train\.lr=0\.1'"),
        (["train.lr=0.1,0.1"], "at least two different values"),
        (["train.lr"], "--tune takes section.key=value,value"),
        (["train.lr=1,2", "train.lr=3,4"], "train.lr is given twice"),
        (["train.momentum=0.5,0.9"], "train.momentum is given twice; tune it once, and do not set it as well"),
        (["method.gamma=1,2"], "name the method, as in --tune fedavg:method.gamma=1,2"),
        (["flanc:train.lr=1,2"], "--tune flanc:train.lr=1,2: 'flanc' is none of the compared methods"),
        (["train.rounds=1,2"], "train.rounds must be the same for all methods, so it cannot be tuned"),
        (["fedavg:partition.alpha=1,2"], "partition.alpha must be the same for all methods"),
        (["seed=1,2"], "seed must be the same for all methods"),
    ],
)
def test_what_cannot_be_tuned_is_refused(tune: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        grid(["fedavg", "fedpara"], tune, ["train.momentum=0.9"], SAME)


def test_the_best_candidate_is_chosen_and_the_first_among_equals() -> None:
    def tuning(*candidates: Candidate) -> Tuning:
        return Tuning("global", 2, 1, 0.2, candidates)

    low, one, two = (Candidate({"train.lr": lr}, score) for lr, score in ((0.1, 0.0), (0.2, 0.5), (0.3, 0.5)))
    lost, broken = (
        Candidate({"train.lr": 9}, None, True, "not finite"),
        Candidate({"train.lr": 8}, None, False, "killed"),
    )
    assert tuning(low, lost, one, two).chosen is one and tuning(lost, low).chosen is low
    falling = Tuning("global", 2, 1, 0.2, (one, lost, low, two), Decider("mae", False))
    assert falling.chosen is low and falling.as_dict()["metric"] == {"name": "mae", "higher_is_better": False}
    with pytest.raises(ValueError, match=r"all candidates of its tuning diverged \(train.lr=9\)"):
        _ = tuning(lost).chosen
    assert tuning(one, broken).failure == "tuning failed with train.lr=8: killed"  # repeated, not lost
    assert directory_name({"train.schedule": "a/b", "train.lr": 0.1}) == "train.schedule=a%2Fb,train.lr=0.1"
    with pytest.raises(RecipeError, match=r"must lie in \(0, 1\), got 1"):
        Search(share=1.0)


# Running.


def tuned(
    folder: Path, methods: list[str], *tune: str, started: list[str] | None = None, stop: int = -1, **options: Any
) -> list[CellOutcome]:
    """Compare methods after tuning them; after `stop` cells have started, Ctrl-C."""

    def on_start(cell: Cell) -> Callable[[dict[str, Any]], None]:
        names = [] if started is None else started
        if len(names) == stop:
            raise KeyboardInterrupt
        names.append(cell.label)
        return lambda event: None

    search = Search(tune, rounds=1)
    tables = {**TABLES, **options.pop("tables", {})}
    return compare(tables, methods, options.pop("seeds", [1]), folder, search=search, on_start=on_start, **options)


def chosen(outcome: CellOutcome) -> Any:
    assert outcome.tuning is not None
    return outcome.tuning.chosen.settings


def test_each_method_gets_its_choice_for_all_seeds(tmp_path: Path) -> None:
    methods, tune = ["fedavg", "fedper"], ("train.lr=1e-9,0.1", "fedper:train.momentum=0,0.5")
    found = tuned(tmp_path, methods, *tune, seeds=[1, 2])
    assert [one.cell.name for one in found] == [f"{method}, seed {seed}" for seed in (1, 2) for method in methods]
    for one in found:
        settings, tables, tuning = chosen(one), one.cell.recipe.tables, one.tuning
        assert tuning and tuning.measured == "selected_after"  # FedPer has no global model
        scores = {str(candidate): candidate.score or 0 for candidate in tuning.candidates}
        assert scores[str(tuning.chosen)] == max(scores.values()) and len(set(scores.values())) > 1
        assert {key: tables["train"][key.removeprefix("train.")] for key in settings} == settings
        assert tables["train"]["rounds"] == 2 and tables["run"]["keep_rounds"] == [2]
        assert (tables["partition"]["validation_share"], tables["partition"]["evaluate_on"]) == (0, "test")
        run = fedfactor.load(one.cell.directory)
        assert "the central test set" in run.metrics[0]["protocol"]["global"] or one.cell.method == "fedper"
        assert json.loads((one.cell.directory / "tuning.json").read_text())["chosen"] == settings
    trial = fedfactor.load(tmp_path / "tuning" / "fedavg" / "train.lr=0.1")
    assert trial.recipe.rounds.rounds == 1 and trial.recipe.tables["partition"]["seed"] == 1
    start, event = trial.metrics
    assert "training examples that clients hold out" in start["protocol"]["global"]
    assert "on the training examples that they hold out" in start["protocol"]["clients"]
    data = trial.result().federation.setup.task.data
    whole = fedfactor.load(found[0].cell.directory).result().federation.setup.task.data
    held, kept = len(data.central[1]), sum(map(len, data.train_of))
    assert data.validation and event["global"]["1"]["examples"] == held
    assert held + kept == sum(map(len, whole.train_of)) and held == pytest.approx(0.2 * (held + kept), abs=4)


def test_tuning_runs_are_no_results(tmp_path: Path) -> None:
    tuned(tmp_path, ["fedavg"], "train.lr=0.01,0.1")
    assert list(fedfactor.load(tmp_path)) == ["fedavg/seed-1"]
    assert find_runs([tmp_path, tmp_path.parent / tmp_path.name / "fedavg"]) == [tmp_path / "fedavg" / "seed-1"]
    assert len(fedfactor.load(tmp_path / "tuning")) == 2  # whoever names the folder wants them
    assert set(json.loads((tmp_path / "tuning" / "choices.json").read_text())) == {"fedavg"}


def test_a_stopped_tuning_makes_the_same_choice_and_runs_nothing_twice(tmp_path: Path) -> None:
    methods, tune = ["fedavg", "fedpara"], ("train.lr=1e-9,1e30,0.1",)
    whole, names = tuned(tmp_path / "whole", methods, *tune), list[str]()
    assert [chosen(one)["train.lr"] for one in whole] == [0.1, 0.1]
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path / "cut", methods, *tune, started=names, stop=4)
    with pytest.raises(RunError, match="contains none"):
        find_runs([tmp_path / "cut"])  # no results yet
    again = tuned(tmp_path / "cut", methods, *tune, started=names, jobs=2)  # the same bits in other processes
    assert len(names) == len(set(names)) == 8  # also the candidates that diverged
    assert sum(name.startswith("tuning fedavg, train.lr=") for name in names) == 3
    for one, other in zip(whole, again, strict=True):
        assert one.summary and other.summary and one.summary["weights_sha256"] == other.summary["weights_sha256"]
        assert one.tuning == other.tuning
    del names[:]
    tuned(tmp_path / "cut", methods, "train.lr=1e-9,1e30,0.1,1e-8", started=names)
    assert names == [f"tuning {method}, train.lr=1e-08" for method in methods]


def test_the_measurement_is_that_of_the_comparison(tmp_path: Path) -> None:
    only_global = {"evaluate": {"clients": "none"}}
    (alone,) = tuned(tmp_path / "a", ["fedavg"], "train.lr=0.01,0.1", tables=only_global)
    assert alone.tuning and alone.tuning.measured == "global"
    everyone = tuned(tmp_path / "b", ["fedavg", "local"], "train.lr=0.01,0.1", tables={"evaluate": {"clients": "all"}})
    assert [one.tuning.measured for one in everyone if one.tuning] == ["all", "all"]
    # FedPer is not tuned, and has no global model.
    found = tuned(tmp_path / "c", ["fedavg", "fedper"], "fedavg:train.lr=0.01,0.1")
    assert found[0].tuning and found[0].tuning.measured == "selected_after" and found[1].tuning is None


def test_a_method_whose_candidates_all_diverge_costs_itself_only(tmp_path: Path) -> None:
    found = tuned(tmp_path, ["fedavg", "fedpara"], "train.lr=0.05,1e30", "fedpara:train.lr=1e30,1e31")
    good, bad = found
    assert good.summary and good.tuning and [one.diverged for one in good.tuning.candidates] == [False, True]
    assert bad.summary is None and bad.failure.startswith("all candidates of its tuning diverged (train.lr=1e+30; ")
    assert not bad.cell.directory.exists()
    trial = tmp_path / "tuning" / "fedavg" / "train.lr=1e%2B30"
    assert "sent a valid reply" in str(diverged(fedfactor.load(trial).recipe, trial))
    text = latex(lines(found))
    assert r"fedavg & train.lr=1e+30 & diverged &  \\" in text and "fedpara & - & 0 & - & - & " in text


def test_a_candidate_that_fails_otherwise_is_not_a_loser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedfactor.runs import compare as module

    run = module.run

    def failing(recipe: Any, *words: Any, **options: Any) -> Any:
        if recipe.training.lr == 0.1 and recipe.rounds.rounds == 1:
            raise OSError("no space left on device")
        return run(recipe, *words, **options)

    monkeypatch.setattr(module, "run", failing)
    (found,) = tuned(tmp_path, ["fedavg"], "train.lr=1e-9,0.1")
    assert found.failure == "tuning failed with train.lr=0.1: OSError: no space left on device"
    monkeypatch.undo()
    (found,) = tuned(tmp_path, ["fedavg"], "train.lr=1e-9,0.1")
    assert found.summary and chosen(found) == {"train.lr": 0.1}


def test_a_recipe_with_a_validation_part_keeps_it(tmp_path: Path) -> None:
    partition = {**TABLES["partition"], "validation_share": 0.4}
    (found,) = tuned(tmp_path, ["fedavg"], "train.lr=0.01,0.1", tables={"partition": partition})
    assert found.tuning and found.tuning.validation_share == 0.4
    final = found.cell.recipe.tables["partition"]
    assert (final["validation_share"], final["evaluate_on"]) == (0.4, "test")


# Output.


def test_tables_and_the_report_say_what_was_chosen(tmp_path: Path) -> None:
    (tmp_path / "side.toml").write_text(tomli_w.dumps(TABLES))
    words = ("compare", tmp_path / "side.toml", "--methods", "fedavg,fedpara", "--seeds", "1", "-o", tmp_path / "out")
    words += ("--tune", "train.lr=1e-9,0.1,1e30", "--tune-rounds", 1, "--tune-share", 0.3)
    done = call(*words, "--json", cwd=ROOT)
    assert done.exit_code == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert first["tuned"] == "train.lr=0.1" and second["tuning_rounds"] == 1
    assert first["tuning_candidates_percent"].endswith("train.lr=1e+30: diverged")
    text = call(*words, cwd=ROOT).stdout
    assert "train.lr=0.1" in text and "validation %" in text and "diverged" in text
    assert "a share of 0.3 of each client's training examples was held out" in " ".join(text.split())
    text = call(*words, "--latex", cwd=ROOT).stdout
    assert "run & tuned & seeds" in text and "fedavg & train.lr=0.1 & 1 & " in text
    assert "tuning_candidates_percent" in call(*words, "--csv", cwd=ROOT).stdout
    page = (tmp_path / "out" / "report.html").read_text()
    assert "validation accuracy %" in page and "train.lr=1e+30" in page and "2 runs, 2 settings" in page
    refused = call(*words[:8], "--tune-rounds", 1, cwd=ROOT)
    assert refused.exit_code and "--tune-rounds and --tune-share need --tune" in refused.stderr


def test_without_tuning_tables_are_as_before(tmp_path: Path) -> None:
    found = lines(compare(TABLES, ["fedavg"], [1], tmp_path))
    assert "tun" not in csv_text(found) + latex(found) and not (tmp_path / "tuning").exists()


def test_figures_on_validation_data_are_called_so(tmp_path: Path) -> None:
    settings = ["partition.validation_share=0.2", "partition.evaluate_on=validation"]
    assert "Measured on validation data" in latex(lines(compare(TABLES, ["fedavg"], [1], tmp_path, settings=settings)))
