"""Codecs: hand-computed codes, unbiasedness, error feedback, and damaged uploads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfactor.methods import Method
from fedfactor.protocol.codecs import FedPAQ, Float16, Float32, Int8, TopK
from fedfactor.protocol.context import Context
from fedfactor.protocol.message import BadMessage
from tests.helpers.quadratic import clients, run, x

RNG = torch.Generator()


def test_float32_changes_nothing() -> None:
    w = {"w": torch.tensor([1 / 3])}
    assert Float32().up(w, w, {}, RNG) == (w, {})
    assert Float32().from_down(Float32().down(w)) == w


def test_fedpaq_halves_the_way_up_only_and_float16_both() -> None:
    w = {"w": torch.tensor([1 / 3, 1e-9, 7.0])}
    up, _ = FedPAQ().up(w, w, {}, RNG)
    assert up["w"].dtype is torch.float16
    assert FedPAQ().from_up(up, w)["w"].tolist() == [0.333251953125, 0.0, 7.0]
    assert FedPAQ().down(w)["w"].dtype is torch.float32
    assert Float16().down(w)["w"].dtype is torch.float16


def test_int8_by_hand() -> None:
    """Differences 1.27, -0.635 and 0 against the download: a step is 0.01, and -63.5 rounds to -64 or -63."""
    reference, w = {"w": torch.tensor([1.0, 1.0, 1.0])}, {"w": torch.tensor([2.27, 0.365, 1.0])}
    coded, _ = Int8().up(w, reference, {}, torch.Generator().manual_seed(0))
    assert float(coded["w:scale"]) == pytest.approx(0.01)
    assert coded["w"].dtype is torch.int8
    assert coded["w"][0] in (126, 127) and coded["w"][1] in (-64, -63) and coded["w"][2] == 0
    back = Int8().from_up(coded, reference)["w"]
    assert (back - w["w"]).abs().max() <= 0.0101


def test_int8_is_unbiased() -> None:
    reference = {"w": torch.zeros(20_000)}
    w = {"w": torch.full((20_000,), 0.3)}
    w["w"][0] = 127.0  # makes a step exactly 1
    coded, _ = Int8().up(w, reference, {}, torch.Generator().manual_seed(0))
    assert set(coded["w"][1:].tolist()) == {0, 1}
    assert float(coded["w"][1:].float().mean()) == pytest.approx(0.3, abs=0.015)


def test_int8_of_no_change_is_exactly_no_change() -> None:
    w = {"w": torch.randn(5)}
    coded, _ = Int8().up(w, w, {}, RNG)
    assert torch.equal(Int8().from_up(coded, w)["w"], w["w"])


def test_topk_by_hand_with_error_feedback() -> None:
    codec, reference = TopK(share=0.25), {"w": torch.zeros(2, 2)}
    coded, rest = codec.up({"w": torch.tensor([[1.0, -3.0], [2.0, 0.5]])}, reference, {}, RNG)
    assert coded["w:at"].tolist() == [1] and coded["w"].tolist() == [-3.0]
    assert rest["w"].tolist() == [[1.0, 0.0], [2.0, 0.5]]
    # next round changes nothing, so the largest remainder goes
    coded, rest = codec.up(reference, reference, rest, RNG)
    assert coded["w:at"].tolist() == [2] and coded["w"].tolist() == [2.0]
    assert codec.from_up(coded, reference)["w"].tolist() == [[0.0, 0.0], [2.0, 0.0]]
    assert rest["w"].tolist() == [[1.0, 0.0], [0.0, 0.5]]


def topk_message(*where: int) -> dict[str, torch.Tensor]:
    return {"w": torch.ones(len(where)), "w:at": torch.tensor(where, dtype=torch.int32)}


def test_topk_puts_values_at_their_positions() -> None:
    assert TopK().from_up(topk_message(2), {"w": torch.zeros(4)})["w"].tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("where", [[-1], [4], [5], [1, 1]], ids=str)
def test_topk_refuses_positions_outside_the_tensor_and_repeated_ones(where: list[int]) -> None:
    with pytest.raises(BadMessage, match="do not ascend"):
        TopK().from_up(topk_message(*where), {"w": torch.zeros(4)})


def test_top_k_feeds_its_remainder_back_over_rounds() -> None:
    """Two weights, of which one is sent per round: the second round also sends what the first left out."""
    data = clients((1.0, 1.0))
    model = nn.Module()
    model.x = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    model.forward = lambda inputs: inputs * model.x.sum()  # type: ignore[method-assign]

    @dataclass(frozen=True)
    class Two(Method):
        def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
            return -(network.x * torch.tensor([1.0, 0.6], dtype=torch.float64)).sum()  # constant gradient (-1, -.6)

    settings: dict[str, Any] = {"data": data, "model": model, "method": Two(), "codec": TopK(share=0.5), "epochs": 1}
    assert run(rounds=1, **settings).server.tensors["x"].tolist() == pytest.approx([0.1, 0.0])
    # second round: changes (.1, .06) plus remainder (0, .06) are (.1, .12), and the second is larger
    assert run(rounds=2, **settings).server.tensors["x"].tolist() == pytest.approx([0.1, 0.12])


def test_fedpaq_sends_the_model_as_float16() -> None:
    """y = (.19, -.36) rounded to float16 each, then averaged."""
    expected = float(torch.tensor([0.19, -0.36]).half().double().mean())
    assert x(run(codec="fedpaq")) == pytest.approx(expected, abs=1e-12)
