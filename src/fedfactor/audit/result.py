"""The result of an audit: figures, pictures, and the files that show them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfactor.support.files import write_text
from fedfactor.support.install import install_command

try:
    from PIL import Image

    from fedfactor.report.elements import Fold, Pictures, Section, Text
    from fedfactor.report.facts import ABOVE_BELOW, audit_table, picture_pairs
    from fedfactor.report.page import page
except ImportError as error:
    raise ImportError(f"an audit needs Pillow and Jinja2 ({error}): {install_command('audit')}") from error

LEAST_ERROR = 1e-12
"""Squared error per pixel below which pictures count as equal: 120 dB."""
TARGETS = {
    "gradient": "The attack uses the gradient of the shared weights on exactly these pictures, before the next round.",
    "update": "The attack uses what the client would really upload next, after all local epochs on all its data. Each "
    "recovered picture is shown with the nearest of the client's pictures of the same class.",
}
MEANING = (
    "PSNR is given in dB; higher is closer. Flat is the PSNR of a picture of one colour, the mean of the original. An "
    "attack that does not exceed it has recovered no shape. Better than flat is the share of pictures that exceed it."
)


@dataclass(frozen=True)
class AttackResult:
    """The pictures recovered from one client in one round."""

    round: int
    client: int
    labels: list[int]
    originals: Tensor
    pictures: Tensor
    distance: float
    """1 - cosine similarity of the gradient of the pictures and the observed gradient."""

    @cached_property
    def psnr(self) -> list[float]:
        """PSNR of each picture."""
        return [psnr(a, b) for a, b in zip(self.pictures, self.originals, strict=True)]

    @cached_property
    def flat(self) -> list[float]:
        """PSNR of the mean colour of each original: what an attacker reaches who knows the brightness only."""
        return [psnr(one.mean((-2, -1), keepdim=True).expand_as(one), one) for one in self.originals]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, and the originals and recovered pictures as PNG files in base64."""
        return {
            **{key: getattr(self, key) for key in ("round", "client", "labels", "psnr", "flat", "distance")},
            "originals": [base64.b64encode(png(picture)).decode() for picture in self.originals],
            "recovered": [base64.b64encode(png(picture)).decode() for picture in self.pictures],
        }


@dataclass(frozen=True)
class AuditResult:
    """The results of all attacks on a run."""

    run: str
    method: str
    attack: Mapping[str, Any]
    """The settings of the attack."""
    attacks: list[AttackResult]

    @property
    def rounds(self) -> list[int]:
        """The rounds that were attacked."""
        return sorted({one.round for one in self.attacks})

    def figures(self, round: int | None = None) -> dict[str, float]:
        """Return average and maximum PSNR over pictures and clients, of one round or of all (FedDecomp, Table 7)."""
        chosen = [one for one in self.attacks if round in (None, one.round)]
        values, flat = ([value for one in chosen for value in getattr(one, name)] for name in ("psnr", "flat"))
        return {
            "average": sum(values) / len(values),
            "maximum": max(values),
            "flat_average": sum(flat) / len(flat),
            "flat_maximum": max(flat),
            "better_than_flat": sum(a > b for a, b in zip(values, flat, strict=True)) / len(values),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return all settings, figures and pictures."""
        rounds = {str(round): self.figures(round) for round in self.rounds}
        found = {"run": self.run, "method": self.method, "attack": dict(self.attack), "psnr": self.figures()}
        return {**found, "rounds": rounds, "attacks": [one.as_dict() for one in self.attacks]}

    def write(self, path: Path) -> None:
        """Write an HTML page with figures and pictures, and the same as JSON in a file beside it."""
        found = self.as_dict()
        settings = ", ".join(f"{key} {value}" for key, value in found["attack"].items())
        words = map(Text, (TARGETS[self.attack["mode"]], f"Settings: {settings}.", MEANING))
        folds = [
            Fold(f"Round {one['round']}, client {one['client']}", [Pictures(picture_pairs(one))], opened=True)
            for one in found["attacks"]
        ]
        figures = Section("figures", "Figures", [*words, audit_table(found, self.attack["mode"])])
        pictures = Section("pictures", "Pictures", [Text(ABOVE_BELOW), *folds])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path.with_suffix(".json"), json.dumps(found, indent=1))
        title = f"What can be recovered from {self.run}"
        write_text(path, page(title, self.method, [figures, pictures]))


def psnr(picture: Tensor, original: Tensor) -> float:
    """Return the PSNR in dB: -10 log10(||x - x*||^2 / (m n)) for shape (channels, m, n) and colours from 0 to 1.

    As in the paper (Section 4.6), the sum includes all channels but is divided by the number of pixels. For three
    channels this is 4.8 dB less than the PSNR of the mean squared error.
    """
    error = (picture.double() - original.double()).square().sum() / original[0].numel()
    return float(-10 * error.clamp(min=LEAST_ERROR).log10())


def png(picture: Tensor) -> bytes:
    """Encode a picture (1 or 3 channels, height, width) with colours from 0 to 1 as a PNG file."""
    colours = (picture.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)
    file = io.BytesIO()
    Image.fromarray((colours[..., 0] if len(picture) == 1 else colours).contiguous().numpy()).save(file, "PNG")
    return file.getvalue()
