"""Rules against hostile clients: numbers by hand, blocks, and whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfactor.engines import Done, Inline, Pool
from fedfactor.protocol.aggregation import Aggregation, Rule
from fedfactor.protocol.attack import Attack
from fedfactor.protocol.message import decode, encode
from fedfactor.protocol.plan import HoldersMean, Piece, Reply
from fedfactor.server import robust
from fedfactor.server.replies import QuorumLost
from fedfactor.server.robust import gathered, shortened
from fedfactor.server.spool import Spool
from fedfactor.testing.federation import outcome
from tests.helpers.folding import added
from tests.helpers.tiny import Tampering, run


def reply(client: int, change: list[float], first: int | None = None) -> Reply:
    """Return the reply of a client that holds the first entries of (10, 10, 10) and has changed them."""
    index = () if first is None else (first,)
    reference = {"w": torch.full((first or 3,), 10.0)}
    return Reply(client, 1.0, 1, {"w": Piece("w", index)}, reference, {"w": reference["w"] + torch.tensor(change)}, {})


def by(rule: Rule, replies: list[Reply], hostile: float = 0.2) -> tuple[list[float], list[float]]:
    view = {"w": torch.full((3,), 10.0)}
    mean = HoldersMean(view, lambda reply: 1.0)
    new, held = added(gathered(Aggregation(rule, hostile=hostile), mean, None), replies)
    assert isinstance(held["w"], torch.Tensor)
    return (new["w"] - 10).tolist(), held["w"].tolist()


def test_the_median_of_each_element_over_its_holders() -> None:
    replies = [reply(0, [1.0, 2.0, 3.0]), reply(1, [3.0, -5.0, 4.0]), reply(2, [900.0, 1.0], first=2)]
    assert by("median", replies) == ([3.0, 1.0, 3.5], [3.0, 3.0, 2.0])


def test_an_element_that_nobody_holds_stays() -> None:
    for rule in ("median", "trimmed_mean"):
        assert by(rule, [reply(0, [1.0], first=1)]) == ([1.0, 0.0, 0.0], [1.0, 0.0, 0.0])


def test_the_trimmed_mean_leaves_out_both_ends_of_each_element() -> None:
    replies = [
        reply(0, [1.0, 8.0, 0.0]),
        reply(1, [2.0, 2.0, 0.0]),
        reply(2, [-99.0, 3.0, 0.0]),
        reply(3, [6.0, 4.0, 0.0]),
    ]
    assert by("trimmed_mean", replies, hostile=0.25)[0] == [1.5, 3.5, 0.0]
    assert by("trimmed_mean", replies, hostile=0.2)[0] == [-22.5, 4.25, 0.0]  # 0.2 of four clients is none


def test_krum_takes_the_client_with_the_nearest_neighbours() -> None:
    """Of five clients with one hostile one, each counts its two nearest: 1 + 1, 1 + 4, 1 + 4, 81 + 100, ... ."""
    far = [
        reply(0, [0.0, 0.0, 0.0]),
        reply(1, [1.0, 0.0, 0.0]),
        reply(2, [-1.0, 0.0, 0.0]),
        reply(3, [-10.0, 0.0, 0.0]),
    ]
    replies = [*far, reply(4, [0.0, 0.0, 500.0])]
    assert by("krum", replies)[0] == [0.0, 0.0, 0.0]
    assert by("multi_krum", replies) == ([-2.5, 0.0, 0.0], [4.0] * 3)  # all but the hostile one
    with pytest.raises(QuorumLost, match="krum needs more than 2 replies, but 2 clients answered"):
        by("krum", replies[:2], hostile=0.4)


def test_blocks_give_the_same_result_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [reply(client, torch.randn(3).tolist()) for client in range(7)]
    rules: list[Rule] = ["median", "trimmed_mean", "krum", "multi_krum"]
    whole = [by(rule, replies) for rule in rules]
    monkeypatch.setattr(robust, "BLOCK_BYTES", 4 * 7)  # one element of each client
    reads, read = [], Spool.read
    monkeypatch.setattr(Spool, "read", lambda self, *where: reads.append(where) or read(self, *where))
    assert [by(rule, replies) for rule in rules] == whole
    assert all(end - start == 4 for _, start, end in reads) and len(reads) == 7 * 3 * (1 + 1 + 2 + 2)


def test_a_long_change_is_shortened_to_the_bound() -> None:
    long = reply(0, [3.0, 0.0, 4.0])
    assert shortened(long, 1.0).change("w").tolist() == pytest.approx([0.6, 0.0, 0.8], abs=1e-6)
    assert shortened(long, 5.0) is long


@pytest.mark.parametrize("kind", ["sign_flip", "scale", "noise"])
def test_attacks_change_what_is_sent(kind: Any) -> None:
    attack = Attack(kind, share=0.5, strength=2.0)
    trained, reference = (
        {"w": torch.tensor([1.0, 3.0]), "n": torch.tensor(4)},
        {"w": torch.zeros(2), "n": torch.tensor(0)},
    )
    sent = attack.spoilt(trained, reference, torch.Generator().manual_seed(0))
    noise = torch.randn(2, generator=torch.Generator().manual_seed(0)) * 5**0.5
    assert sent["n"] == 4 and sent["w"].allclose(
        {"sign_flip": -2, "scale": 2}.get(kind, 0) * trained["w"] + 2 * noise * (kind == "noise")
    )


def test_the_hostile_clients_are_the_same_on_every_machine() -> None:
    found = Attack("scale", share=0.3).hostile(7, 10)
    assert found == Attack("noise", share=0.3).hostile(7, 10) and len(found) == 3
    assert found != Attack("scale", share=0.3).hostile(8, 10)


@pytest.mark.parametrize("method", ["fedavg", "fedpara", "heterofl"])
def test_rules_keep_a_model_that_the_mean_loses(method: str) -> None:
    """One of six clients sends its change with the opposite sign, seven times as long: the mean goes backwards."""
    capacities = {1.0: 0.5, 0.5: 0.5} if method == "heterofl" else {1.0: 1.0}
    settings: dict[str, Any] = {"cohort": 6, "rounds": 8, "lr": 0.2 if method == "fedpara" else 0.05}
    attack = Attack("sign_flip", 1 / 6, 7.0)

    def accuracy(rule: Aggregation) -> float:
        found = run(method, aggregation=rule, capacities=capacities, attack=attack, **settings)
        return float(found.history[-1]["global"]["1"]["accuracy"])

    lost = accuracy(Aggregation())
    assert accuracy(Aggregation("median")) > lost + 0.1
    assert accuracy(Aggregation("trimmed_mean", hostile=0.34)) > lost + 0.1


def test_wrong_labels_and_rules_have_the_same_bits_in_the_pool() -> None:
    settings: dict[str, Any] = {"cohort": 6, "attack": Attack("label_flip", 0.5), "aggregation": Aggregation("median")}
    alone = run("fedavg", **settings).summary["weights_sha256"]
    with Pool(2) as pool:
        assert run("fedavg", engine=pool, **settings).summary["weights_sha256"] == alone
    assert run("fedavg", **{**settings, "attack": None}).summary["weights_sha256"] != alone


@pytest.mark.parametrize(
    ("method", "settings", "reason"),
    [
        ("fedhm", {"aggregation": Aggregation("median")}, "median needs fixed coordinates, which fedhm does not have"),
        ("fedex_lora", {"aggregation": Aggregation("median")}, "median has no mean whose error fedex_lora could add"),
        ("fedavg", {"aggregation": Aggregation("median"), "optimizer": "scaffold"}, "clients of scaffold send beside"),
        ("heterofl", {"aggregation": Aggregation("krum")}, "krum compares whole models"),
        ("fedavg", {"aggregation": Aggregation("krum", hostile=0.4)}, "at least three clients more than twice"),
    ],
)
def test_what_has_no_meaning_is_refused(method: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        run(method, **settings)


def test_a_client_cannot_claim_more_examples_than_the_limit() -> None:
    """With a limit of one example, all clients weigh the same, whatever they claim."""

    def claiming(done: Done) -> Done:
        message = decode(done.reply or b"")
        return replace(done, reply=encode(replace(message, fields={**message.fields, "samples": 10**6})))

    liar = Tampering(3, claiming)
    honest, capped, believed = (
        run("fedavg", cohort=6, engine=engine, aggregation=rule).summary["weights_sha256"]
        for engine, rule in (
            (Inline(), Aggregation(max_samples=1)),
            (liar, Aggregation(max_samples=1)),
            (liar, Aggregation()),
        )
    )
    assert honest == capped != believed


def test_a_client_with_too_many_invalid_replies_is_left_out(tmp_path: Path) -> None:
    """It is asked in the first two rounds and not after them, also by a run that is resumed."""
    nonsense = Tampering(3, lambda done: replace(done, reply=b"nonsense"))
    given: dict[str, Any] = {"cohort": 6, "engine": nonsense, "aggregation": Aggregation(strikes=2)}
    run("fedavg", rounds=2, directory=tmp_path, **given)
    found = run("fedavg", rounds=4, directory=tmp_path, **given)
    rounds = [event for event in found.history if event["event"] == "round"]
    assert [3 in event["cohort"] for event in rounds] == [True, True, False, False]
    assert [event.get("left_out") for event in rounds] == [None, None, [3], [3]]
    assert [len(event["failures"]) for event in rounds] == [1, 1, 0, 0]
    assert outcome(found) == outcome(run("fedavg", rounds=4, **given))


def test_divergence_is_not_held_against_a_client() -> None:
    def diverged(done: Done) -> Done:
        message = decode(done.reply or b"")
        return replace(done, reply=encode(replace(message, fields={**message.fields, "loss": float("nan")})))

    found = run("fedavg", rounds=3, cohort=6, engine=Tampering(3, diverged), aggregation=Aggregation(strikes=1))
    assert all(3 in event["cohort"] for event in found.history if event["event"] == "round")


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="bound should be given with the rule norm_bound"):
        Aggregation("norm_bound")
    with pytest.raises(ValueError, match=r"hostile: Input should be less than 0\.5"):
        Aggregation("krum", hostile=0.5)
