"""The kinds of partition, by name: `partition = {kind = "dirichlet", alpha = 0.5, clients = 100}` in a recipe.

Each is a frozen dataclass whose fields are its options; `splitting` has the functions that do the work.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fedfactor.data import splitting
from fedfactor.data.splitting import Labels, Parts
from fedfactor.registry import described, entries, register
from fedfactor.support.install import optional


@dataclass(frozen=True)
class View:
    """What a partition can see: the labels of the examples, and their natural owners."""

    labels: Labels
    ids: Labels | None = None


@dataclass(frozen=True)
class Partition:
    """Splits training examples over clients, and chooses test examples for each client.

    A client's own test data should have the distribution of its training data. By default it is a part of the test set
    with the client's class proportions (`splitting.matching_test`).
    """

    name: ClassVar[str] = ""
    by_owner: ClassVar[bool] = False
    """Whether clients are natural owners, who then get their own test examples."""
    needs_labels: ClassVar[bool] = True
    """Whether the split depends on the classes of examples. Datasets that do not list them are read for this."""

    clients: int = field(default=10, metadata=described("number of clients"))

    def __post_init__(self) -> None:
        if self.clients < (0 if self.by_owner else 1):
            raise ValueError(f"clients must be at least 1, got {self.clients}")

    def parts(self, train: View, rng: np.random.Generator) -> Parts:
        """Return each client's training examples."""
        raise NotImplementedError

    def split(self, train: View, test: View, rng: np.random.Generator) -> tuple[Parts, Parts]:
        """Return each client's training examples and its own test examples."""
        parts = self.parts(train, rng)
        return parts, splitting.matching_test(train.labels, parts, test.labels, rng)


def kinds() -> dict[str, type[Partition]]:
    """Return all classes of partitions by name, those of plug-ins included."""
    return {name: entry.cls for name, entry in entries("partitions").items()}


@register("partitions", "iid")
@dataclass(frozen=True)
class Iid(Partition):
    """Shuffled examples, split evenly."""

    needs_labels: ClassVar[bool] = False

    def parts(self, train: View, rng: np.random.Generator) -> Parts:
        """Return each client's training examples."""
        return splitting.iid(train.labels, self.clients, rng)


