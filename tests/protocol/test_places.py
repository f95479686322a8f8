"""What clients keep where their networks change their sizes: hand-computed, and as sums over a whole run."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfactor.engines import Pool
from fedfactor.methods import FedRolex, HeteroFL
from fedfactor.optimizers import Scaffold
from fedfactor.protocol.codecs import TopK
from fedfactor.protocol.coding import sections
from fedfactor.protocol.message import BadMessage, decode
from fedfactor.protocol.places import Places
from fedfactor.protocol.plan import Piece, slice_plan
from fedfactor.protocol.settings import Capacities
from fedfactor.server.result import Result
from tests.helpers.networks import Text
from tests.helpers.tiny import METHODS, Recording, refusal, run

DYNAMIC = Capacities({1.0: 0.4, 0.5: 0.3, 0.25: 0.3}, dynamic=True)


def round_of(kept: dict[str, torch.Tensor], width: int, c: float, moved: list[float]) -> dict[str, torch.Tensor]:
    """One round of SCAFFOLD at a width: K eta = 0.1, the server's c the same everywhere, w moved by as much."""
    places = Places({"w": Piece("w", (None if width == 3 else width,))})
    down, extras = {"w": torch.zeros(width)}, {"w": torch.full((width,), c)}
    ctx = SimpleNamespace(down=down, extras=extras, state=places.take(kept, down), travel={"w": 0.1})
    _, state = Scaffold().finish({"w": torch.tensor(moved)}, ctx)  # type: ignore[arg-type]
    return places.put(kept, state)


def test_control_variates_over_rounds_of_different_widths_by_hand() -> None:
    """c_i+ = c_i - c + (x - y) / (K eta) of what is held; what is not held stays as it was."""
    kept = round_of({}, 2, 0.0, [0.1, 0.2])  # first held: c_i was 0
    assert kept["w"].tolist() == pytest.approx([-1.0, -2.0])
    kept = round_of(kept, 1, 0.5, [0.3])  # -1 - .5 - 3; the second one stays
    assert kept["w"].tolist() == pytest.approx([-4.5, -2.0])
    kept = round_of(kept, 3, 1.0, [0.0, 0.1, 0.2])  # -4.5 - 1; -2 - 1 - 1; 0 - 1 - 2
    assert kept["w"].tolist() == pytest.approx([-5.5, -4.0, -3.0])
    kept = round_of(kept, 2, 0.0, [0.0, 0.0])
    assert kept["w"].tolist() == pytest.approx([-5.5, -4.0, -3.0])


def test_left_out_changes_wait_for_the_round_that_holds_them_again() -> None:
    """Top-1 of changes (3, 1, 2): 1 and 2 wait. At width 1, 0.5 is sent; at width 3 again, the waiting 2 goes."""
    codec, kept = TopK(share=0.01), {}
    for width, change, expected in (
        (3, [3.0, 1.0, 2.0], [0, 1, 2]),
        (1, [0.5], [0, 1, 2]),
        (3, [0.0, 0.0, 0.0], [0, 1, 0]),
    ):
        places = Places({"w": Piece("w", (width,))})
        reference = {"w": torch.zeros(width)}
        _, state = codec.up({"w": torch.tensor(change)}, reference, places.take(kept, reference), torch.Generator())
        kept = places.put(kept, state)
        assert kept["w"].tolist() == expected


def test_gates_keep_their_places() -> None:
    """Two gates of three units: a client of one unit has rows 0 and 3, of two units rows 0, 1, 3 and 4."""
    server = {"w": torch.zeros(6)}
    one = Places(slice_plan(server, {"w": torch.zeros(2)}, {"w": (2,)}))
    two = Places(slice_plan(server, {"w": torch.zeros(4)}, {"w": (2,)}))
    kept = one.put({}, {"w": torch.tensor([1.0, 2.0])})
    assert kept["w"].tolist() == [1, 0, 0, 2]
    assert two.take(kept, {"w": torch.zeros(4)})["w"].tolist() == [1, 0, 2, 0]
    assert two.put(kept, {"w": torch.tensor([5.0, 6.0, 7.0, 8.0])})["w"].tolist() == [5, 6, 0, 7, 8]


axes = st.one_of(
    st.none(), st.integers(1, 6).map(lambda n: n), st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)
)


@given(st.lists(axes, min_size=1, max_size=3), st.integers(0, 9))
def test_what_was_put_is_taken_again_and_survives_the_wire(index: list[object], seed: int) -> None:
    parts = tuple(torch.tensor(part) if isinstance(part, list) else part for part in index)
    shape = [7 if p is None else p if isinstance(p, int) else len(p) for p in parts]
    rng = torch.Generator().manual_seed(seed)
    held, before = {"a": torch.randn(shape, generator=rng)}, torch.randn([11] * len(shape), generator=rng)
    piece = Piece("b", parts)  # type: ignore[arg-type]
    places = Places({"a": piece})
    read = Places.read(places.written(), held)
    for kept in ({}, {"b": before}):
        if kept and None in parts:  # a whole axis is the server's: nothing can reach farther
            continue
        new = read.put(kept, held)
        assert torch.equal(read.take(new, held)["a"], held["a"])
        if kept:
            rest, old = new["b"].clone(), before.clone()
            for tensor in (rest, old):
                piece.add(tensor, -piece.take(tensor))
            assert torch.equal(rest, old)
    assert read.take({}, held) == {} and Places().take({"x": before}, held)["x"] is before


