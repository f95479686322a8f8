from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fedfactor import registry
from fedfactor.data import Dataset, ImageTransform, Tokens, counts, draw, federated, load
from fedfactor.data.clients import FederatedData
from fedfactor.data.partitions import Dirichlet, Partition, View, kinds
from fedfactor.registry import create, register
from tests.helpers import made_data as make


def dataset(train: int = 400, test: int = 100, classes: int = 4, **extra: Any) -> Dataset:
    def examples(count: int, seed: int) -> tuple[Any, Any]:
        return make.pixels(count, 1, 4, 4, seed=seed), np.arange(count) % classes

    return Dataset("made", examples(train, 1), examples(test, 2), tuple("abcdefgh"[:classes]), **extra)


def same(a: FederatedData, b: FederatedData) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.train_of, b.train_of, strict=True))


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "shards", "classes", "equal-dirichlet", "dirichlet-pair"])
def test_clients_test_on_what_they_train_on(kind: str) -> None:
    data = dataset()
    found = federated(data, kind, clients=5, seed=1)
    assert found.clients == 5
    assert found.train[0].dtype == torch.uint8
    assert found.central is not None and len(found.central[1]) == 100
    assert same(found, federated(data, {"kind": kind, "clients": 5}, seed=1))
    assert not same(found, federated(data, kind, clients=5, seed=2))
    mix, own = counts(found, 4), counts(found, 4, test=True)
    assert ((own > 0) <= (mix > 0)).all()
    assert (own.sum(1) > 0).all()
    gap = mix / mix.sum(1, keepdims=True) - own / own.sum(1, keepdims=True)
    assert np.abs(gap).max() <= 1 / own.sum(1).min() + 0.02
    x, y = found.of(3)
    rows = found.train_of[3].numpy()
    np.testing.assert_array_equal(x.numpy(), data.train[0][rows])
    np.testing.assert_array_equal(y.numpy(), data.train[1][rows])
    assert federated(data, kind, clients=5, own_test=False).test_of is None


def test_arrays_are_not_copied() -> None:
    data = dataset()
    found = federated(data, "iid", clients=3)
    assert found.train[0].data_ptr() == data.train[0].ctypes.data
    assert found.central is not None and found.central[0].data_ptr() == data.test[0].ctypes.data


def test_transform_comes_from_the_data_set() -> None:
    data = dataclasses.replace(dataset(), crop=2, norm="half")
    assert federated(data, clients=2).transform == ImageTransform((0.5,), (0.5,), crop=2)
    assert federated(data, clients=2, transform=Tokens()).transform == Tokens()


def test_a_missing_test_set_is_held_out_by_class() -> None:
    data = dataset(test=0)
    found = federated(data, "iid", clients=4, test_share=0.25)
    assert found.central is not None
    assert torch.bincount(found.central[1]).tolist() == [25, 25, 25, 25]
    assert sum(len(part) for part in found.train_of) == 300
    used = torch.cat(list(found.train_of))
    held = np.setdiff1d(np.arange(400), used.numpy())
    np.testing.assert_array_equal(found.central[0].numpy(), data.train[0][held])


