"""Runs on map-style datasets: from Python, in recipes, in worker processes, resumed and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, TensorDataset

import fedfactor
from fedfactor.data import Datasets, federated
from fedfactor.engines import Pool
from fedfactor.registry import create
from fedfactor.runs.execute import run
from fedfactor.runs.recipe import RecipeError, resolve
from fedfactor.server.result import Result
from tests.helpers.sequences import Bag, Sequences, datasets, doubled, held_out, owners, padded
from tests.helpers.tiny import METHODS, Tiny, data

HERE = "tests.helpers.sequences"
SETTINGS: dict[str, Any] = {"collate": padded, "lr": 0.5, "epochs": 2, "batch_size": 8, "rounds": 2}


def simulated(given: Any = None, **changes: Any) -> Result:
    return fedfactor.simulate(Bag, given or datasets(), **{"test": held_out(), **SETTINGS, **changes})


def test_one_dataset_per_client_with_ragged_sequences_learns() -> None:
    result = simulated(rounds=6, evaluate_clients="all")
    assert [len(part) for part in result.federation.setup.task.data.train_of] == [20, 21, 22, 23]
    last = result.history[-1]
    assert last["global"]["1"]["examples"] == 60 and last["all"]["clients"] == 4
    assert last["loss"] < 0.8 * result.history[1]["loss"] and last["all"]["accuracy"] > 0.6
    assert result.summary["data_identified_by"] == "a sample of 64 of 86 examples"
    assert "failures 0" in str(result)


def test_padding_does_not_change_the_outputs() -> None:
    model, examples = Bag().eval(), [Sequences(0)[i] for i in range(6)]
    alone = torch.cat([model(**padded([example])).logits for example in examples])
    torch.testing.assert_close(model(**padded(examples)).logits, alone)


def test_tensors_in_a_dataset_train_like_tensors() -> None:
    """Same split, same batches: only the way examples are read differs."""
    arrays = data()
    assert isinstance(arrays.train, tuple)
    x, y = arrays.train
    parts = [TensorDataset(x[part], y[part]) for part in arrays.train_of]
    one = fedfactor.simulate(Tiny, arrays, rounds=2)
    two = fedfactor.simulate(Tiny, parts, rounds=2)
    assert one.summary["weights_sha256"] == two.summary["weights_sha256"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_reads_mappings_or_says_why_not(method: str) -> None:
    lora = {"rank": 2} if getattr(create("methods", method), "rank", 0) > 2 else {}  # the classifier has two rows
    try:
        result = simulated(method=create("methods", method, **lora), rounds=1)
    except ValueError as error:
        assert method in {"fedbn", "fedpara", "flanc", "pfedpara", "pfedgate", "pufferfish"}, error
    else:
        assert not result.history[-1]["failures"] and result.summary["macs"]


def test_workers_compute_the_same_bits_from_random_examples() -> None:
    given = {"test": held_out(noisy=True), "evaluate_clients": "all", "evaluate_batch_size": 10, "method": "fedrod"}
    inline = simulated(datasets(noisy=True), **given)
    with Pool(workers=2) as pool:
        parallel = simulated(datasets(noisy=True), engine=pool, **given)
    for key in ("weights_sha256", "private_sha256"):
        assert inline.summary[key] == parallel.summary[key]
    for key in ("global", "all", "selected_after"):
        assert inline.history[-1][key] == parallel.history[-1][key]


def test_one_dataset_is_split_evenly_or_by_class() -> None:
    whole = ConcatDataset(datasets())
    even = simulated(whole, test=Sequences(9), clients=3)
    assert [len(part) for part in even.federation.setup.task.data.train_of] == [29, 29, 28]
    skewed = simulated(whole, test=None, clients=3, alpha=0.1).federation.setup.task.data
    assert sum(len(part) for part in skewed.train_of) == 86 and skewed.central is None
    shares = [skewed.train.targets()[part].float().mean() for part in skewed.train_of]  # type: ignore[union-attr]
    assert max(shares) - min(shares) > 0.3


def test_a_run_resumes_only_with_the_same_datasets_and_loss(tmp_path: Path) -> None:
    once = simulated(rounds=3, directory=tmp_path / "once", loss=doubled, kind="classification")
    simulated(rounds=2, directory=tmp_path / "twice", loss=doubled, kind="classification")
    again = simulated(rounds=3, directory=tmp_path / "twice", loss=doubled, kind="classification")
    assert once.summary["weights_sha256"] == again.summary["weights_sha256"]
    with pytest.raises(ValueError, match=r"loss was tests\.helpers\.sequences:doubled and is now"):
        simulated(rounds=4, directory=tmp_path / "twice", loss=lambda o, b: o.loss, kind="classification")
    for changed in ([*datasets(3), Sequences(50, 23)], [*datasets(3), Sequences(3, 24)]):
        with pytest.raises(ValueError, match=r"started with other settings: .*inputs was"):
            simulated(changed, rounds=4, directory=tmp_path / "twice", loss=doubled, kind="classification")
    with pytest.raises(ValueError, match=r"started with other settings: test data was"):
        simulated(test=held_out()[::-1], rounds=4, directory=tmp_path / "twice", loss=doubled, kind="classification")


def test_models_of_a_run_open_without_the_data(tmp_path: Path) -> None:
    result = simulated(directory=tmp_path / "run", method="fedper", epochs=2)
    opened = fedfactor.load(tmp_path / "run", model=Bag)
    batch = padded([Sequences(5)[i] for i in range(4)])
    assert torch.equal(opened.model(client=1).eval()(**batch).logits, result.client_model(1).eval()(**batch).logits)


def recipe(**sections: Any) -> Any:
    tables = {
        "data": {"name": f"{HERE}:owners", "clients": 3}, "partition": {"kind": "natural"},
        "model": {"name": f"{HERE}:Bag"}, "train": {"rounds": 2, "lr": 0.5, "batch_size": 8},
        "evaluate": {"clients": "all"},
    }  # fmt: skip
    return resolve({**tables, **sections})


def test_a_recipe_names_datasets_and_loss(tmp_path: Path) -> None:
    result = run(recipe(), tmp_path / "plain")
    own = run(recipe(objective={"loss": f"{HERE}:doubled", "kind": "classification"}), tmp_path / "own")
    assert result.history[-1]["all"]["clients"] == own.history[-1]["all"]["clients"] == 3
    assert own.history[1]["loss"] > 1.5 * result.history[1]["loss"]
    assert fedfactor.load(tmp_path / "own").recipe.tables["objective"]["loss"] == f"{HERE}:doubled"
    assert fedfactor.load(tmp_path / "own").task["identified_by"] == "a sample of 63 of 63 examples"


def test_mistakes_in_an_objective_are_named() -> None:
    with pytest.raises(RecipeError, match=r"objective.loss .*has no attribute 'tripled'"):
        recipe(objective={"loss": f"{HERE}:tripled"})
    with pytest.raises(RecipeError, match=r"objective.kind should be .*'regression' or 'custom', got 'ranking'"):
        recipe(objective={"kind": "ranking"})
    assert recipe().tables["objective"] == {"kind": "", "loss": ""}


def test_owners_and_classes_of_datasets_in_partitions() -> None:
    natural = federated(owners(), "natural")
    assert natural.clients == 4 and [len(part) for part in natural.test_of or []] == [15] * 4
    held = federated(Datasets(datasets(), collate=padded), "natural", test_share=0.25)
    assert held.clients == 4 and all(0 < len(part) < 8 for part in held.test_of or [])
    common = federated(Datasets(datasets(), Sequences(7), padded), "natural")
    assert len(common.central or ()) == 20 and common.own_test(0) is None, "no client has test data of its own"
    shards = federated(owners(), "shards", clients=2, shards_per_client=1)
    labels = [shards.train.targets()[part].float().mean() for part in shards.train_of]  # type: ignore[union-attr]
    assert max(labels) > 0.5 and min(labels) == 0
    with pytest.raises(ValueError, match="has no classes to split by"):
        federated(Datasets(Sequences(0), kind="regression", collate=padded), "dirichlet")
    with pytest.raises(ValueError, match="4 training datasets and 3 of test data"):
        Datasets(datasets(4), held_out(3), padded)


def test_arguments_that_do_not_go_together() -> None:
    x, y = torch.randn(20, 4), torch.randint(2, (20,))
    for message, given, changes in (
        ("alpha splits one dataset", datasets(), {"alpha": 0.5}),
        ("leave out test, alpha and collate", data(), {"collate": padded}),
        ("inputs and targets need none", (x, y), {"collate": padded}),
    ):
        with pytest.raises(TypeError, match=message):
            fedfactor.simulate(nn.Linear(4, 2), given, **changes)
    with pytest.raises(ValueError, match="4 training datasets, one per client, but 3 of test data"):
        simulated(test=held_out(3))
    with pytest.raises(ValueError, match="clients is 5, but the data are split over 4 already"):
        simulated(clients=5)
    with pytest.raises(ValueError, match="targets are not one class per example: leave alpha out"):
        fedfactor.simulate(nn.Linear(4, 1), (x, x[:, 0]), kind="regression", alpha=0.5)


def test_a_dataset_that_shrinks_fails_its_client_and_is_named() -> None:
    given = datasets()

    def shrink(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 1:
            given[2].items.pop()

    result = simulated(given, test=None, on_event=shrink)
    [failure] = result.history[-1]["failures"]
    assert failure["client"] == 2 and "had 22 examples when the run began and has 21 now" in failure["reason"]
