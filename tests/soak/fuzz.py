"""Mutated messages through the decoder and the reply check: `python -m tests.soak.fuzz 1000000`.

Replies of real clients are damaged in many ways: bits, lengths, pieces of other messages, and values of the header that stay
valid JSON. Each must be refused with `BadMessage`, or be a reply that the server could have got from an honest client: right
client and round, right names, shapes and types, finite numbers. Nothing else may happen.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from fedfactor import testing
from fedfactor.protocol import validation
from fedfactor.protocol.message import BadMessage, decode
from fedfactor.protocol.setup import Setup
from fedfactor.protocol.validation import SentJob, check_upload
from fedfactor.registry import create
from fedfactor.server import dispatch
from fedfactor.testing.federation import Recording

PARTS = (
    ("fedavg", "fedavg", "float32"), ("fedpara", "fedavg", "int8"), ("heterofl", "fedavg", "fedpaq"),
    ("fedhm", "fedavg", "float32"), ("fedavg", "scaffold", "float16"), ("fedbn", "fedavg", "topk"),
)  # fmt: skip
"""Methods, optimizers and codecs whose replies are damaged."""


@dataclass(frozen=True)
class Case:
    """A valid reply, and what it is validated against."""

    setup: Setup
    sent: SentJob
    round: int
    data: bytes


@dataclass
class Found:
    """What became of the messages."""

    refused: Counter[str] = field(default_factory=Counter)
    accepted: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    """Seconds of processor time."""
    grown: float = 0.0
    """Megabytes by which the peak memory of the process grew."""


def cases() -> list[Case]:
    """Return valid replies of real clients of a small network."""
    found: list[Case] = []
    for method, optimizer, codec in PARTS:
        engine, checked = Recording(), []

        def watched(setup: Setup, message: Any, sent: SentJob, round: int, seen: list[Any] = checked) -> Any:
            seen.append((setup, sent, round))
            return validation.check_upload(setup, message, sent, round)

        with mock.patch.object(dispatch, "check_upload", watched):
            testing.run(
                method, model=_small, optimizer=create("optimizers", optimizer), codec=create("codecs", codec),
                engine=engine, rounds=1, evaluate_clients="none", capacities={1.0: 0.5, 0.25: 0.5},
            )  # fmt: skip
        trained = [bytes(data) for data in engine.up if decode(data).kind == "trained"]
        found += [Case(*one, data) for one, data in zip(checked, trained, strict=True)]
    return found


def _small(width: float = 1.0) -> nn.Module:
    inner = max(2, round(16 * float(width)))
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, inner), nn.BatchNorm1d(inner), nn.ReLU(), nn.Linear(inner, inner), nn.ReLU(),
        nn.Linear(inner, 10),
    )  # fmt: skip


def _bits(data: bytearray, rng: random.Random, others: list[Case]) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _header_bits(data: bytearray, rng: random.Random, others: list[Case]) -> None:
    length = int.from_bytes(data[:8], "little")
    for _ in range(rng.choice((1, 2, 4))):
        data[rng.randrange(min(len(data), 8 + length))] = rng.randrange(256)


def _cut(data: bytearray, rng: random.Random, others: list[Case]) -> None:
    del data[rng.randrange(len(data)) :]


def _longer(data: bytearray, rng: random.Random, others: list[Case]) -> None:
    place = rng.randrange(len(data) + 1)
    data[place:place] = rng.randbytes(rng.choice((1, 8, 100)))


def _length(data: bytearray, rng: random.Random, others: list[Case]) -> None:
    length = rng.choice((0, 1, len(data), max(0, len(data) - 8), 2**20, 2**31, 2**63, rng.getrandbits(64)))
    data[:8] = length.to_bytes(8, "little")


def _spliced(data: bytearray, rng: random.Random, others: list[Case]) -> None:
    other = rng.choice(others).data
    begin, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    data[begin:end] = other[begin : begin + rng.choice((end - begin, rng.randrange(len(other) + 1)))]


def _another(data: bytearray, rng: random.Random, others: list[Case]) -> None:
    data[:] = rng.choice(others).data


def _numbers(data: bytearray, rng: random.Random, others: list[Case]) -> None:
    """Overwrite a few tensor values by numbers that are not finite, or very large."""
    start = 8 + int.from_bytes(data[:8], "little")
    for _ in range(rng.choice((1, 3))):
        place = start + 4 * rng.randrange(max(1, (len(data) - start) // 4))
        data[place : place + 4] = rng.choice(
            (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff", b"\xff\xff\x7f\x7f", b"\xff\x7f\xff\x7f")
        )


ODD = (
    None,
    True,
    -1,
    0,
    2**31,
    2**53,
    10**400,
    1e308,
    -0.0,
    "",
    "1",
    "\ud800",
    [],
    {},
    [[[]]],
    [0, 0],
    {"a": 1},
    "x" * 5000,
)


def _json(data: bytearray, rng: random.Random, others: list[Case]) -> None:
    """Replace, remove, rename or add a value of the header or of the fields; the header remains JSON."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    where: Any = header
    if rng.random() < 0.5:
        where = json.loads(header["__metadata__"]["fields"])
        _spoil(where, rng)
        header["__metadata__"]["fields"] = json.dumps(where)
    else:
        while rng.random() < 0.6 and isinstance(where, dict) and where:
            inner = where[rng.choice(list(where))]
            if not isinstance(inner, dict) or not inner:
                break
            where = inner
        _spoil(where, rng)
    text = json.dumps(header).encode()
    data[: 8 + length] = len(text).to_bytes(8, "little") + text


