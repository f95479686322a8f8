"""The map between server and client: pulled by hand, averaged by hand."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfactor.protocol.plan import HoldersMean, HoldersSum, Piece, Reply, pull, slice_plan, whole_plan
from tests.helpers.folding import added, holders_mean


def reply(plan: dict[str, Piece], change: dict[str, torch.Tensor], client: int = 0) -> Reply:
    reference = {name: torch.zeros_like(tensor) for name, tensor in change.items()}
    return Reply(client, 1.0, 1, plan, reference, change, {})


def test_pull_takes_prefixes_lists_and_wholes() -> None:
    view = {"w": torch.arange(12.0).view(3, 4)}
    plan = {
        "a": Piece("w"),
        "b": Piece("w", (2, None)),
        "c": Piece("w", (None, torch.tensor([3, 0]))),
        "d": Piece("w", (torch.tensor([2]), 2)),
    }
    got = pull(view, plan)
    assert got["a"].shape == (3, 4)
    assert got["b"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert got["c"].tolist() == [[3, 0], [7, 4], [11, 8]]
    assert got["d"].tolist() == [[8, 9]]


def test_mean_over_holders_by_hand() -> None:
    """Two clients overlap in one element, one element is nobody's: overlap, one holder, nobody."""
    view = {"w": torch.tensor([10.0, 20.0, 30.0, 40.0])}
    one = reply({"w": Piece("w", (2,))}, {"w": torch.tensor([1.0, 2.0])})
    two = reply({"w": Piece("w", (torch.tensor([1, 2]),))}, {"w": torch.tensor([5.0, 6.0])})
    mean, held = holders_mean(view, [one, two], [1.0, 3.0])
    assert mean["w"].tolist() == [11.0, 20 + (2 + 3 * 5) / 4, 36.0, 40.0]
    assert held["w"].tolist() == [1, 2, 1, 0]


def test_everybody_holds_everything() -> None:
    view = {"w": torch.tensor([1.0]), "steps": torch.tensor(7)}
    plan = whole_plan(view)
    changes = [
        {"w": torch.tensor([4.0]), "steps": torch.tensor(2)},
        {"w": torch.tensor([0.0]), "steps": torch.tensor(5)},
    ]
    mean, held = holders_mean(view, [reply(plan, c) for c in changes], [1.0, 1.0])
    assert mean["w"].tolist() == [3.0] and held == {"w": 2, "steps": 2}
    assert mean["steps"].dtype is torch.int64 and int(mean["steps"]) == 10  # 7 + 3.5, halves to even


def test_wholes_and_parts_of_several_axes_by_hand() -> None:
    """All of a 2 x 2 tensor, its first row, all again and its first column: per element 4, 3, 3 and 2 holders."""
    view = {"w": torch.zeros(2, 2)}
    pieces = [Piece("w"), Piece("w", (1, None)), Piece("w"), Piece("w", (None, 1))]
    values = [torch.full((2, 2), 1.0), torch.full((1, 2), 2.0), torch.full((2, 2), 3.0), torch.full((2, 1), 4.0)]
    replies = [reply({"w": piece}, {"w": value}) for piece, value in zip(pieces, values, strict=True)]
    mean, held = holders_mean(view, replies, [1.0, 2.0, 3.0, 4.0])
    assert held["w"].tolist() == [[4, 3], [3, 2]]
    torch.testing.assert_close(mean["w"], torch.tensor([[30 / 10, 14 / 6], [26 / 8, 10 / 4]]))


def test_equal_weights_give_the_same_bits_whatever_their_value() -> None:
    rng = torch.Generator().manual_seed(0)
    view = {"w": torch.randn(50, generator=rng)}
    replies = [reply(whole_plan(view), {"w": torch.randn(50, generator=rng)}) for _ in range(3)]
    one, many = (added(HoldersMean(view, lambda reply, w=weight: w), replies)[0] for weight in (1.0, 57.0))
    assert torch.equal(one["w"], many["w"])


def test_replies_without_weight_change_nothing() -> None:
    view = {"w": torch.ones(2)}
    for piece in (Piece("w"), Piece("w", (1,))):
        mean, _ = holders_mean(
            view, [reply({"w": piece}, {"w": torch.ones(2)[: piece.take(view["w"]).numel()]})], [0.0]
        )
        assert mean["w"].tolist() == [1.0, 1.0]


def test_a_fold_keeps_nothing_of_a_reply_and_leaves_the_view() -> None:
    view, plan = {"w": torch.zeros(3)}, whole_plan(["w"])
    fold = HoldersMean(view, lambda reply: 1.0)
    for value in (1.0, 3.0):
        sent = torch.full((3,), value)
        fold.add(reply(plan, {"w": sent}))
        sent.fill_(100.0)
    assert fold.result()[0]["w"].tolist() == [2.0] * 3 and view["w"].tolist() == [0.0] * 3


def test_tensors_nobody_sent_stay() -> None:
    view = {"w": torch.tensor([1.0]), "other": torch.tensor([2.0])}
    mean, held = holders_mean(view, [reply({"w": Piece("w")}, {"w": torch.tensor([1.0])})], [1.0])
    assert mean["other"] is view["other"] and held["other"] == 0


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10))
def test_no_change_leaves_the_view_to_the_bit(rows: int, columns: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    view = {"w": torch.randn(5, 5, generator=rng)}
    plan = {"w": Piece("w", (rows, torch.arange(columns)))}
    mean, _ = holders_mean(view, [reply(plan, {"w": torch.zeros(rows, columns)})] * 3, [0.1, 0.7, 0.3])
    assert torch.equal(mean["w"], view["w"])


def test_slices_of_fused_gates_are_taken_within_each_gate() -> None:
    """Four gates of three rows; a client with two hidden units takes the first two rows of each."""
    view = {"w": torch.arange(12.0)[:, None].expand(12, 5).clone()}
    plan = slice_plan(view, {"w": torch.zeros(8, 4)}, {"w": (4,)})
    assert pull(view, plan)["w"][:, 0].tolist() == [0, 1, 3, 4, 6, 7, 9, 10]
    fold = HoldersSum(view)
    fold.add(plan, {"w": torch.ones(8, 4)})
    summed = fold.total
    assert summed["w"].sum() == 32 and summed["w"][2].sum() == 0 and summed["w"][0].tolist() == [1, 1, 1, 1, 0]


def test_a_client_larger_than_the_server_is_refused() -> None:
    import pytest

    with pytest.raises(ValueError, match=r"w: a client's \[3\] is not a part of the server's \[2\]"):
        slice_plan({"w": torch.zeros(2)}, {"w": torch.zeros(3)})
