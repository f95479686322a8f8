"""LEAF's data sets with natural clients: Shakespeare by role, FEMNIST by writer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from fedfactor.data.dataset import Array, Dataset, Labels
from fedfactor.data.sources.cache import Draft, cached
from fedfactor.data.sources.files import check_labels, first, read_text
from fedfactor.data.sources.mnist import pair
from fedfactor.data.sources.registry import check_whole, missing
from fedfactor.registry import register
from fedfactor.rng import numpy_rng
from fedfactor.support.checks import check_number

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF's Shakespeare; the id of a character is its position here."""
WINDOW = 80
FEMNIST_CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
SIDE = 28
CLONE = "mkdir -p {data} && cd {data} && git clone --depth 1 https://github.com/TalwalkarLab/leaf && cd leaf/data/"
SPACES = re.compile("   *")


@register("data", "shakespeare", fetch=CLONE + "shakespeare && ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample -tf 0.8")
def shakespeare(
    folder: Path, roles: int = 0, min_examples: int = 2, role_seed: int = 0, partial: bool = False
) -> Dataset:
    """Shakespeare by role: predict the character after 80 others. 1,129 roles, four million windows, no test set.

    As in LEAF, the lines of a role are joined by spaces. `roles` chooses this many roles at random, among those with at
    least `min_examples` windows. `partial` accepts fewer windows than there should be.
    """
    for option, value in (("roles", roles), ("min_examples", min_examples)):
        check_number(option, value, 0, whole=True)
    roots = [folder / "shakespeare", folder / "leaf" / "data" / "shakespeare" / "data" / "raw_data", folder]
    roots[1:1] = [roots[0] / "data" / "raw_data", roots[0] / "raw_data"]
    place = first(root / "by_play_and_character" for root in roots)
    if place is None:
        raise missing("shakespeare", folder, [root / "by_play_and_character" for root in (roots[0], roots[3], folder)])
    paths = sorted(place.glob("*.txt"))
    if not paths:
        raise ValueError(f"{place} is empty: expected one .txt file per role")
    plays = place.parent / "users_and_plays.json"
    known = _plays(plays) if plays.exists() else None

    def build(draft: Draft) -> None:
        chosen = [path for path in paths if known is None or path.stem in known]
        text, owner = _windows(chosen)
        draft.put("text", text)
        draft.put("targets", text[WINDOW:].astype(np.int64))
        draft.put("owner", owner)
        draft.facts["roles"] = [path.stem for path in chosen]

    arrays, facts = cached(folder, "shakespeare", [*paths, *([plays] if known is not None else [])], {}, build)
    windows = int((arrays["owner"] >= 0).sum())
    check_whole(
        "shakespeare", folder, {"roles": (len(facts["roles"]), 1_129), "windows": (windows, 4_226_158)}, partial
    )
    # Windows overlap, so only the text is stored: a row is a view of 80 characters.
    inputs = np.lib.stride_tricks.sliding_window_view(arrays["text"][:-1], WINDOW, writeable=True)
    owner, names = _some_roles(arrays["owner"], tuple(facts["roles"]), roles, min_examples, role_seed)
    none = (np.empty((0, WINDOW), np.uint8), np.empty(0, np.int64))
    return Dataset(
        "shakespeare",
        (inputs, arrays["targets"]),
        none,
        tuple(LETTERS),
        "language",
        vocabulary=tuple(LETTERS),
        train_ids=owner,
        test_ids=np.empty(0, np.int64),
        owners=names,
        ordered=True,
        gap=WINDOW - 1,
    )


