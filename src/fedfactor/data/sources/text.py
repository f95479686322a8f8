"""Text classification: IMDB's reviews and AG News, as padded rows of token ids."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedfactor.data.dataset import Array, Dataset, Labels
from fedfactor.data.sources.cache import Draft, cached
from fedfactor.data.sources.files import first, read_lines, read_text
from fedfactor.data.sources.mnist import pair, sizes
from fedfactor.data.sources.registry import check_whole, missing
from fedfactor.registry import register
from fedfactor.rng import numpy_rng
from fedfactor.support.checks import check_number
from fedfactor.support.hub import local_folder
from fedfactor.support.install import optional

WORD = re.compile(r"[a-z0-9']+")
BREAK = re.compile(r"<[^>]*>")

Texts = tuple[list[str], Labels]
"""Texts, and their classes."""


@register(
    "data",
    "imdb",
    fetch="mkdir -p {data} && curl -L https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz | "
    "tar -xz -C {data}",
)
def imdb(
    folder: Path,
    words: int = 1000,
    length: int = 500,
    pool: bool = False,
    pool_train: int = 37_500,
    pool_seed: int = 0,
    tokenizer: str = "",
    partial: bool = False,
) -> Dataset:
    """IMDB's film reviews, negative or positive: 25,000 for training and 25,000 for testing, or pooled and split again.

    Ids 1 to `words` are the most frequent words of the training set. Id 0 is any other word, and the padding in front
    of short reviews. Long reviews are cut after `length` words. `pool` merges training and test set and takes
    `pool_train` reviews, half of each class, for training: PriSM's 100 clients with 375 reviews each need more than the
    official 25,000. `tokenizer` is the folder of a Hugging Face tokenizer, or a model of its hub
    (huggingface:OWNER/NAME); it replaces the words, and rows are padded at the end. `partial` accepts fewer reviews
    than there should be.
    """
    for option, value in (("words", words), ("length", length)):
        check_number(option, value, 1, whole=True)
    places = [folder / "aclImdb", folder / "imdb" / "aclImdb"]
    place = first(places)
    if place is None:
        raise missing("imdb", folder, places)
    kinds = [(part, label, place / part / side) for part in _PARTS for label, side in enumerate(("neg", "pos"))]
    for _, _, path in kinds:
        if not path.is_dir():
            raise ValueError(f"{place} is incomplete: expected a folder {path.relative_to(place)}")

    def build(draft: Draft) -> None:
        parts: dict[str, Texts] = {}
        for part in _PARTS:
            files = [(file, label) for p, label, path in kinds if p == part for file in sorted(path.glob("*.txt"))]
            parts[part] = [read_text(file) for file, _ in files], np.array([y for _, y in files], np.int64)
        if pool:
            parts = _pooled(parts, pool_train, pool_seed)
        texts = {part: found for part, (found, _) in parts.items()}
        if tokenizer:
            rows, draft.facts["vocabulary"] = tokenized(texts, tokenizer, length)
        else:
            split = {part: [words_of(text) for text in found] for part, found in texts.items()}
            known = _frequent(split["train"], words)
            index = {word: number for number, word in enumerate(known, 1)}
            rows = {part: _encode(found, index, 0, length, front=True) for part, found in split.items()}
            draft.facts["vocabulary"] = ["", *known]
        for part, (_, labels) in parts.items():
            draft.put(f"{part}_x", rows[part])
            draft.put(f"{part}_y", labels)

    options = {"words": words, "length": length, "pool": [pool_train, pool_seed] if pool else None}
    made_from = [*(path for _, _, path in kinds), *tokenizer_files(tokenizer)]
    arrays, facts = cached(folder, "imdb", made_from, options, build)
    train = pool_train if pool else 25_000
    check_whole("imdb", folder, sizes(arrays, train, 50_000 - train), partial)
    return Dataset(
        "imdb",
        pair(arrays, "train"),
        pair(arrays, "test"),
        ("negative", "positive"),
        "binary",
        vocabulary=tuple(facts["vocabulary"]),
    )


@register(
    "data",
    "ag_news",
    fetch="mkdir -p {data} && curl -L https://s3.amazonaws.com/fast-ai-nlp/ag_news_csv.tgz | tar -xz -C {data}",
)
def ag_news(
    folder: Path, vocabulary: int = 10_000, length: int = 64, tokenizer: str = "", partial: bool = False
) -> Dataset:
    """AG News: titles and first sentences of four kinds of news, 120,000 for training and 7,600 for testing.

    Id 0 is the padding after short texts, id 1 any unknown word. The others are the most frequent words of the training
    set. `tokenizer` is the folder of a Hugging Face tokenizer, or a model of its hub (huggingface:OWNER/NAME); it
    replaces the words. `partial` accepts fewer texts than there should be.
    """
    for option, value in (("vocabulary", vocabulary), ("length", length)):
        check_number(option, value, 1, whole=True)
    places = [folder / "ag_news_csv", folder / "ag_news"]
    place = first(places)
    if place is None:
        raise missing("ag_news", folder, places)
    paths = {part: place / f"{part}.csv" for part in _PARTS}
    for path in paths.values():
        if not path.exists():
            raise ValueError(f"{place} is incomplete: expected {path.name}")
    names = place / "classes.txt"
    classes = tuple(read_lines(names)) if names.exists() else ("World", "Sports", "Business", "Sci/Tech")

    def build(draft: Draft) -> None:
        parts = {part: _csv(path, len(classes)) for part, path in paths.items()}
        texts = {part: found for part, (found, _) in parts.items()}
        rows, draft.facts["vocabulary"] = (
            tokenized(texts, tokenizer, length) if tokenizer else numbered(texts, vocabulary, length)
        )
        for part, (_, labels) in parts.items():
            draft.put(f"{part}_x", rows[part])
            draft.put(f"{part}_y", labels)

    options = {"vocabulary": vocabulary, "length": length, "classes": len(classes)}
    made_from = [*paths.values(), *tokenizer_files(tokenizer)]
    arrays, facts = cached(folder, "ag_news", made_from, options, build)
    check_whole("ag_news", folder, sizes(arrays, 120_000, 7_600), partial)
    train, test = pair(arrays, "train"), pair(arrays, "test")
    return Dataset("ag_news", train, test, classes, vocabulary=tuple(facts["vocabulary"]))


_PARTS = ("train", "test")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without mark-up and punctuation."""
    return WORD.findall(BREAK.sub(" ", text.lower()))