@pytest.mark.parametrize(
    "written",
    [
        "w", {"other": ["w", []]}, {"w": "w"}, {"w": ["w"]}, {"w": [3, []]}, {"w": ["w", [None, None, None]]},
        {"w": ["w", [3]]}, {"w": ["w", [[[0, 3]]]]}, {"w": ["w", [[[-1, 2]]]]}, {"w": ["w", [[[0, 2.0]]]]},
        {"w": ["w", [[[0, True], [1, 1]]]]}, {"w": ["w", [[[1 << 40, 2]]]]}, {"w": ["w", ["ab"]]}, {"w": ["w", [[[0], [1]]]]},
    ],
    ids=str,
)  # fmt: skip
def test_places_that_are_none_are_refused(written: object) -> None:
    with pytest.raises(BadMessage, match="place"):
        Places.read(written, {"w": torch.zeros(2, 5)})


# Over whole runs: the server's state is the mean over all clients of theirs.


def kept_by(result: Result, section: str) -> list[dict[str, torch.Tensor]]:
    store = result.federation.store
    states = [decode(store.read("client", client) or b"") for client in store.clients("client")]
    return [sections(state.tensors).get(section, {}) for state in states]


@pytest.mark.parametrize(("optimizer", "kind"), [("scaffold", "c"), ("feddyn", "h")])
@pytest.mark.parametrize("method", ["heterofl", "fjord", "flanc", "origdrop"])
def test_the_servers_variates_are_the_mean_of_the_clients(method: str, optimizer: str, kind: str) -> None:
    """c = mean c_i, and h = mean g_i: an element that a client never held counts as zero there."""
    result = run(method, optimizer=optimizer, capacities=DYNAMIC, rounds=5, cohort=4)
    widths = {level for event in result.history[1:] for level in event["capacities"]}
    assert widths == {1.0, 0.5, 0.25}
    clients = kept_by(result, "optimizer")
    for name, tensor in result.server.optimizer[kind].items():
        total = torch.zeros_like(tensor)
        for state in clients:
            if name in state:
                total[tuple(slice(n) for n in state[name].shape)] += state[name]
        torch.testing.assert_close(tensor, total / 6, rtol=1e-3, atol=1e-5, msg=name)
    assert all(tensor.abs().max() > 0 for name, tensor in result.server.optimizer[kind].items() if "conv2" in name)


def test_a_weak_client_keeps_no_more_than_it_ever_held() -> None:
    result = run(HeteroFL(), optimizer="scaffold", capacities=Capacities({0.5: 0.5, 0.25: 0.5}, True), rounds=4)
    sizes = {tuple(state["conv2.weight"].shape) for state in kept_by(result, "optimizer")}
    assert sizes <= {(8, 4, 3, 3), (4, 2, 3, 3)} and (8, 4, 3, 3) in sizes


@pytest.mark.parametrize("method", METHODS)
def test_everything_that_keeps_state_runs_with_dynamic_capacities_or_is_refused(method: str) -> None:
    for optimizer, codec in (("scaffold", "topk"), ("feddyn", "int8")):
        reason = refusal(method, optimizer, codec)
        settings = {"optimizer": optimizer, "codec": codec, "capacities": DYNAMIC, "rounds": 3, "cohort": 4}
        settings |= {"evaluate_every": 0, "evaluate_clients": "none"}
        if reason:
            with pytest.raises(ValueError, match=re.escape(reason)):
                run(method, **settings)
        else:
            assert run(method, **settings).summary["totals"]["failures"] == 0


def test_places_travel_only_where_they_are_needed_and_are_counted() -> None:
    for method, capacities, optimizer, there in (
        ("fjord", DYNAMIC, "scaffold", True),
        ("fjord", DYNAMIC, "fedavg", False),
        ("fjord", None, "scaffold", False),
        (FedRolex(static_norm=False, scaler=False), None, "scaffold", True),  # its window moves
    ):
        engine = Recording()
        result = run(method, optimizer=optimizer, capacities=capacities or {1.0: 0.5, 0.5: 0.5}, engine=engine)
        assert {"places" in decode(message).fields for message in engine.down} == {there}
        assert result.summary["totals"]["bytes_down"] == sum(map(len, engine.down))


def test_recurrent_networks_change_their_size_too() -> None:
    result = run(HeteroFL(), model=Text, optimizer="scaffold", codec="topk", capacities=DYNAMIC, rounds=4, cohort=4)
    assert result.summary["totals"]["failures"] == 0
    c, clients = result.server.optimizer["c"]["lstm.weight_hh_l0"], kept_by(result, "optimizer")
    total = torch.zeros_like(c)
    for state in clients:
        kept = state["lstm.weight_hh_l0"]
        total[: len(kept), : kept.shape[1]] += kept
    torch.testing.assert_close(c, total / 6, rtol=1e-3, atol=1e-6)


def test_stopped_carried_on_and_pooled_it_has_the_same_bits(tmp_path: Path) -> None:
    settings = {"optimizer": "scaffold", "codec": "topk", "capacities": DYNAMIC, "cohort": 4}
    whole = run("heterofl", rounds=4, **settings).summary
    for rounds in (1, 2, 3, 4):
        parts = run("heterofl", rounds=rounds, directory=tmp_path, **settings).summary
    with Pool(workers=2) as pool:
        pooled = run("heterofl", rounds=4, engine=pool, **settings).summary
    for key in ("weights_sha256", "private_sha256"):
        assert whole[key] == parts[key] == pooled[key]