def _spoil(where: dict[str, Any], rng: random.Random) -> None:
    key, value = rng.choice([*where, "other"]), rng.choice(ODD)
    what = rng.randrange(4)
    if what == 0:
        where[key] = value
    elif what == 1:
        where.pop(key, None)
    elif what == 2 and key in where:
        where[rng.choice(("", "..", "model/", "extra/x", "é" * 50))] = where.pop(key)
    elif isinstance(inner := where.get(key), list) and inner:
        inner[rng.randrange(len(inner))] = value


MUTATIONS: tuple[Callable[[bytearray, random.Random, list[Case]], None], ...] = (
    _bits, _header_bits, _cut, _longer, _length, _spliced, _another, _numbers, _json, _json, _json,
)  # fmt: skip


def fuzz(messages: int, seed: int = 0, among: list[Case] | None = None) -> Found:
    """Damage so many messages, each in one to three ways, and return what became of them."""
    rng, found, all_cases = random.Random(seed), Found(), among or cases()
    for case in all_cases:
        check_upload(case.setup, decode(bytearray(case.data)), case.sent, case.round)  # raises if it is not valid
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(messages):
        case = rng.choice(all_cases)
        data = bytearray(case.data)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            try:
                rng.choice(MUTATIONS)(data, rng, all_cases)
            except (ValueError, KeyError, IndexError, TypeError):  # an earlier mutation left no header to change
                continue
        start = time.process_time()
        try:
            reply, fields = check_upload(case.setup, decode(data), case.sent, case.round)
        except BadMessage as error:
            found.refused[_kind_of(str(error))] += 1
        except Exception as error:
            found.wrong.append(f"message {number}: {type(error).__name__}: {error}")
        else:
            found.accepted += 1
            if reason := _not_honest(case, reply.tensors, fields):
                found.wrong.append(f"message {number}: accepted, but {reason}")
        found.slowest = max(found.slowest, time.process_time() - start)
        if (number + 1) % 50_000 == 0:
            told = f"{number + 1:,} messages: refused {found.refused.total():,}, accepted as honest {found.accepted:,}"
            print(f"{told}, wrong {len(found.wrong):,}", file=sys.stderr, flush=True)
    found.grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    return found


def _not_honest(case: Case, tensors: dict[str, torch.Tensor], fields: dict[str, Any]) -> str:
    """Say why an accepted reply could not have come from an honest client; empty if it could."""
    who = case.sent.who
    if (fields["client"], fields["round"], fields["capacity"]) != (who.client, case.round, who.capacity):
        return "it belongs to another job"
    wanted = {name: t for name, t in case.sent.reference.items() if name in tensors}
    if any(tensors[name].shape != t.shape or tensors[name].dtype != t.dtype for name, t in wanted.items()):
        return "shapes or types differ"
    if wanted.keys() != tensors.keys() or not tensors:
        return "names differ"
    if not all(bool(t.isfinite().all()) for t in tensors.values()):
        return "numbers are not finite"
    return "" if type(fields["samples"]) is int and fields["samples"] > 0 else "the number of examples is not one"


def _kind_of(reason: str) -> str:
    """Return the first words of a reason, without names and numbers."""
    words = [word for word in reason.split() if word.isalpha()]
    return " ".join(words[:5])


def main() -> None:
    """Print a table of what became of the messages; end with status 1 if something went wrong."""
    messages = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    torch.set_num_threads(1)
    start, found = time.perf_counter(), fuzz(messages)
    print(f"{messages:,} messages in {time.perf_counter() - start:.0f} s")
    print(f"refused {found.refused.total():,}, accepted as honest {found.accepted:,}, wrong {len(found.wrong):,}")
    print(f"slowest {1e3 * found.slowest:.1f} ms, peak memory grew by {found.grown:.1f} MB")
    for reason, count in found.refused.most_common(12):
        print(f"{count:>10,}  {reason} ...")
    print(*found.wrong[:10], sep="\n")
    sys.exit(bool(found.wrong))


if __name__ == "__main__":
    main()
