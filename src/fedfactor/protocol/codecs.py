"""Codecs: they convert weights into the tensors of a message, and back.

Only weights are coded; buffers (batch statistics) and integers are sent as they are. A codec may use the download as a
reference, because both sides have it, and a state that stays on the client (error feedback).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedfactor.protocol.message import BadMessage
from fedfactor.protocol.plan import Tensors
from fedfactor.registry import described, register


@register("codecs", "float32")
@dataclass(frozen=True)
class Float32:
    """No coding: four bytes per weight, up and down.

    Use it by default: it is lossless.
    """

    name: ClassVar[str] = "float32"
    keeps_state: ClassVar[bool] = False
    """Whether clients keep tensors between rounds."""
    codes_changes: ClassVar[bool] = False
    """Whether the upload holds the change since the download instead of the weights."""

    def down(self, weights: Tensors) -> Tensors:
        """Code a download."""
        return weights

    def from_down(self, coded: Tensors) -> Tensors:
        """Decode a download; the result is the reference for the upload."""
        return coded

    def up(self, weights: Tensors, reference: Tensors, state: Tensors, rng: torch.Generator) -> tuple[Tensors, Tensors]:
        """Code an upload; return it and the client's new state."""
        return weights, {}

    def expected_up(self, reference: Tensors) -> Tensors:
        """Return tensors with the names, shapes and dtypes that an upload must have."""
        return reference

    def from_up(self, coded: Tensors, reference: Tensors) -> Tensors:
        """Decode an upload."""
        return coded


def _half(weights: Tensors) -> Tensors:
    return {name: weight.half() for name, weight in weights.items()}


def _like(coded: Tensors, reference: Tensors) -> Tensors:
    return {name: tensor.to(reference[name].dtype) for name, tensor in coded.items()}


@register("codecs", "fedpaq", paper="arXiv:1909.13014")
@dataclass(frozen=True)
class FedPAQ(Float32):
    """Two bytes per weight in the upload, full precision in the download.

    Follows FedPara's use of the name (appendix D.3): the uploaded model is cast to float16. The original FedPAQ
    quantises the difference to the download with random rounding; `int8` is a codec of that kind.

    Use it to compare with FedPara's figures, or where only the uplink is slow.
    """

    def up(self, weights: Tensors, reference: Tensors, state: Tensors, rng: torch.Generator) -> tuple[Tensors, Tensors]:
        """Cast the weights to float16."""
        return _half(weights), {}

    def expected_up(self, reference: Tensors) -> Tensors:
        """Return float16 tensors with the same names and shapes."""
        return _half(reference)

    def from_up(self, coded: Tensors, reference: Tensors) -> Tensors:
        """Cast back to the dtype of the reference."""
        return _like(coded, reference)


@register("codecs", "float16")
@dataclass(frozen=True)
class Float16(FedPAQ):
    """Two bytes per weight, up and down; the server keeps its weights in full precision.

    Use it to halve the bytes in both directions.
    """

    def down(self, weights: Tensors) -> Tensors:
        """Cast the weights to float16."""
        return _half(weights)

    def from_down(self, coded: Tensors) -> Tensors:
        """Cast back to float32."""
        return {name: tensor.float() for name, tensor in coded.items()}


@register("codecs", "int8")
@dataclass(frozen=True)
class Int8(Float32):
    """One byte per weight in the upload: the change d since the download, in steps of max|d| / 127, rounded at random.

    Rounding up with the probability of the remainder makes the coded change unbiased. Coding the change instead of the
    model makes the error shrink with the change, as in FedPAQ.

    Use it where the uplink is slow: a quarter of the bytes, without bias.
    """

    codes_changes: ClassVar[bool] = True

    def up(self, weights: Tensors, reference: Tensors, state: Tensors, rng: torch.Generator) -> tuple[Tensors, Tensors]:
        """Quantise the changes, with one scale per tensor."""
        coded: Tensors = {}
        for name in sorted(weights):
            change = weights[name] - reference[name]
            scale = change.abs().max() / 127 if change.numel() else change.new_zeros(())
            noise = torch.rand(change.shape, generator=rng).to(change)
            steps = torch.floor(change / scale.clamp_min(torch.finfo(change.dtype).tiny) + noise)
            coded[name] = steps.clamp_(-127, 127).to(torch.int8)
            coded[f"{name}:scale"] = scale
        return coded, {}

    def expected_up(self, reference: Tensors) -> Tensors:
        """Return one int8 tensor and one scale per weight tensor."""
        steps = {name: torch.empty_like(tensor, dtype=torch.int8, device="meta") for name, tensor in reference.items()}
        return {**steps, **{f"{name}:scale": tensor.new_empty(()) for name, tensor in reference.items()}}

    def from_up(self, coded: Tensors, reference: Tensors) -> Tensors:
        """Add the decoded changes to the download."""
        return {name: tensor + coded[name] * coded[f"{name}:scale"] for name, tensor in reference.items()}


@register("codecs", "topk")
@dataclass(frozen=True)
class TopK(Float32):
    """Only the largest changes are uploaded, each with its position; the rest is added to the next round's change.

    This error feedback keeps the sum of the uploaded changes close to the sum of all changes (Stich et al. 2018).

    Use it where the uplink is very slow and clients take part repeatedly, because the rest waits on the client.
    """

    share: float = field(default=0.1, metadata=described("share of a tensor's entries that is sent, in (0, 1]"))
    keeps_state: ClassVar[bool] = True
    codes_changes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must lie in (0, 1], got {self.share:g}")

    def up(self, weights: Tensors, reference: Tensors, state: Tensors, rng: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return the largest entries of change plus remainder, and the rest as the new remainder."""
        coded: Tensors = {}
        rest: Tensors = {}
        for name, weight in weights.items():
            change = (weight - reference[name]).flatten()
            if name in state:
                change = change + state[name].flatten()
            where = change.abs().topk(self._kept(change)).indices.sort().values
            coded[f"{name}:at"], coded[name] = where.to(torch.int32), change[where]
            change = change.clone()
            change[where] = 0
            rest[name] = change.view_as(weight)
        return coded, rest

    def _kept(self, change: Tensor) -> int:
        return max(min(1, change.numel()), round(self.share * change.numel()))

    def expected_up(self, reference: Tensors) -> Tensors:
        """Return, for each tensor, its largest values and their positions."""
        kept = {name: tensor.new_empty(self._kept(tensor)) for name, tensor in reference.items()}
        return {**kept, **{f"{name}:at": values.to(torch.int32) for name, values in kept.items()}}

    def from_up(self, coded: Tensors, reference: Tensors) -> Tensors:
        """Add the uploaded changes to the download. Raise BadMessage if positions do not ascend within the tensor."""
        decoded: Tensors = {}
        for name, tensor in reference.items():
            where = coded[f"{name}:at"].long()
            if len(where) and not (where[0] >= 0 and where[-1] < tensor.numel() and bool((where.diff() > 0).all())):
                raise BadMessage(f"positions of {name!r} do not ascend within its {tensor.numel()} entries")
            flat = tensor.flatten().clone()
            flat[where] += coded[name]
            decoded[name] = flat.view_as(tensor)
        return decoded


Codec = Float32
"""The base class of all codecs is the one that codes nothing."""