@register("partitions", "dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class split over the clients by Dirichlet(alpha); clients differ in size."""

    alpha: float = field(default=0.5, metadata=described("small: few classes per client; large: nearly IID"))
    min_examples: int = field(default=2, metadata=described("smallest number of examples a client may have"))
    tries: int = field(default=100, metadata=described("draws before the smallest clients get examples of the largest"))

    def parts(self, train: View, rng: np.random.Generator) -> Parts:
        """Return each client's training examples."""
        return splitting.dirichlet(
            train.labels, self.clients, self.alpha, rng, min_examples=self.min_examples, tries=self.tries
        )


@register("partitions", "shards")
@dataclass(frozen=True)
class Shards(Partition):
    """Examples sorted by label and cut into shards, which are distributed at random (McMahan et al. 2017)."""

    shards_per_client: int = field(default=2, metadata=described("shards per client"))

    def parts(self, train: View, rng: np.random.Generator) -> Parts:
        """Return each client's training examples."""
        return splitting.shards(train.labels, self.clients, rng, shards=self.shards_per_client)


@register("partitions", "classes")
@dataclass(frozen=True)
class Classes(Partition):
    """Exactly k classes per client, in equal shares; each class goes to equally many clients (FLANC)."""

    classes_per_client: int = field(default=3, metadata=described("classes per client"))
    equal: bool = field(default=True, metadata=described("exactly equal numbers of examples; the remainder is unused"))

    def parts(self, train: View, rng: np.random.Generator) -> Parts:
        """Return each client's training examples."""
        return splitting.k_classes(train.labels, self.clients, self.classes_per_client, rng, equal=self.equal)


@register("partitions", "equal-dirichlet")
@dataclass(frozen=True)
class EqualDirichlet(Partition):
    """The same number of examples per client, class proportions by Dirichlet(alpha) (PriSM); alpha = inf is IID."""

    alpha: float = field(default=1.0, metadata=described("small: few classes per client; inf: IID"))
    size: int = field(default=0, metadata=described("examples per client; 0: as many as there are"))

    def parts(self, train: View, rng: np.random.Generator) -> Parts:
        """Return each client's training examples."""
        return splitting.equal_dirichlet(train.labels, self.clients, self.alpha, rng, size=self.size)


@register("partitions", "dirichlet-pair")
@dataclass(frozen=True)
class DirichletPair(Partition):
    """Training and test examples of a client by the same Dirichlet(alpha) proportions; clients overlap (FedDecomp)."""

    alpha: float = field(default=0.1, metadata=described("small: few classes per client"))
    train: int = field(default=500, metadata=described("largest number of training examples per client"))
    test: int = field(default=100, metadata=described("largest number of test examples per client"))
    replace_test: bool = field(default=False, metadata=described("a client's test examples may repeat"))

    def split(self, train: View, test: View, rng: np.random.Generator) -> tuple[Parts, Parts]:
        """Return each client's training examples and its own test examples."""
        return splitting.dirichlet_pair(
            train.labels,
            test.labels,
            self.clients,
            self.alpha,
            rng,
            train=self.train,
            test=self.test,
            replace_test=self.replace_test,
        )


@register("partitions", "natural")
@dataclass(frozen=True)
class Natural(Partition):
    """One natural owner (role, writer) per client, or several."""

    by_owner: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = False

    clients: int = field(default=0, metadata=described("number of clients, owners chosen at random; 0: all owners"))
    ids_per_client: int = field(default=1, metadata=described("owners per client"))
    min_examples: int = field(default=1, metadata=described("owners with fewer training examples are left out"))

    def split(self, train: View, test: View, rng: np.random.Generator) -> tuple[Parts, Parts]:
        """Return each client's training examples, and the test examples of the same owners."""
        if train.ids is None:
            raise ValueError("this data set has no natural owners: choose another kind of partition")
        groups = splitting.owners(
            train.ids, self.clients, rng, ids_per_client=self.ids_per_client, min_examples=self.min_examples
        )
        ids = np.empty(0, np.int64) if test.ids is None else test.ids
        return splitting.of_owners(train.ids, groups), splitting.of_owners(ids, groups)


@register("partitions", "flower")
@dataclass(frozen=True)
class Flower(Partition):
    """A Partitioner of flwr-datasets; it sees the columns `label` and, with natural owners, `owner`."""

    clients: int = field(default=10, metadata=described("num_partitions of the Partitioner, if it has that parameter"))
    partitioner: str = field(default="IidPartitioner", metadata=described("name of the class in flwr_datasets"))
    options: Mapping[str, Any] = field(default_factory=dict, metadata=described("arguments of the Partitioner"))

    def parts(self, train: View, rng: np.random.Generator) -> Parts:
        """Return each client's training examples."""
        module = optional("flwr_datasets.partitioner", "flower-datasets", "a partition of kind flower")
        cls = getattr(module, self.partitioner, None)
        if cls is None:
            raise ValueError(f"flwr_datasets has no partitioner called {self.partitioner!r}")
        offered = {"num_partitions": self.clients, "seed": int(rng.integers(2**31))}
        taken = inspect.signature(cls).parameters
        options = {key: value for key, value in offered.items() if key in taken} | dict(self.options)
        return from_flower(cls(**options), train.labels, train.ids)


def from_flower(partitioner: Any, labels: Labels, ids: Labels | None = None) -> Parts:
    """Split examples with a Partitioner of flwr-datasets, which sees the columns `label` and `owner`."""
    hub = optional("datasets", "flower-datasets", "a flwr-datasets Partitioner")
    columns = {"label": labels, "row": np.arange(len(labels))}
    if ids is not None:
        columns["owner"] = ids
    partitioner.dataset = hub.Dataset.from_dict(columns)
    count = int(partitioner.num_partitions)
    return [np.sort(np.asarray(partitioner.load_partition(client)["row"], np.int64)) for client in range(count)]
