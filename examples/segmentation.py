"""Segmentation: a small U-Net finds discs and squares in noisy images. FedPara's factors travel, not its weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedfactor

SIDE = 32


def shapes(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw images with one disc or square each, and the masks that mark it."""
    rng = torch.Generator().manual_seed(seed)
    x, y, radius = (torch.randint(low, high, (number, 1, 1), generator=rng) for low, high in ((8, 24), (8, 24), (4, 8)))
    across, down = torch.arange(SIDE)[None, None] - x, torch.arange(SIDE)[None, :, None] - y
    disc = across**2 + down**2 <= radius**2
    square = (across.abs() <= radius) & (down.abs() <= radius)
    masks = torch.where(torch.rand(number, 1, 1, generator=rng) < 0.5, disc, square)[:, None].float()
    return masks + 0.7 * torch.randn(masks.shape, generator=rng), masks


class UNet(nn.Module):
    """Two scales, with a skip connection at the finer one."""

    def __init__(self, planes: int = 12) -> None:
        super().__init__()
        self.fine = nn.Conv2d(1, planes, 3, padding=1)
        self.coarse = nn.Conv2d(planes, 2 * planes, 3, padding=1)
        self.up = nn.Conv2d(2 * planes, planes, 3, padding=1)
        self.out = nn.Conv2d(2 * planes, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per pixel."""
        fine = self.fine(images).relu()
        coarse = self.up(self.coarse(F.max_pool2d(fine, 2)).relu()).relu()
        logits: Tensor = self.out(torch.cat([fine, F.interpolate(coarse, scale_factor=2)], 1))
        return logits


def loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the binary cross-entropy of all pixels."""
    return F.binary_cross_entropy_with_logits(outputs, batch[1])


def dice(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the Dice coefficient of each image: twice the overlap over the sum of both areas."""
    found, wanted = (outputs > 0).float().flatten(1), batch[1].flatten(1)
    return 2 * (found * wanted).sum(1) / (found.sum(1) + wanted.sum(1))


if __name__ == "__main__":
    result = fedfactor.simulate(
        UNet, shapes(400, seed=1), test=shapes(100, seed=2), method="fedpara", loss=loss, rounds=8, lr=0.5,
        metrics={"dice": dice}, best="dice", higher_is_better=True, evaluate_clients="none",
    )  # fmt: skip
    print(f"dice {result.summary['best_dice']:.3f}")
