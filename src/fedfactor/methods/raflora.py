"""raFLoRA: clients with different ranks, averaged component by component."""

from __future__ import annotations

from dataclasses import dataclass

from fedfactor.methods.lora import RankedLora
from fedfactor.registry import register


@register("methods", "raflora", paper="arXiv:2602.13486")
@dataclass(frozen=True)
class RaFLora(RankedLora):
    """A client of capacity p trains the first p r components; each component is averaged over its holders.

    Padding missing components with zeros instead makes the higher ones shrink in each round ("rank collapse"). RBLA
    (arXiv:2408.08699) averages in the same way.

    Deviations: alpha is divided by the full rank on all clients, so that a component means the same on each.

    Use it where devices differ in memory or bandwidth and only their ranks should differ.
    """