def _frequent(texts: Iterable[list[str]], most: int) -> list[str]:
    """Return the most frequent words. Ties are broken by the alphabet, so that only the files decide."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    return [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: max(most, 0)]]


def _encode(texts: list[list[str]], index: dict[str, int], unknown: int, length: int, *, front: bool) -> Array:
    """Return rows of word ids, cut at `length` and padded with 0 in front or at the end."""
    small = len(index) + 2 < np.iinfo(np.int16).max
    rows = np.zeros((len(texts), length), np.int16 if small else np.int32)
    for row, text in zip(rows, texts, strict=True):
        ids = [index.get(word, unknown) for word in text[:length]]
        if ids:
            row[-len(ids) if front else 0 : None if front else len(ids)] = ids
    return rows


def numbered(parts: dict[str, list[str]], vocabulary: int, length: int) -> tuple[dict[str, Array], list[str]]:
    """Return the word ids of the texts of each part, padded at the end, and the word that each id stands for."""
    split = {part: [words_of(text) for text in texts] for part, texts in parts.items()}
    known = _frequent(split["train"], vocabulary - 2)
    index = {word: number for number, word in enumerate(known, 2)}
    rows = {part: _encode(texts, index, 1, length, front=False) for part, texts in split.items()}
    return rows, ["", "?", *known]


def tokenizer_files(folder: str) -> list[Path]:
    """Return the file of a Hugging Face tokenizer; no file if none is named. Raise ValueError if it does not exist.

    `folder` is a local folder, or a model of the hub: huggingface:OWNER/NAME.
    """
    if not folder:
        return []
    path = Path(local_folder(folder, "tokenizer.json")).expanduser() / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"data.tokenizer: there is no {path}; name the folder of a Hugging Face model")
    return [path]


def tokenized(parts: dict[str, list[str]], folder: str, length: int) -> tuple[dict[str, Array], list[str]]:
    """Return the token ids of the texts of each part, padded at the end, and the token that each id stands for."""
    package = optional("tokenizers", "tune", "data.tokenizer")
    (path,) = tokenizer_files(folder)
    try:
        tokenizer = package.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises no other kind
        raise ValueError(f"{path} is no tokenizer: {error}") from None
    pads = [(tokenizer.padding or {}).get("pad_id"), *map(tokenizer.token_to_id, ("[PAD]", "<pad>"))]
    pad = next((number for number in pads if number is not None), None)
    if pad is None:
        raise ValueError(f"{path} names no token for padding")
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=pad)
    size = tokenizer.get_vocab_size()
    kind = np.int16 if size < np.iinfo(np.int16).max else np.int32
    rows = {}
    for part, texts in parts.items():
        encoded = tokenizer.encode_batch([BREAK.sub(" ", text) for text in texts])
        rows[part] = np.array([one.ids for one in encoded], kind).reshape(len(texts), length)
    return rows, [tokenizer.id_to_token(number) or "" for number in range(size)]


def _pooled(parts: dict[str, Texts], train: int, seed: int) -> dict[str, Texts]:
    texts = [text for part in _PARTS for text in parts[part][0]]
    labels = np.concatenate([parts[part][1] for part in _PARTS])
    if not 0 < train < len(texts):
        raise ValueError(f"pool_train must be between 0 and the number of reviews, {len(texts):,}, got {train:,}")
    rng = numpy_rng(seed, "pool")
    chosen = np.zeros(len(labels), bool)
    for label in (0, 1):
        members = rng.permutation(np.flatnonzero(labels == label))
        chosen[members[: (train + label) // 2]] = True
    return {
        part: ([texts[i] for i in np.flatnonzero(mask)], labels[mask])
        for part, mask in (("train", chosen), ("test", ~chosen))
    }


def _csv(path: Path, classes: int) -> Texts:
    """Read rows of a class (counted from 1), a title and a text."""
    texts, labels = [], []
    with path.open(newline="", encoding="utf-8") as file:
        try:
            for number, row in enumerate(csv.reader(file, strict=True), 1):
                if len(row) != 3 or not row[0].isdigit() or not 1 <= int(row[0]) <= classes:
                    raise ValueError(
                        f"{path} is damaged in row {number}: expected a class from 1 to {classes}, a title and a text, "
                        f"got {len(row)} columns beginning with {row[:1]}"
                    )
                # The distributed files have a backslash in place of a line break.
                texts.append(f"{row[1]} {row[2]}".replace("\\", " "))
                labels.append(int(row[0]) - 1)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is damaged: expected comma-separated UTF-8 text, but {error}") from error
    return texts, np.array(labels, np.int64)
