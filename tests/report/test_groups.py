"""Means over seeds, by hand and against scipy; which runs belong together and what they are called."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from scipy import stats

from fedfactor.report.groups import group_runs, mean, t_quantile
from fedfactor.report.read import read_runs
from fedfactor.runs.directory import RunError, find_runs
from tests.helpers.made_runs import make_run


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 10, 29, 30, 99])
def test_quantiles_of_students_t(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def test_the_interval_of_a_mean() -> None:
    found = mean([0.5, 0.6, 0.7])
    assert found.value == pytest.approx(0.6) and found.count == 3
    assert found.half == pytest.approx(4.302652729696142 * 0.1 / math.sqrt(3))  # t of two degrees of freedom
    assert mean([0.5]).half is None and mean([0.5]).text(lambda x: f"{x:.1f}") == "0.5"
    assert mean([1.0, 1.0]).text(lambda x: f"{x:.1f}") == "1.0"
    assert mean([1.0, 3.0]).text(lambda x: f"{x:.1f} s") == "2.0 ± 12.7 s"


def labels(*folders: Path) -> list[tuple[str, int]]:
    return [(one.label, len(one.runs)) for one in group_runs(read_runs(find_runs(folders)))[0]]


def test_runs_that_differ_by_seed_only_are_one_group(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        make_run(tmp_path / f"a-{seed}", "fedavg", seed)
        make_run(tmp_path / f"b-{seed}", "fedpara", seed, options={"gamma": 0.1})
    assert labels(tmp_path) == [("fedavg", 3), ("fedpara", 3)]


def test_groups_are_called_by_what_tells_them_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedavg")
    make_run(tmp_path / "b", "fedpara", options={"gamma": 0.1})
    make_run(tmp_path / "c", "fedpara", options={"gamma": 0.5})
    assert labels(tmp_path) == [("fedavg", 1), ("fedpara gamma=0.1", 1), ("fedpara gamma=0.5", 1)]
    make_run(tmp_path / "d", "fedavg", sections={"codec": {"name": "fedpaq"}})
    assert labels(tmp_path)[0][0] == "fedavg codec=float32" and labels(tmp_path)[-1][0] == "fedavg codec=fedpaq"


def test_only_the_fewest_settings_are_in_a_name(tmp_path: Path) -> None:
    for alpha in (0.1, 0.5):
        other = {"train": {"lr": alpha, "momentum": 0.9}, "partition": {"alpha": alpha, "least": alpha}}
        make_run(tmp_path / f"a-{alpha}", "fedavg", sections=other)
    make_run(tmp_path / "b", "fedpara", options={"gamma": 0.1}, sections={"data": {"name": "cifar10"}})
    assert labels(tmp_path) == [("fedavg alpha=0.1", 1), ("fedavg alpha=0.5", 1), ("fedpara", 1)]


def test_the_same_seed_twice_counts_once_and_is_said(tmp_path: Path) -> None:
    make_run(tmp_path / "cut", rounds=10, done=4)
    make_run(tmp_path / "whole", rounds=10)
    groups, remarks = group_runs(read_runs(find_runs([tmp_path])))
    assert [run.name for one in groups for run in one.runs] == ["whole"]
    assert remarks == ["cut is left out: it has the same recipe and seed as whole."]


def test_folders_are_searched_and_a_run_is_taken_once(tmp_path: Path) -> None:
    make_run(tmp_path / "sweep" / "a", seed=1)
    make_run(tmp_path / "sweep" / "deep" / "b", seed=2)
    found = find_runs([tmp_path / "sweep", tmp_path / "sweep" / "a"])
    assert [run.name for run in read_runs(found)] == ["a", "deep/b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="is not a run directory and contains none"):
        find_runs([tmp_path / "empty"])


def test_the_last_line_may_be_cut_short_others_may_not(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "rou')
    assert read_runs([folder])[0].last_round == 3
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('\n{"event": "round"}\n')
    with pytest.raises(RunError, match="line 5, is not an event of a run"):
        read_runs([folder])
    (folder / "metrics.jsonl").write_text('{"event": "round"}\n')
    with pytest.raises(RunError, match="line 1, is not an event of a run"):
        read_runs([folder])
