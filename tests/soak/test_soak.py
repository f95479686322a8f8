"""The parts of the soak: replies are damaged as they should be, disturbances are drawn, growth is noticed."""

from __future__ import annotations

import random

import pytest

from fedfactor.protocol.message import BadMessage, decode
from fedfactor.protocol.validation import check_upload
from tests.helpers.recipes import recipe
from tests.soak import fuzz
from tests.soak.faults.sitecustomize import KINDS, ONE_IN, damage_of, damaged
from tests.soak.soak import OLD, SETTINGS, TRAINING, LeftOut, Watched, plan, run


def test_every_damaged_reply_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "PARTS", (("fedpara", "scaffold", "topk"),))
    case = fuzz.cases()[0]
    for kind in KINDS:
        with pytest.raises(BadMessage):
            check_upload(case.setup, decode(bytearray(damaged(bytearray(case.data), kind))), case.sent, case.round)


def test_the_same_replies_are_always_damaged_in_all_ways() -> None:
    found = [damage_of(round, client) for round in range(500) for client in range(6)]
    assert {*found} == {"", *KINDS}
    assert 0.5 < ONE_IN * sum(map(bool, found)) / len(found) < 2


@pytest.mark.parametrize("engine", SETTINGS)
def test_each_disturbance_is_drawn_and_old_processes_are_spared(engine: str) -> None:
    strikes = plan(SETTINGS[engine], 3600, random.Random(0))
    assert {strike.kind for strike in strikes} == {*SETTINGS[engine].every}
    assert {strike.kind for strike in strikes if strike.at > 1800} <= {*TRAINING}
    assert {strike.kind for strike in plan(SETTINGS[engine], 10, random.Random(0))} == {*SETTINGS[engine].every}


def test_growth_is_noticed_after_the_first_quarter_of_a_life() -> None:
    seconds = range(0, 60 * OLD + 60, 5)
    assert Watched("flat", [(t, 100.0 if t > 60 else 20.0, 10, 3) for t in seconds]).grown == []
    assert Watched("leak", [(t, 100 + t / 10, 10 + t // 60, 3) for t in seconds]).grown == ["memory", "files"]
    assert Watched("young", [(t, 100.0 + t, 10, 3) for t in (0, 5, 10, 15)]).grown == []


def test_replies_are_left_out_by_round_and_client() -> None:
    lost: list[tuple[int, int]] = []

    def note(event: dict[str, object]) -> None:
        if event["event"] == "answered" and event["failure"] is not None:
            lost.append((event["round"], event["client"]))  # type: ignore[arg-type]

    wanted = frozenset((round, client) for round in (1, 3) for client in range(2))
    whole = run(recipe()).summary
    found = run(recipe(), engine=LeftOut(wanted), on_event=note).summary
    assert lost and {*lost} <= wanted
    assert found["weights_sha256"] != whole["weights_sha256"]
    assert run(recipe(), engine=LeftOut(frozenset())).summary["weights_sha256"] == whole["weights_sha256"]