def test_owners_share_train_and_test() -> None:
    data = dataset(train_ids=np.arange(400) // 40, test_ids=np.arange(100) // 10, owners=tuple("0123456789"))
    found = federated(data, "natural")
    assert found.clients == 10
    for client in range(10):
        own = found.own_test(client)
        assert own is not None
        np.testing.assert_array_equal(own[0].numpy(), data.test[0][client * 10 : client * 10 + 10])
    some = federated(data, "natural", clients=2, ids_per_client=3, seed=4)
    assert [len(part) for part in some.train_of] == [120, 120]
    assert some.central is not None and len(some.central[1]) == 60


def test_owners_without_test_examples_hold_some_out() -> None:
    data = dataset(
        train_ids=np.arange(400) // 40, test_ids=np.arange(100) // 10 + 10, owners=tuple("abcdefghijklmnopqrst")
    )
    found = federated(data, "natural", clients=4, seed=1)
    assert [len(part) for part in found.train_of] == [32] * 4
    assert found.test_of is not None and [len(part) for part in found.test_of] == [8] * 4
    assert found.central is not None and len(found.central[1]) == 32
    own = found.own_test(0)
    assert own is not None
    mine = found.train_of[0].numpy()
    owner = int(mine[0]) // 40
    left = np.setdiff1d(np.arange(owner * 40, owner * 40 + 40), mine)
    np.testing.assert_array_equal(own[0].numpy(), data.train[0][left])
    assert len(federated(data, "iid", clients=4).central[1]) == 100  # type: ignore[index]


def test_ordered_owners_hold_out_their_last() -> None:
    ids = np.repeat([0, -1, 1], [50, 5, 50])
    text = np.arange(105, dtype=np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(np.append(text, np.zeros(2, np.uint8)), 3, writeable=True)
    empty = np.empty((0, 3), np.uint8), np.empty(0, np.int64)
    data = Dataset(
        "talk", (windows, text.astype(np.int64) % 4), empty, tuple("abcd"), "language",
        train_ids=ids, test_ids=np.empty(0, np.int64), owners=("x", "y"), ordered=True, gap=2,
    )  # fmt: skip
    found = federated(data, "natural")
    assert found.train_of[0].tolist() == list(range(40))
    own = found.own_test(0)
    assert own is not None
    assert own[0][:, 0].tolist() == list(range(42, 50))
    assert found.of(1)[0][0].tolist() == [55, 56, 57]
    assert found.transform == Tokens()
    pooled = federated(data, "iid", clients=4, test_limit=5)
    assert pooled.central is not None and len(pooled.central[1]) == 5
    assert sum(len(part) for part in pooled.train_of) == 80


def test_read_from_files_to_a_batch(tmp_path: Any) -> None:
    make.cifar10(tmp_path)
    found = federated(load("cifar10", tmp_path, partial=True, crop=4, flip=True), "iid", clients=4)
    x, y = found.of(0)
    batch = found.transform.train(x, torch.Generator().manual_seed(0))
    assert batch.shape == (5, 3, 32, 32) and batch.dtype == torch.float32
    assert y.dtype == torch.int64


def test_mistakes_name_what_there_is() -> None:
    with pytest.raises(ValueError, match="no partition is called 'dirichle'; did you mean 'dirichlet'"):
        federated(dataset(), "dirichle")
    with pytest.raises(ValueError, match="partition dirichlet has no field 'alhpa'; did you mean 'alpha'"):
        federated(dataset(), "dirichlet", alhpa=1.0)
    with pytest.raises(ValueError, match="this data set has no natural owners"):
        federated(dataset(), "natural")
    with pytest.raises(ValueError, match="clients must be at least 1, got 0"):
        federated(dataset(), "iid", clients=0)
    with pytest.raises(ValueError, match="only for a partition that is given by name, got alpha"):
        federated(dataset(), Dirichlet(clients=3), alpha=1.0)
    with pytest.raises(ValueError, match="partition 'iid' is already registered by"):
        register("partitions", "iid")(Dirichlet)


def test_every_kind_explains_its_options() -> None:
    assert {"iid", "dirichlet", "shards", "classes", "equal-dirichlet", "dirichlet-pair", "natural", "flower"} <= set(
        kinds()
    )
    for kind, cls in kinds().items():
        assert cls.__doc__ and create("partitions", kind).name == kind
        assert all(option.metadata["help"] for option in dataclasses.fields(cls))


def test_some_of_the_clients_with_a_share_of_their_training_data() -> None:
    whole = federated(dataset(), "shards", clients=10)
    some = federated(dataset(), "shards", clients=10, take=3, train_share=0.2)
    assert some.clients == 3 and whole.test_of is not None and some.test_of is not None
    for part, test in zip(some.train_of, some.test_of, strict=True):
        mine = next(n for n, every in enumerate(whole.train_of) if set(part.tolist()) <= set(every.tolist()))
        assert len(part) == max(1, round(0.2 * len(whole.train_of[mine])))
        assert torch.equal(test, whole.test_of[mine])  # the same test as with all of the training data
    for options, message in (
        ({"take": 11}, "take must be between 1 and the 10 clients there are"),
        ({"take": -1}, "take must be between 1"),
        ({"train_share": 0.0}, r"train_share must lie in \(0, 1\]"),
        ({"train_share": 1.5}, "train_share must lie in"),
    ):
        with pytest.raises(ValueError, match=message):
            federated(dataset(), "shards", clients=10, **options)  # type: ignore[arg-type]


def test_users_add_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._table, "partitions", dict(registry._table["partitions"]))

    @register("partitions", "one-each")
    @dataclasses.dataclass(frozen=True)
    class OneEach(Partition):
        """One example a client."""

        def parts(self, train: View, rng: np.random.Generator) -> list[Any]:
            return [np.array([client]) for client in range(self.clients)]

    assert [part.tolist() for part in federated(dataset(), "one-each", clients=3).train_of] == [[0], [1], [2]]


def text_of(data: FederatedData, classes: Any, width: int = 120, **options: Any) -> str:
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(draw(data, classes, **options))
    return capture.get()


def test_counts_and_the_plot_of_dots() -> None:
    labels = torch.tensor([0] * 100 + [1] * 4 + [2] * 40)
    data = FederatedData((torch.zeros(144, 1), labels), [torch.arange(101), torch.arange(101, 144), torch.arange(1)])
    assert counts(data).tolist() == [[100, 1, 0], [0, 3, 40], [1, 0, 0]]
    assert counts(data, 5).shape == (3, 5)
    assert counts(data, 3, test=True).tolist() == [[0, 0, 0]] * 3
    lines = text_of(data, ["cat", "dog", "\n"], title="mine").splitlines()
    assert lines[1].split() == ["client", "cat", "dog", "'\\n'", "all", "classes"]
    assert lines[2].split() == ["0", "100●", "1·", "101", "2"]
    assert lines[3].split() == ["1", "3·", "40◉", "43", "2"]
    assert lines[5].split() == ["all", "101", "4", "40", "145", "3"]
    assert "3 clients with 1 to 101 examples, 43 at the median" in lines[6]
    assert "…" in text_of(data, 3, most=1)


def test_ten_classes_with_thousands_fit_a_line_of_80() -> None:
    labels = torch.arange(40_000) % 10
    data = FederatedData((torch.zeros(40_000, 1), labels), [torch.arange(30_000), torch.arange(30_000, 40_000)])
    lines = text_of(data, [f"aeroplane{label}" for label in range(10)], width=80).splitlines()
    assert lines[1].split() == ["0", *["3.0k●"] * 10, "30k", "10"]
    assert lines[2].split() == ["1", *["1.0k○"] * 10, "10k", "10"]


@pytest.mark.parametrize(("width", "amounts"), [(80, False), (200, True)])
def test_amounts_are_beside_the_dots_where_there_is_room(width: int, amounts: bool) -> None:
    labels = torch.arange(2000) % 20
    data = FederatedData((torch.zeros(2000, 1), labels), [torch.arange(1000), torch.arange(1000, 2000)])
    text = text_of(data, [f"aeroplane{label}" for label in range(20)], width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("50●") == (40 if amounts else 0) and ("●" * 20 in text) is not amounts
    assert "…" not in text or not amounts


def test_many_classes_fit_the_screen() -> None:
    labels = torch.arange(1000) % 100
    data = FederatedData((torch.zeros(1000, 1), labels), [torch.arange(0, 1000, 2), torch.arange(1, 1000, 2)])
    text = text_of(data, 100, width=130)
    assert max(map(len, text.splitlines())) <= 130
    assert text.count("●") >= 100
    assert "(100 classes)" in text


# Validation.


def overlaps(parts: Any, others: Any) -> bool:
    return bool(np.intersect1d(np.concatenate(list(parts)), np.concatenate(list(others))).size)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "shards", "classes", "equal-dirichlet", "dirichlet-pair"])
