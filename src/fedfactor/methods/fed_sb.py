"""Fed-SB: only a small core between two fixed bases is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedfactor.factor import Core
from fedfactor.factor.base import Scheme
from fedfactor.methods.factorised import Factorised
from fedfactor.registry import described, register


@register("methods", "fed_sb", paper="arXiv:2502.15436")
@dataclass(frozen=True)
class FedSB(Factorised):
    """W = W0 + B R A with fixed, orthonormal B and A; only R (r, r) is trained, sent and averaged.

    The bases are equal on all clients, so the server's change is exactly the mean of the clients' changes, for r^2
    numbers per layer, whatever the size of the layer.

    Deviations: the bases are the leading singular vectors of W0, as in LoRA-XS, which each party computes for itself.
    They are the same on all machines up to rounding, unless two singular values of a weight are nearly equal: other
    processors may then find other bases, and their cores do not fit together. The paper takes the singular vectors of
    the gradient of a first batch, which would need a message before the first round. As there, there is no alpha.

    Use it where bytes are the bottleneck; the rank can be several times that of LoRA.
    """

    rank: int = field(default=8, metadata=described("rank r of the change", tries=(64, 32, 16, 8, 4, 2, 1)))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start != "random":
            raise ValueError("fed_sb computes its bases from the frozen weights: start must be 'random'")

    def scheme(self) -> Scheme:
        """Return the scheme of a core between two bases."""
        return Core(self.rank)
