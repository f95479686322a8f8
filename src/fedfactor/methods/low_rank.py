"""The `low` baselines of FedPara: low-rank matrices and Tucker convolutions."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedfactor.factor import LowRank
from fedfactor.factor.base import Scheme
from fedfactor.methods.factorised import Factorised
from fedfactor.registry import described, register


@register("methods", "low_rank", paper="arXiv:2108.06098")
@dataclass(frozen=True)
class LowRankMethod(Factorised):
    """Low-rank matrices and Tucker convolutions, trained from scratch (FedPara Sec. 3.1, after TKD).

    With `start = "given"`, the factors begin as the truncated SVD of the model's weights (convolutions: HOSVD).

    Fine-tuning (`[tune]`), it trains LoRA's factors: U (out, r), which starts at zero, times V (r, in).

    Use it as FedPara's baseline at the same number of parameters: the low rank limits what a layer can express.
    """

    ratio: float = field(
        default=0.2, metadata=described("rank as a share of the channels", tries=(0.5, 0.3, 0.2, 0.1, 0.05, 0.025))
    )

    rank: int = field(default=0, metadata=described("the rank itself, of all layers; 0: by `ratio`"))

    def scheme(self) -> Scheme:
        """Return the low-rank scheme."""
        return LowRank(ratio=self.ratio, rank=self.rank or None)
