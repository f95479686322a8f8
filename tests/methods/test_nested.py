"""Networks inside networks: what a narrower one computes, and where its gradient goes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedfactor.methods.nested import Nested
from fedfactor.models import build, example_input
from fedfactor.nn.norms import axis_blocks
from fedfactor.nn.state import fill, tensors_of
from fedfactor.protocol.plan import pull, slice_plan


class Tied(nn.Module):
    """An embedding whose weight is used again at the end."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(11, int(8 * width)), nn.Linear(int(8 * width), 11, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding(ids).tanh())


def networks() -> dict[str, tuple[object, torch.Tensor]]:
    rng = torch.Generator().manual_seed(0)
    named = {name: (lambda w, n=name: build(n, width=w)) for name in ("resnet8", "lstm_shakespeare", "lstm_imdb")}
    found: dict[str, tuple[object, torch.Tensor]] = {
        name: (make, example_input(name, 3, generator=rng)[:, :20]) for name, make in named.items()
    }
    found["transformer"] = (
        lambda w: build("transformer", width=w, dropout=0.0, positions="sinusoidal", vocabulary=50),
        torch.randint(1, 50, (3, 9), generator=rng),
    )
    found["tied"] = (Tied, torch.randint(0, 11, (3, 4), generator=rng))
    return found


@pytest.mark.parametrize("name", ["resnet8", "lstm_shakespeare", "lstm_imdb", "transformer", "tied"])
def test_a_narrower_network_is_the_leading_part_of_the_widest(name: str) -> None:
    """It computes what a network of that width does with these numbers: gates and q, k, v sliced, weights tied."""
    make, x = networks()[name]
    torch.manual_seed(0)
    wide, narrow = make(1.0), make(0.5)  # type: ignore[operator]
    alone = copy.deepcopy(narrow)
    weights = {key for key, _ in alone.named_parameters()}
    parts = slice_plan(
        tensors_of(wide), {k: t for k, t in tensors_of(alone).items() if k in weights}, axis_blocks(alone)
    )
    fill(alone, {**tensors_of(alone), **pull(tensors_of(wide), parts)})
    nested = Nested(wide, {0.5: narrow})
    assert {key for key, _ in nested.named_parameters()} == {f"widest.{key}" for key, _ in wide.named_parameters()}
    for _ in range(2):  # statistics and all
        answers, expected = nested.at(0.5, x), alone(x)
        torch.testing.assert_close(answers, expected, rtol=0, atol=0)
    answers.square().sum().backward()
    expected.square().sum().backward()
    gradients, of_wide = dict(alone.named_parameters()), dict(wide.named_parameters())
    for key, piece in parts.items():
        whole = of_wide[piece.source].grad
        assert whole is not None
        torch.testing.assert_close(piece.take(whole), gradients[key].grad, msg=key)
        rest = whole.clone()
        piece.add(rest, -piece.take(whole))
        assert not rest.any(), f"{key} has a gradient beyond its part"
    statistics = nested.buffers_of["0_5"].by_name()
    assert all(torch.equal(statistics[key], buffer) for key, buffer in alone.named_buffers())
    torch.testing.assert_close(nested.eval().at(0.5, x), alone.eval()(x), rtol=0, atol=0)


def test_the_widest_network_is_the_one_that_is_called_and_statistics_are_apart() -> None:
    x = torch.randn(4, 3, 32, 32)
    nested = Nested(build("resnet8"), {0.25: build("resnet8", width=0.25)})
    before = nested.widest.bn1.running_mean.clone()
    nested.at(0.25, x)
    assert torch.equal(nested.widest.bn1.running_mean, before)
    assert nested.buffers_of["0_25"].get_buffer("bn1/num_batches_tracked") == 1
    assert nested(x).shape == nested.at(1.0, x).shape == (4, 10)
    assert nested.buffers_of["0_25"].get_buffer("bn1/num_batches_tracked") == 1
    copy.deepcopy(nested).to(torch.float64).at(0.25, x.double())


def test_a_network_that_is_no_part_of_the_widest_is_refused() -> None:
    with pytest.raises(ValueError, match="the full one lacks"):
        Nested(build("resnet8"), {0.5: nn.Linear(3, 2)})
