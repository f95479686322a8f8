"""Examples of map-style datasets: views, batches, classes, fingerprints, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from fedfactor.data.records import Records
from tests.helpers.sequences import Sequences, padded

X, Y = torch.randn(7, 2), torch.tensor([0, 1, 2, 0, 1, 2, 0])


def records(**attributes: Any) -> Records:
    parts = [TensorDataset(X[:4], Y[:4]), TensorDataset(X[4:], Y[4:])]
    for part in parts:
        vars(part).update({key: value for key, value in attributes.items() if value is not None})
    return Records(parts)


def test_positions_go_through_all_datasets() -> None:
    whole = records()
    view = whole[torch.tensor([6, 3, 4, 0])]
    assert len(whole) == 7 and len(view) == 4
    inputs, targets = view[slice(1, 3)].batch(training=False)
    assert torch.equal(inputs, X[[3, 4]]) and targets.tolist() == [0, 1]


def test_classes_are_read_once_unless_they_are_listed() -> None:
    whole = records()
    assert whole.known_targets() is None
    assert whole[slice(2, 5)].targets().tolist() == [2, 0, 1]
    assert whole[slice(2, 5)].known_targets() is not None and whole.known_targets() is None, "only these were read"
    assert whole.targets().tolist() == Y.tolist()
    listing = Records([SimpleNamespaceDataset(targets=[1, 0]), SimpleNamespaceDataset(targets=torch.tensor([0, 2]))])
    assert listing.targets().tolist() == [1, 0, 0, 2], "no example was read"
    changed = Records([SimpleNamespaceDataset(targets=[1, 0], target_transform=lambda y: 1 - y)])
    assert changed.known_targets() is None, "what is listed is not what examples have"
    with pytest.raises(ValueError, match=r"one class per example is needed, .* shape \[4, 2\]"):
        Records([TensorDataset(X[:4], X[:4])]).targets()


class SimpleNamespaceDataset(SimpleNamespace):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("read")


def test_examples_that_use_any_generator_are_reproducible() -> None:
    noisy = Records([Sequences(0, 30, noisy=True)], padded)
    tests = [noisy[slice(10)].batch(training=False)["ids"] for _ in range(2)]
    assert torch.equal(*tests)
    torch.manual_seed(1)
    first, second = (noisy[slice(10)].batch(training=True)["ids"] for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(noisy[slice(10)].batch(training=True)["ids"], first)


def test_a_fingerprint_is_what_the_author_says_or_a_sample() -> None:
    whole, sampled = records(), "a sample of 7 of 7 examples"
    assert whole.identified_by == sampled and whole.fingerprint() == records().fingerprint()
    moved = Records([TensorDataset(X + 1, Y)])
    assert moved.fingerprint() != Records([TensorDataset(X, Y)]).fingerprint()
    named = records(fingerprint=lambda: "v1")
    assert named.identified_by == "the fingerprint() of 2 datasets"
    assert named.fingerprint() == records(fingerprint=lambda: "v1").fingerprint() != whole.fingerprint()
    assert named.fingerprint() != records(fingerprint=lambda: "v2").fingerprint()
    some = Records([SimpleNamespaceDataset(fingerprint=lambda: 3), TensorDataset(X, Y)])
    assert some.identified_by == f"the fingerprint() of 1 datasets and {sampled}"
    one, other = (Records([[("a", 1.5), (end, 2)]], lambda some: {"text": some}).fingerprint() for end in "bc")
    assert one != other
    ways = (lambda x: x.T.contiguous().T, lambda x: x)  # another order in memory, as after `permute`
    turned, plain = (Records([list(torch.ones(3, 2))], lambda some, way=way: way(torch.stack(some))) for way in ways)
    assert turned.fingerprint() == plain.fingerprint()
    assert Records([[1, 2]], lambda some: {"n": torch.tensor(3), "x": some}).fingerprint()
    long = Records([list(range(1000))])
    assert long.identified_by == "a sample of 64 of 1,000 examples"


def test_what_is_no_map_style_dataset_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(())

    for wrong, name in ((Stream(), "Stream"), (iter([1]), "list_iterator"), ("word", "str")):
        with pytest.raises(ValueError, match=f"dataset 1 is a {name}; .* map-style dataset"):
            Records([TensorDataset(X, Y), wrong])  # type: ignore[list-item]
    for example in ((X, Y), {"x": X, "label": Y}):
        with pytest.raises(ValueError, match=f"dataset 1 is a {type(example).__name__}, which looks like one example"):
            Records([TensorDataset(X, Y), example])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no examples"):
        Records([[]])


def test_a_dataset_must_keep_its_length() -> None:
    shrinking = Sequences(0)
    found = Records([Sequences(1), shrinking], padded)
    shrinking.items.pop()
    with pytest.raises(ValueError, match=r"dataset 1 \(Sequences\) had 20 examples when the run began and has 19 now"):
        found[slice(20, 22)].batch(training=False)
    found[slice(2)].batch(training=False)


class Broken(Sequences):
    def __getitem__(self, index: int) -> Any:
        raise OSError("disk gone") if index == 3 else KeyError(index)

    def fingerprint(self) -> None:
        return None


def test_what_fails_in_a_users_code_is_named() -> None:
    with pytest.raises(ValueError, match=r"collate failed: RuntimeError: stack expects .* function of yours can pad"):
        Records([Sequences(0)]).batch(training=False)
    with pytest.raises(ValueError, match=r"collate failed: KeyError: 'mask'$"):
        Records([Sequences(0)], lambda some: some[0]["mask"]).batch(training=False)
    broken = Records([Sequences(0), Broken(0)], padded)
    with pytest.raises(ValueError, match=r"example 3 of dataset 1 \(Broken\) cannot be read: OSError: disk gone"):
        broken[slice(23, 24)].batch(training=False)
    with pytest.raises(ValueError, match=r"fingerprint\(\) of dataset 1 \(Broken\) returned nothing"):
        broken.fingerprint()
    with pytest.raises(TypeError, match="collate must be a function of a list of examples, got 'pad'"):
        Records([Sequences(0)], "pad")  # type: ignore[arg-type]


def test_collate_must_keep_all_examples() -> None:
    def drops(examples: list[Any]) -> Any:
        return padded([one for one in examples if one["labels"]])

    with pytest.raises(ValueError, match="collate returned a batch of 10 examples for 20: it must keep all"):
        Records([Sequences(0)], drops).batch(training=False)
    with pytest.raises(ValueError, match="collate returned a batch of 19 examples for 20"):
        Records([Sequences(0)], lambda some: (torch.zeros(len(some)), torch.zeros(len(some) - 1))).batch(training=False)
    for fine in (
        lambda some: (some, some),
        lambda some: (len(some), "no lengths"),
        lambda some: (some, torch.zeros(3 * len(some))),  # such as a label per node of graphs
        lambda some: (some, torch.zeros(())),
        lambda some: {"x": [some], "n": some},
    ):
        Records([Sequences(0)], fine).batch(training=False)