def _plays(path: Path) -> dict[str, str]:
    """Read the play of each role."""
    try:
        found = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: expected JSON, but {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: expected an object of roles and their plays")
    return found


def _windows(paths: list[Path]) -> tuple[Array, Labels]:
    """Return the texts of all roles as ids, one after the other, and the role of the window that begins at each id."""
    # One byte per character is enough: characters that are not among the 80 become spaces.
    code = np.full(256, LETTERS.index(" "), np.uint8)
    for number, letter in enumerate(LETTERS):
        code[ord(letter)] = number
    texts, owners = [], []
    for role, path in enumerate(paths):
        # Each line ends in a space, including the last.
        text = SPACES.sub(" ", read_text(path).rstrip("\n").replace("\n", " ") + " ").encode("latin-1", "replace")
        texts.append(text)
        owner = np.full(len(text), role, np.int64)
        # A window belongs to no role if it, or its target, extends beyond the text of the role.
        owner[max(len(text) - WINDOW, 0) :] = -1
        owners.append(owner)
    together = code[np.frombuffer(b"".join(texts), np.uint8)]
    if len(together) <= WINDOW:
        raise ValueError(f"{paths[0].parent} has too little text: expected more than {WINDOW} characters")
    return together, np.concatenate(owners)[:-WINDOW]


def _some_roles(
    owner: Labels, names: tuple[str, ...], roles: int, min_examples: int, seed: int
) -> tuple[Labels, tuple[str, ...]]:
    """Keep the roles with enough windows, or some of them; renumber these and mark all other rows with -1."""
    counts = np.bincount(owner[owner >= 0], minlength=len(names))
    kept = np.flatnonzero(counts >= max(min_examples, 1))
    if roles:
        if roles > len(kept):
            raise ValueError(f"only {len(kept):,} roles have at least {min_examples:,} windows, but roles is {roles:,}")
        kept = np.sort(numpy_rng(seed, "roles").choice(kept, roles, replace=False))
    number = np.full(len(names) + 1, -1, np.int64)
    number[kept] = np.arange(len(kept))
    # The id -1 reads the last entry, which is -1.
    return number[owner], tuple(names[role] for role in kept)


@register("data", "femnist", fetch=CLONE + "femnist && ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample")
def femnist(folder: Path) -> Dataset:
    """FEMNIST: 28 x 28 handwritten digits and letters, 62 classes, by writer; LEAF's JSON files, split or not."""
    roots = [folder / "femnist" / "data", folder / "femnist", folder / "leaf" / "data" / "femnist" / "data"]
    for root in roots:
        train, test = sorted((root / "train").glob("*.json")), sorted((root / "test").glob("*.json"))
        if train and test:
            files = {"train": train, "test": test}
            break
        whole = sorted({*(root / "all_data").glob("all_data_*.json"), *root.glob("all_data_*.json")})
        if whole:
            files = {"train": whole, "test": []}
            break
    else:
        raise missing("femnist", folder, [root / inside for root in roots[1:] for inside in ("train", "all_data")])

    def build(draft: Draft) -> None:
        writers: dict[str, int] = {}
        for part, paths in files.items():
            read = [_writers_of(path, writers) for path in paths]
            empty = (np.empty((0, 1, SIDE, SIDE), np.uint8), np.empty(0, np.int64), np.empty(0, np.int64))
            for name, arrays in zip(("x", "y", "ids"), zip(*[empty, *read], strict=True), strict=True):
                draft.put(f"{part}_{name}", np.concatenate(arrays))
        draft.facts["writers"] = list(writers)

    arrays, facts = cached(folder, "femnist", [*files["train"], *files["test"]], {}, build)
    return Dataset(
        "femnist",
        pair(arrays, "train"),
        pair(arrays, "test"),
        FEMNIST_CLASSES,
        train_ids=arrays["train_ids"],
        test_ids=arrays["test_ids"],
        owners=tuple(facts["writers"]),
    )


def _writers_of(path: Path, writers: dict[str, int]) -> tuple[Array, Labels, Labels]:
    """Read a file of users, each with rows of 784 grey values from 0 to 1 and classes; give new writers a number."""
    try:
        found: dict[str, Any] = json.loads(read_text(path))
        images, labels, ids = [], [], []
        for user in found["users"]:
            x = np.asarray(found["user_data"][user]["x"], np.float32).reshape(-1, SIDE * SIDE)
            y = np.asarray(found["user_data"][user]["y"], np.int64)
            if len(x) != len(y) or (x.size and not 0 <= float(x.min()) <= float(x.max()) <= 1):
                raise ValueError(f"user {user} has {len(x)} images and {len(y)} classes, or values outside [0, 1]")
            # LEAF divided the bytes of its images by 255.
            images.append(np.rint(x * 255).astype(np.uint8).reshape(-1, 1, SIDE, SIDE))
            labels.append(y)
            ids.append(np.full(len(y), writers.setdefault(user, len(writers)), np.int64))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged: expected LEAF's users and user_data with x of 784 values and y, but {error!r}"
        ) from error
    if not images:
        raise ValueError(f"{path} is damaged: expected at least one user")
    classes = np.concatenate(labels)
    check_labels(path, classes, len(FEMNIST_CLASSES))
    return np.concatenate(images), classes, np.concatenate(ids)