def test_nobody_trains_on_the_validation_part(kind: str) -> None:
    data = dataset()
    options: dict[str, Any] = {"clients": 5, "seed": 1, **({"train": 60} if kind == "dirichlet-pair" else {})}
    whole = federated(data, kind, **options)
    test = federated(data, kind, validation_share=0.25, **options)
    found = federated(data, kind, validation_share=0.25, evaluate_on="validation", **options)
    assert same(test, found) and found.validation and not test.validation and not whole.validation
    assert test.central is not None and whole.central is not None and found.central is not None
    assert torch.equal(test.central[0], whole.central[0])  # the test data stay as they are
    assert found.test_of is not None
    held = []
    for client in range(5):
        before, after = whole.train_of[client].numpy(), found.train_of[client].numpy()
        own = found.own_test(client)
        assert own is not None and set(after) < set(before)
        left = np.setdiff1d(before, after)
        np.testing.assert_array_equal(own[0].numpy(), data.train[0][left])
        np.testing.assert_array_equal(own[1].numpy(), data.train[1][left])
        assert (
            len(left) == round(0.25 * len(before)) or kind == "dirichlet-pair"
        )  # where clients have the same examples
        held.append(left)
    assert not overlaps(held, found.train_of)
    union = np.unique(np.concatenate(held))
    np.testing.assert_array_equal(found.central[0].numpy(), data.train[0][union])
    assert same(found, federated(data, kind, validation_share=0.25, evaluate_on="validation", **options))
    other = federated(data, kind, validation_share=0.25, **{**options, "seed": 2})
    assert not same(found, other)
    assert (
        federated(data, kind, validation_share=0.25, evaluate_on="validation", own_test=False, **options).test_of
        is None
    )


def test_ordered_owners_validate_on_their_last_before_the_test_part() -> None:
    ids = np.repeat([0, 1, 2], [50, 50, 2])
    text = np.arange(102, dtype=np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(np.append(text, np.zeros(2, np.uint8)), 3, writeable=True)
    data = Dataset(
        "talk", (windows, text.astype(np.int64) % 4), (windows[:6].copy(), np.zeros(6, np.int64)), tuple("abcd"),
        "language", train_ids=ids, test_ids=np.repeat([0, 1, 2], 2), owners=("x", "y", "z"), ordered=True, gap=2,
    )  # fmt: skip
    found = federated(data, "natural", validation_share=0.2, evaluate_on="validation")
    assert found.train_of[0].tolist() == list(range(40))
    own = found.own_test(0)
    assert own is not None and own[0][:, 0].tolist() == list(range(42, 50))  # two windows overlap with both parts
    assert found.train_of[2].tolist() == [100, 101] and found.own_test(2) is None  # too few to hold some out
    assert found.central is not None and len(found.central[1]) == 16


def test_validation_settings_are_checked() -> None:
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"validation_share must lie in \(0, 1\)"):
            federated(dataset(), clients=2, validation_share=share)
    with pytest.raises(ValueError, match="needs examples that are held out: set validation_share"):
        federated(dataset(), clients=2, evaluate_on="validation")
    with pytest.raises(ValueError, match="no client has enough examples"):
        federated(dataset(train=4), clients=4, validation_share=0.5)
