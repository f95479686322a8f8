"""Recipes: every one in the repository is complete and runs; mistakes name the key and what is legal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfactor import recipe as recipes
from fedfactor.data import Dataset
from fedfactor.models import info
from fedfactor.recipe import RecipeError, cells, merged, override, read, resolve, small
from fedfactor.run import run

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))
BASE: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"kind": "iid", "clients": 4},
    "model": {"name": "digits_cnn"},
}

CLASSES = {"cifar100": 100, "femnist": 62, "shakespeare": 80}
KINDS = {"shakespeare": "language"}


def stand_in(name: str, model: str, owners: int = 3, **_: Any) -> Dataset:
    """A data set of the right shape with four examples an owner."""
    rng, classes, network = np.random.default_rng(0), CLASSES.get(name, 10), info(model)
    count = 4 * owners
    if network.tokens:
        inputs = rng.integers(0, network.tokens, (count, *network.input_shape)).astype(np.uint8)
    else:
        inputs = rng.integers(0, 256, (count, *network.input_shape), dtype=np.uint8)
    targets = rng.integers(0, classes, count)
    ids = np.repeat(np.arange(owners), 4)
    return Dataset(
        name=name,
        train=(inputs, targets),
        test=(inputs, targets),
        class_names=tuple(map(str, range(classes))),
        kind=KINDS.get(name, "classification"),  # type: ignore[arg-type]
        train_ids=ids,
        test_ids=ids,
        owners=tuple(map(str, range(owners))),
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_cell_of_every_recipe_is_complete(path: Path) -> None:
    found = cells(read(path))
    assert found
    for name, cell in found.items():
        resolved = resolve(cell, f"{path} ({name})")
        again = resolve(_parsed(resolved.to_toml()), "written out")
        assert again.tables == resolved.tables


def _parsed(text: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(text)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_runs_two_rounds_on_a_stand_in(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(cells(read(path)).values())
    tiny = {"train": {"rounds": 2, "cohort": 1, "epochs": 1, "batch": 4}, "partition": {"clients": 3}}
    for cell in {id(cell): cell for cell in (found[0], found[-1])}.values():
        heavy = "jacobian" in cell.get("method", {}) and path.stem != "table4"  # one recipe with it is enough
        resolved = resolve(merged(merged(cell, tiny), {"method": {"jacobian": 0.0}} if heavy else {}), str(path))
        model = resolved.tables["model"]["name"]
        monkeypatch.setattr("fedfactor.run.load_data", lambda model=model, **table: stand_in(model=model, **table))
        result = run(resolved)
        assert result.summary["rounds"] == 2
        assert result.summary["totals"]["failures"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trian": {}}, "no key 'trian'; did you mean 'train'"),
        ({"train": {"roundz": 3}}, "no key 'train.roundz'; did you mean 'rounds'.*legal are"),
        ({"train": {"lr": "fast"}}, "train.lr: input should be a valid number, got 'fast'"),
        ({"train": {"rounds": 2.5}}, "train.rounds: input should be a valid integer"),
        ({"train": 3}, "train must be a section, got 3"),
        ({"method": {"name": "fedparra"}}, "no method is called 'fedparra'; did you mean 'fedpara'"),
        ({"method": {"name": "fedpara", "gama": 1}}, "no key 'method.gama'; did you mean 'gamma'"),
        ({"method": {"name": "fedpara", "gamma": "x"}}, "method.gamma: input should be a valid number, got 'x'"),
        ({"evaluate": {"clients": "som"}}, "evaluate.clients: input should be 'none', 'selected' or 'all', got 'som'"),
        ({"train": {"schedule": {"kind": "lin"}}}, "train.schedule.kind: input should be 'constant'"),
        ({"train": {"batch": 0}}, "train: batch must be a whole number, at least 1, got 0"),
        ({"codec": {"name": "topk", "share": 2.0}}, r"codec: share must lie in \(0, 1\], got 2"),
        ({"capacities": {"levels": [1.0, 0.5]}}, "must be equally long"),
        ({"partition": {"kind": "dirichlt"}}, "partition: no partition is called 'dirichlt'; did you mean 'dirichlet'"),
        ({"data": {"name": "digitz"}}, "data: no data set is called 'digitz'; did you mean 'digits'"),
        ({"partition": {"clients": "abc"}}, "partition.clients: input should be a valid integer, got 'abc'"),
        ({"partition": {"kind": "dirichlet", "alfa": 1.0}}, "no key 'partition.alfa'; did you mean 'alpha'"),
        ({"partition": {"test_share": "abc"}}, "partition.test_share: input should be a valid number"),
        ({"model": {"width": "abc"}}, "model.width: input should be a float, got 'abc'"),
        ({"model": {"widht": 2}}, "no key 'model.widht'; did you mean 'width'"),
        ({"model": {"name": "foo:bar"}}, "model.name 'foo:bar' cannot be imported"),
        ({"model": {"name": "vgg61"}}, "model: .*vgg16"),
        ({"method": {"name": "fedavg", "gamma": 0.1}}, "no key 'method.gamma'; legal are none"),
        ({"method": {"name": "fedhm"}, "optimizer": {"name": "scaffold"}}, "the basis of fedhm turns every round"),
    ],
    ids=str,
)
def test_mistakes_name_the_key_and_what_is_legal(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        resolve(merged(BASE, change), "mine.toml")


def test_a_recipe_must_say_which_data_and_model() -> None:
    for section in ("data", "model"):
        with pytest.raises(RecipeError, match=f"{section}.name is missing"):
            resolve({key: value for key, value in BASE.items() if key != section})


def test_overrides_are_toml_or_plain_words() -> None:
    changed = override(BASE, ["train.rounds=7", "method.name=fedpara", "run.keep_rounds=[1, 2]", "train.lr=1e-2"])
    assert changed["train"] == {"rounds": 7, "lr": 0.01}
    assert changed["method"]["name"] == "fedpara" and changed["run"]["keep_rounds"] == [1, 2]
    assert "train" not in BASE
    with pytest.raises(RecipeError, match=r"takes section\.key=value"):
        override(BASE, ["train.rounds"])
    with pytest.raises(RecipeError, match="name is a value, not a section"):
        override(BASE, ["data.name.x=1"])


def test_overlays_and_sweeps() -> None:
    tables = merged(BASE, {"train": {"rounds": 9, "lr": 0.5}, "small": {"train": {"rounds": 2}}})
    assert small(tables)["train"] == {"rounds": 2, "lr": 0.5}
    with pytest.raises(RecipeError, match=r"no \[small\] section"):
        small(BASE)
    swept = merged(BASE, {"sweep": {"seed": [1, 2], "cases": [{"name": "a"}, {"name": "b", "train": {"lr": 1.0}}]}})
    found = cells(swept)
    assert list(found) == ["a-seed=1", "a-seed=2", "b-seed=1", "b-seed=2"]
    assert found["b-seed=2"]["seed"] == 2 and found["b-seed=2"]["train"] == {"lr": 1.0}
    with pytest.raises(RecipeError, match="is a sweep of 4 cells"):
        resolve(swept)
    for wrong in (3, {"cases": 3}, {"train": {"lr": [1]}}):
        with pytest.raises(RecipeError, match="maps keys to lists"):
            cells(merged(BASE, {"sweep": wrong}))


def test_a_models_defaults_are_written_out() -> None:
    assert resolve(merged(BASE, {"model": {"name": "vgg16"}})).tables["model"] == {
        "name": "vgg16", "groups": 2, "dropout": 0.5, "channels": 3,
    }  # fmt: skip


def test_what_is_not_toml_says_where(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("train = [")
    with pytest.raises(RecipeError, match=r"bad.toml is not TOML"):
        read(path)
    with pytest.raises(RecipeError, match="there is no recipe"):
        read(tmp_path / "none.toml")


def test_seeds_of_partition_and_training_are_separate() -> None:
    one, two = (resolve(merged(BASE, {"seed": seed, "train": {"rounds": 0}})) for seed in (1, 2))
    assert one.training.seed == 1 and two.training.seed == 2
    assert recipes.resolve(BASE).tables["partition"]["seed"] == one.tables["partition"]["seed"] == 0
