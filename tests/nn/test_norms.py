"""Batch norms without statistics, with statistics that are fixed later, and the blocks of fused weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedfactor.nn.norms import axis_blocks, scaled_norm_inputs, watched_norms, with_statistics, without_statistics
from fedfactor.nn.state import tensors_of


def test_scaler_multiplies_what_enters_a_norm_and_leaves_no_hook() -> None:
    norm = nn.Sequential(nn.LayerNorm(4, elementwise_affine=False, eps=1.0))
    x = torch.tensor([[1.0, -1.0, 2.0, -2.0]])
    plain = norm(x)
    with scaled_norm_inputs(norm, 4.0):
        torch.testing.assert_close(norm(x), nn.functional.layer_norm(4 * x, (4,), eps=1.0))
    torch.testing.assert_close(norm(x), plain, rtol=0, atol=0)
    assert not norm[0]._forward_pre_hooks


def test_statistics_by_hand_weighted_by_the_size_of_the_batch() -> None:
    """Batches (0, 2) and (1, 2, 3, 6) of one channel: means 1 and 3, variances 2 and 14/3; 7/3 is the mean of all."""
    model = nn.Sequential(nn.BatchNorm1d(1, affine=False, track_running_stats=False))
    with watched_norms(model) as found:
        model(torch.tensor([[0.0], [2.0]]))
        model(torch.tensor([[1.0], [2.0], [3.0], [6.0]]))
    mean, variance = found()["0"].flatten().tolist()
    assert mean == pytest.approx((2 * 1 + 4 * 3) / 6) and variance == pytest.approx(
        (2 * (2 + 16 / 9) + 4 * (14 / 3 + 4 / 9)) / 6
    )
    assert not model[0]._forward_pre_hooks


def test_fixed_statistics_are_used_in_evaluation() -> None:
    model = without_statistics(nn.Sequential(nn.BatchNorm2d(2, eps=0.0)))
    assert tensors_of(model).keys() == {"0.weight", "0.bias"}
    x = torch.tensor([3.0, 5.0]).view(1, 2, 1, 1).expand(2, 2, 3, 3)
    with_statistics(model, {"0": torch.tensor([[1.0, 1.0], [4.0, 16.0]])})
    assert model.eval()(x)[0, :, 0, 0].tolist() == [1.0, 1.0]  # (3 - 1) / 2 and (5 - 1) / 4
    assert with_statistics(model, {"another": torch.zeros(2, 2)})[0].running_mean.tolist() == [1.0, 1.0]


def test_blocks_of_fused_weights() -> None:
    model = nn.ModuleDict(
        {
            "lstm": nn.LSTM(3, 4),
            "gru": nn.GRUCell(3, 4),
            "both": nn.GRU(3, 4, bidirectional=True),
            "attention": nn.MultiheadAttention(4, 2),
            "fc": nn.Linear(4, 4),
        }
    )
    found = axis_blocks(model)
    assert {name: blocks for name, blocks in found.items() if name.startswith("lstm")} == {
        f"lstm.{name}": (4,) for name, _ in model["lstm"].named_parameters()
    }
    assert found["gru.weight_hh"] == (3,) and found["attention.in_proj_weight"] == (6,)  # q, k and v of two heads
    assert found["attention.out_proj.weight"] == (1, 2) and "attention.out_proj.bias" not in found
    assert found["both.weight_ih_l0_reverse"] == (0,), "it cannot be reduced in width"
    assert not any(name.startswith("fc") for name in found)
