"""pFedGate's network: a gate scales pieces of a model's parameters, or sets them to zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call


@dataclass(frozen=True)
class Cut:
    """The division of a tensor into `count` pieces of `size` entries; the last may be shorter."""

    name: str
    entries: int
    size: int
    count: int
    linear: bool
    """Whether the tensor belongs to a linear layer. Linear layers share one budget, all others another."""

    def sizes(self) -> list[int]:
        """Return the number of entries of each piece."""
        return [*[self.size] * (self.count - 1), self.entries - self.size * (self.count - 1)]


def cut(model: nn.Module, pieces: int) -> list[Cut]:
    """Divide each parameter into pieces; one with fewer entries than `pieces` is divided into single entries."""
    linear = {id(p) for module in model.modules() if isinstance(module, nn.Linear) for p in module.parameters()}
    found = []
    for name, parameter in model.named_parameters():
        size = math.ceil(parameter.numel() / pieces)
        count = math.ceil(parameter.numel() / size)
        found.append(Cut(name, parameter.numel(), size, count, id(parameter) in linear))
    return found


def chosen(scores: Sequence[float], cuts: Sequence[Cut], budget: float, least: float) -> list[bool]:
    """Choose the pieces to keep: the first of each tensor, then by score (rounded to tenths) as long as they fit.

    Linear layers have one budget and all other layers another: the share `budget - least` of the entries that are not
    in a first piece.
    """
    kept, place = [False] * len(scores), 0
    rest: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for one in cuts:
        for number, size in enumerate(one.sizes()):
            kept[place] = number == 0
            if number:
                rest[one.linear].append((place, size))
            place += 1
    for group in rest.values():
        room = round((budget - least) * sum(size for _, size in group))
        for where, size in sorted(group, key=lambda piece: -round(10 * scores[piece[0]])):
            if size <= room:
                kept[where], room = True, room - size
    return kept


class Gated(nn.Module):
    """A model whose parameters are multiplied, piece by piece, by the scores that a gate gives for the batch."""

    def __init__(self, model: nn.Module, inputs: Sequence[int], pieces: int, budget: float) -> None:
        super().__init__()
        self.model, self.cuts, self.budget = model, cut(model, pieces), budget
        self.least = min(max(1 / pieces, 0.1), budget)
        self.gate = Gate(inputs, sum(one.count for one in self.cuts))

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's outputs for a batch, with gated parameters."""
        outputs: Tensor = functional_call(self.model, self.parameters_for(self.gate(x)), (x,))
        return outputs

    def parameters_for(self, scores: Tensor) -> dict[str, Tensor]:
        """Return the model's parameters: each kept piece times its score, all others zero."""
        factors, place = self.factors(scores), 0
        gated, own = {}, dict(self.model.named_parameters())
        for one in self.cuts:
            spread = factors[place : place + one.count].repeat_interleave(one.size)[: one.entries]
            gated[one.name] = own[one.name] * spread.view_as(own[one.name])
            place += one.count
        return gated

    def factors(self, scores: Tensor) -> Tensor:
        """Return the factor of each piece: mask times score, where the mask has the gradient of the score."""
        scores = scores.clamp(min=self.least)
        if self.budget >= 1 or scores.is_meta:  # nothing to choose, or only shapes are computed
            return scores
        kept = torch.tensor(chosen(scores.tolist(), self.cuts, self.budget, self.least), device=scores.device)
        straight_through = 1 + scores - scores.detach()
        return torch.where(kept, straight_through * scores, 0.0)


class Gate(nn.Module):
    """Normalisation, one linear layer, batch norm, sigmoid, mean over the batch: one score per piece."""

    def __init__(self, inputs: Sequence[int], pieces: int) -> None:
        super().__init__()
        self.norm = SwitchNorm(inputs[0] if len(inputs) > 1 else 1)
        self.linear, self.scale = nn.Linear(math.prod(inputs), pieces), nn.BatchNorm1d(pieces)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, *inputs) to (pieces,)."""
        scores: Tensor = self.scale(self.linear(self.norm(x).flatten(1)))
        return scores.sigmoid().mean(0)


class SwitchNorm(nn.Module):
    """Switchable normalisation: a learnt mix of instance, layer and batch statistics (Luo et al., arXiv:1806.10779)."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.mean_mix, self.var_mix = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.weight, self.bias = nn.Parameter(torch.ones(channels, 1)), nn.Parameter(torch.zeros(channels, 1))
        self.register_buffer("running_mean", torch.zeros(channels, 1))
        self.register_buffer("running_var", torch.ones(channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (batch, channels, ...)."""
        flat = x.reshape(len(x), len(self.weight), -1)
        moments = torch.stack([flat, flat.square()]).mean(-1, keepdim=True)  # (2, batch, channels, 1)
        batch = moments.mean(1)
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(batch[0], self.momentum)
                self.running_var.lerp_(_variance(*batch), self.momentum)
        else:
            batch = torch.stack([self.running_mean, self.running_var + self.running_mean.square()])
        kinds = [moments, moments.mean(2, keepdim=True), batch.unsqueeze(1)]  # instance, layer, batch
        means = [first for first, _ in kinds]
        variances = [_variance(first, second) for first, second in kinds]
        mean, variance = _mixed(self.mean_mix, means), _mixed(self.var_mix, variances)
        normal = (flat - mean) / (variance + self.eps).sqrt()
        return (normal * self.weight + self.bias).view_as(x)


def _variance(first: Tensor, second: Tensor) -> Tensor:
    return (second - first.square()).clamp(min=0)  # rounding can give a negative value


def _mixed(logits: Tensor, parts: Sequence[Tensor]) -> Tensor:
    shares = logits.softmax(0)
    return shares[0] * parts[0] + shares[1] * parts[1] + shares[2] * parts[2]
