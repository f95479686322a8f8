"""Buffered rounds: who answers when, replies that wait, and runs that equal synchronous ones or resumed ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfactor.engines import Pool
from fedfactor.protocol.buffering import Buffering
from fedfactor.protocol.fleet import Device, Fleet
from fedfactor.protocol.plan import Piece, Reply
from fedfactor.server.buffer import Buffer
from fedfactor.server.result import Result
from fedfactor.testing.federation import outcome
from tests.helpers.tiny import Tampering, run

FAST = Device(speed=1e9, mbps_down=10.0, mbps_up=10.0, share=0.5)
SLOW = Device(speed=1e8, mbps_down=1.0, mbps_up=1.0, spread=0.5, failure=0.2, share=0.5)
EQUAL = Fleet({"fast": Device(speed=1e9, mbps_down=10.0, mbps_up=10.0)})
MIXED = Fleet({"fast": FAST, "slow": SLOW})
TWO = Buffering("buffered", buffer=2)


def buffered(method: str = "fedavg", **given: Any) -> Result:
    """Run rounds of two replies with four clients at a time, half of which are slow."""
    options: dict[str, Any] = {"fleet": MIXED, "buffering": TWO, "rounds": 6, "cohort": 4, "capacities": {1.0: 1.0}}
    return run(method, **{**options, **given})


def rounds_of(result: Result) -> list[dict[str, Any]]:
    return [event for event in result.history if event["event"] == "round"]


@pytest.mark.parametrize("method", ["fedavg", "fedpara", "fedper"])
def test_a_full_buffer_of_equal_devices_is_a_synchronous_round(method: str) -> None:
    same: dict[str, Any] = {"fleet": EQUAL, "rounds": 3, "capacities": {1.0: 1.0}, "cohort": 3}
    synchronous = run(method, **same)
    found = run(method, **same, buffering=Buffering("buffered", buffer=3))
    for key in ("weights_sha256", "private_sha256", "bytes_up", "bytes_down"):
        assert found.summary[key] == synchronous.summary[key]
    assert [event["clock"]["seconds"] for event in rounds_of(found)] == pytest.approx(
        [event["clock"]["seconds"] for event in rounds_of(synchronous)]
    )


def test_slow_clients_answer_later_models() -> None:
    events = rounds_of(buffered())
    ages = [age for event in events for age in event["buffered"]["ages"]]
    assert len(ages) == 12 and max(ages) > 1 and min(ages) == 0
    pending: set[int] = set()
    for number, event in enumerate(events):
        clock, waited = event["clock"], event["buffered"]
        started = dict(zip(clock["clients"], clock["outcomes"], strict=True))
        assert not pending & started.keys(), "a client that trains is not asked again"
        for client, age in zip(waited["clients"], waited["ages"], strict=True):
            assert started.get(client) == "used" if age == 0 else client in pending
        pending -= {*waited["clients"]}
        pending |= {client for client, what in started.items() if what == "pending"}
        if number:
            assert len(pending) <= 4


@settings(max_examples=25, deadline=None)
@given(room=st.integers(1, 6), size=st.integers(1, 6), seed=st.integers(0, 99))
def test_the_clock_goes_forward_and_never_holds_more_clients_than_there_is_room_for(
    room: int, size: int, seed: int
) -> None:
    federation = buffered(rounds=0, seed=seed).federation

    assert federation.clock is not None
    made = Buffering("buffered", concurrency=room, buffer=min(room, size))
    buffer = Buffer(made, federation.rounds, federation.clock, 6, seed, federation.dispatch.participant)
    end = 0.0
    for number in range(8):
        window = buffer.window(number)
        assert window.begin == end <= window.end and len(window.active) <= room
        assert len(window.arrived) == min(room, size) or not window.active
        assert all(one.second >= window.end for one in window.active)
        end = window.end
    assert buffer.window(0).begin == 0.0, "an earlier round is followed again from the start"


def test_a_run_that_is_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = buffered(directory=tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(event: dict[str, Any]) -> None:
        if (event["event"], event.get("round")) == ("committed", 3):
            raise Stop

    with pytest.raises(Stop):
        buffered(directory=tmp_path / "part", on_event=stop)
    assert list((tmp_path / "part" / "checkpoint" / "pending").rglob("*.*")), "replies wait on disk"
    assert outcome(buffered(directory=tmp_path / "part")) == outcome(whole)
    assert whole.summary["weights_sha256"] == buffered().summary["weights_sha256"]


def test_the_pool_has_the_same_bits() -> None:
    with Pool(2) as pool:
        assert outcome(buffered("fedper", engine=pool)) == outcome(buffered("fedper"))


def test_an_old_change_counts_less() -> None:
    old = Reply(0, 1.0, 1, {"w": Piece("w")}, {"w": torch.tensor([1.0])}, {"w": torch.tensor([5.0])}, {})
    assert old.scaled(TWO.weight(3)).tensors["w"].item() == 3.0  # 1 + 4 / sqrt(1 + 3)
    assert old.scaled(TWO.weight(0)) is old


def test_a_reply_that_was_not_valid_is_missing_when_its_time_comes() -> None:
    """The client answers nonsense each time; its failures are named, and the others go on."""
    late = next(client for event in rounds_of(buffered()) for client, age in _replies(event) if age > 0)

    found = buffered(engine=Tampering(late, lambda done: replace(done, reply=b"nonsense")))
    reasons = [
        failure["reason"] for event in rounds_of(found) for failure in event["failures"] if failure["client"] == late
    ]
    assert any(reason.startswith("sent no valid reply when it trained in round") for reason in reasons)


def _replies(event: dict[str, Any]) -> list[tuple[int, int]]:
    return list(zip(event["buffered"]["clients"], event["buffered"]["ages"], strict=True))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"fleet": None}, r"needs a \[fleet\]"),
        ({"fleet": Fleet({"a": FAST, "b": SLOW}, deadline=9.0)}, "are for synchronous rounds"),
        ({"method": "fedhm"}, "fedhm needs synchronous rounds"),
        ({"method": "fedex_lora"}, "fedex_lora needs synchronous rounds"),
        ({"method": "pufferfish"}, "pufferfish needs synchronous rounds"),
        ({"optimizer": "scaffold"}, "scaffold needs synchronous rounds"),
        ({"buffering": Buffering("buffered", buffer=5)}, "a buffer of 5 replies needs at least as many clients"),
    ],
)
def test_what_cannot_be_buffered_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        buffered(**given)


def test_a_run_cannot_become_synchronous(tmp_path: Path) -> None:
    buffered(directory=tmp_path, rounds=2)
    with pytest.raises(ValueError, match=r"buffering was .* is now None"):
        buffered(directory=tmp_path, rounds=3, buffering=Buffering())


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="say after how many replies"):
        Buffering("buffered")
    with pytest.raises(ValueError, match="are for mode"):
        Buffering(buffer=3)
