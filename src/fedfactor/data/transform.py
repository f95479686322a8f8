"""Transforms of whole batches between the stored array and the network, without a loop over examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

Floats = tuple[float, ...]

NORMS: dict[str, tuple[Floats, Floats]] = {
    "none": ((0.0,), (1.0,)),
    "half": ((0.5,), (0.5,)),
    "digits": ((0.0,), (16 / 255,)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "cinic10": ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)),
    "tiny-imagenet": ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    # CIFAR as in FedPara's Flower baseline: the mean of pixels, and the mean of the deviations within each image.
    "fedpara": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "flanc": ((125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)),
}
"""Mean and standard deviation of pixels on a scale of 0 to 1. PriSM uses `imagenet`, FedDecomp `half`."""


@dataclass(frozen=True)
class Tokens:
    """Converts token ids, which are stored in few bytes, to the 64-bit ids that embeddings read."""

    def __str__(self) -> str:
        """Return the transform as a formula of x."""
        return "x as int64"

    def train(self, batch: Tensor, rng: torch.Generator) -> Tensor:
        """Return the ids as int64."""
        return batch.long()

    def test(self, batch: Tensor) -> Tensor:
        """Return the ids as int64."""
        return batch.long()


@dataclass(frozen=True)
class ImageTransform:
    """Normalises images of uint8; for training it first pads with black and crops, mirrors and rotates them at random.

    `mean` and `std` have one value, or one per channel, on a scale of 0 to 1. `crop` is the width of the padding,
    `rotate` the largest angle in degrees (nearest pixel, black outside). Normalisation comes last, so that what enters
    from outside the image is black, not the mean.
    """

    mean: Floats = (0.0,)
    std: Floats = (1.0,)
    crop: int = 0
    flip: bool = False
    rotate: float = 0.0
    _scale: Tensor = field(init=False, repr=False, compare=False)
    _shift: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} values and std {len(self.std)}: give one, or one per channel")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"std must be positive, got {self.std}")
        if self.crop < 0 or not 0 <= self.rotate <= 180:
            raise ValueError(f"crop must be at least 0 and rotate within 0 to 180, got {self.crop} and {self.rotate}")
        mean, std = torch.tensor(self.mean, dtype=torch.float64), torch.tensor(self.std, dtype=torch.float64)
        # (x / 255 - mean) / std in one multiplication and one addition
        object.__setattr__(self, "_scale", (1 / (255 * std)).float().view(-1, 1, 1))
        object.__setattr__(self, "_shift", (-mean / std).float().view(-1, 1, 1))

    def __str__(self) -> str:
        """Return the normalisation as a formula of x, for users of a deployed model."""
        mean, std = (", ".join(f"{value:.6g}" for value in values) for values in (self.mean, self.std))
        return f"(x / 255 - [{mean}]) / [{std}]"

    def train(self, batch: Tensor, rng: torch.Generator) -> Tensor:
        """Augment and normalise a batch (N, C, H, W) of uint8."""
        if self.crop or self.flip:
            batch = _crop_and_flip(batch, self.crop, self.flip, rng)
        if self.rotate:
            batch = _rotate(batch, self.rotate, rng)
        return self.test(batch)

    def test(self, batch: Tensor) -> Tensor:
        """Normalise a batch (N, C, H, W) of uint8."""
        if len(self.mean) not in (1, batch.shape[1]):
            raise ValueError(f"mean and std have {len(self.mean)} channels, the images have {batch.shape[1]}")
        scale, shift = self._scale.to(batch.device), self._shift.to(batch.device)
        return batch.to(torch.float32, copy=True).mul_(scale).add_(shift)


def transform(
    norm: str | tuple[Sequence[float], Sequence[float]] = "none",
    *,
    crop: int = 0,
    flip: bool = False,
    rotate: float = 0.0,
) -> ImageTransform:
    """Build an `ImageTransform` from the name of a normalisation (`NORMS`) or from a pair of mean and std."""
    if isinstance(norm, str):
        if norm not in NORMS:
            raise ValueError(f"no normalisation is called {norm!r}; there are {', '.join(sorted(NORMS))}")
        mean, std = NORMS[norm]
    else:
        mean, std = tuple(norm[0]), tuple(norm[1])
    return ImageTransform(mean, std, crop, flip, rotate)


def _crop_and_flip(batch: Tensor, pad: int, flip: bool, rng: torch.Generator) -> Tensor:
    """Gather one window per image from the padded batch, with reversed columns where it is mirrored: one copy."""
    count, channels, height, width = batch.shape
    device = batch.device
    columns = torch.arange(width, device=device).expand(count, width)
    rows = torch.arange(height, device=device).expand(count, height)
    if pad:
        offsets = torch.randint(0, 2 * pad + 1, (2, count, 1), generator=rng, device=rng.device).to(device)
        rows = rows + offsets[0]
    if flip:
        mirrored = (torch.rand((count, 1), generator=rng, device=rng.device) < 0.5).to(device)
        columns = torch.where(mirrored, width - 1 - columns, columns)
    if pad:
        columns = columns + offsets[1]
        batch = F.pad(batch, (pad,) * 4)
    where = (rows[:, :, None] * (width + 2 * pad) + columns[:, None, :]).view(count, 1, -1)
    found = batch.reshape(count, channels, -1).gather(2, where.expand(-1, channels, -1))
    return found.view(count, channels, height, width)


def _rotate(batch: Tensor, degrees: float, rng: torch.Generator) -> Tensor:
    """Rotate each image about its centre by an angle of its own."""
    count, _, height, width = batch.shape
    drawn = torch.rand((count,), generator=rng, device=rng.device).to(batch.device)
    angle = (drawn * 2 - 1) * math.radians(degrees)
    sine, cosine, zero = torch.sin(angle), torch.cos(angle), torch.zeros_like(angle)
    # Grid coordinates run from -1 to 1 on both sides, so rotating an oblong image needs the ratio of its sides.
    across, down = (
        torch.stack([cosine, sine * height / width, zero], 1),
        torch.stack([-sine * width / height, cosine, zero], 1),
    )
    grid = F.affine_grid(torch.stack([across, down], 1), list(batch.shape), align_corners=False)
    return F.grid_sample(batch.float(), grid, mode="nearest", padding_mode="zeros", align_corners=False)
