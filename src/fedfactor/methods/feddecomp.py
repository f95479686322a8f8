"""FedDecomp: each weight is the sum of a shared full-rank part and a private low-rank part."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from torch import Tensor, nn

from fedfactor.factor import Additive
from fedfactor.methods.factorised import factorised
from fedfactor.nn import FactorWeight, compose, factor_weights
from fedfactor.nn.state import fill, tensors_of
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.context import Context
from fedfactor.protocol.message import finite, read_weights
from fedfactor.protocol.method import (
    Diagnostics,
    Method,
    Networks,
    ObservedRound,
    ParameterGroup,
    Phase,
    Traits,
    epochs_refused,
    parameter_names,
    split_epochs,
)
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.settings import Training
from fedfactor.registry import described, register
from fedfactor.task import Build

TAU = ("a", "b")
"""The factors of tau = B A; sigma is everything else, biases and norms included."""


@register("methods", "feddecomp", paper="arXiv:2406.19931")
@dataclass(frozen=True)
class FedDecomp(Method, Diagnostics):
    """theta_i = sigma_i + tau_i, tau_i = B_i A_i (Eq. 2 to 4); sigma is shared and averaged, tau stays on the client.

    In a round (Alg. 1) a client trains tau for E_lora epochs (Eq. 5), then sigma for the other E_global = E - E_lora
    epochs (Eq. 6). The server takes the unweighted mean of the sigmas (Eq. 7). B starts at zero and A is Gaussian, the
    same on all clients, so theta starts as sigma. With E_lora = 0 this is FedAvg, with E_global = 0 local training of
    tau. All convolutions and linear layers are decomposed; in a Transformer only the attention and the classifier
    (appendix B).

    The paper's ablations are settings: Table 3 is `simultaneous`; Table 5, FedDecomp_Reverse, is `share = "tau"`;
    Table 4, Local and FedAvg with low-rank matrices, is `share = "none"` and `share = "both"`, both with
    `simultaneous`.

    The quantities of Table 6 are logged in each round, over weights without norm statistics: `sigma_change`,
    ||sigma^t - sigma^1||, and `tau_change`, the mean of ||tau_i^t - tau_i^1||. Since tau_i^1 = 0, each client reports
    one number for it, ||tau_i||. With `distances`, Figure 6's is logged too: `sigma_distance`, the mean of
    ||sigma_i - sigma||. The server then keeps all sigma_i of a round until sigma is known.

    Deviations: with partial participation, Eq. 7 averages over the round's clients. The authors' code averages over all
    clients, including outdated models. The paper does not say what happens to norm statistics: here they change in both
    phases and are averaged, as in the code. `code_rank` and `code_scale` switch to what the code does instead of Eq. 3
    and 4: see `Additive`. The recipes of the paper's tables divide tau by its rank r, as the code does. Without this
    division, the steps of tau are r^2 times longer, tau grows larger, and averaged norm statistics fit the clients
    worse (62.6 instead of 70.4 % accuracy, docs/evidence/personal.md).

    Fine-tuning (`[tune]`), sigma is the shared change, of the same low rank as tau, and tau the private one.

    Use it where clients differ much and bandwidth is not the bottleneck: clients upload and download a dense model, and
    they need more memory than for a dense model.
    """

    dense: tuple[str, ...] = field(default=(), metadata=described("patterns of layers that stay dense"))
    linear: float = field(default=0.6, metadata=described("R_l: rank of a linear layer / its smaller side"))
    conv: float = field(default=0.6, metadata=described("R_c: rank of a convolution / (its fewer channels times K)"))
    rank: int = field(default=0, metadata=described("the rank itself, of all layers; 0: by `linear` and `conv`"))
    lora_epochs: int | None = field(default=None, metadata=described("E_lora; default: two fifths of the epochs"))
    share: Literal["sigma", "tau", "both", "none"] = field(default="sigma", metadata=described("what is averaged"))
    simultaneous: bool = field(default=False, metadata=described("train sigma and tau together for all epochs"))
    code_rank: bool = field(default=False, metadata=described("the authors' code: ranks from the outputs, plain view"))
    code_scale: bool = field(default=False, metadata=described("as in the authors' code: tau = B A / r"))
    pretrained: str = field(default="", metadata=described("safetensors file that sigma starts from (Sec. 4.5)"))
    fresh: tuple[str, ...] = field(default=(), metadata=described("patterns of tensors that are not in the file"))
    distances: bool = field(default=False, metadata=described("log the mean of ||sigma_i - sigma|| (Figure 6)"))

    def __post_init__(self) -> None:
        for wanted, what in ((self.pretrained, "pretrained weights start"), (self.distances, "distances compare")):
            if wanted and self.share not in ("sigma", "both"):
                raise ValueError(f"{what} a shared sigma, but share = {self.share!r} keeps it private")

    @property
    def traits(self) -> Traits:
        """All clients have equal weight in the mean, and each reports ||tau_i||."""
        return Traits(weighting="uniform", reports=("tau",), rereads=self.distances)

    def scheme(self) -> Additive:
        """Return the scheme sigma + B A (Eq. 2 to 4)."""
        code = {"plain_view": self.code_rank, "rank_from_outputs": self.code_rank, "scaled": self.code_scale}
        return Additive(linear=self.linear, conv=self.conv, rank=self.rank or None, **code)

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the task's model as sigma, with B A added to its layers."""
        return self._decomposed(build(1.0))

    def _decomposed(self, model: nn.Module) -> nn.Module:
        blocks = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        inside = [name for name, module in model.named_modules() if isinstance(module, blocks)]
        feed_forward = [f"{name}.{part}".removeprefix(".") for name in inside for part in ("linear1", "linear2")]
        return factorised(self, model, self.scheme(), [*feed_forward, *self.dense], keep_weights=True)

    def private_names(self, network: nn.Module) -> set[str]:
        """Return the names of tau, or of what else `share` keeps private."""
        tau, everything = self._tau_names(network), set(tensors_of(network))
        return {"sigma": tau, "tau": everything - tau, "both": set(), "none": everything}[self.share]

    @staticmethod
    def _tau_names(network: nn.Module) -> set[str]:
        layers = factor_weights(network).items()  # fine-tuning, some may have a dense change
        return {f"{name}.{factor}" for name, layer in layers for factor in TAU if factor in layer.factors}

    def initial(self, networks: Networks) -> Tensors:
        """Return sigma^1, read from the pretrained weights if there are any."""
        if not self.pretrained:
            return super().initial(networks)
        plain = compose(networks(1.0))  # B = 0, so this is sigma
        given = read_weights(Path(self.pretrained))
        own = {
            name: tensor
            for name, tensor in tensors_of(plain).items()
            if any(fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in self.fresh)
        }
        try:
            fill(plain, {**given, **own})
        except ValueError as error:
            raise ValueError(f"{self.pretrained} does not fit: {error}; `fresh` lists tensors not in it") from error
        if wrong := [name for name, tensor in given.items() if not finite(tensor)]:
            raise ValueError(f"{self.pretrained}: {wrong[0]!r} is not finite")
        drawn, tau = super().initial(networks), self._tau_names(networks(1.0))
        loaded = super().initial(lambda capacity: self._decomposed(plain))
        return {name: drawn[name] if name in tau else loaded[name] for name in drawn}  # tau from the run's seed alone

    def refuses(self, optimizer: Optimizer, codec: Codec, training: Training | None = None) -> str | None:
        """Refuse rounds with too few epochs for both phases."""
        reason = None if self.simultaneous else epochs_refused(self._split, training)
        return reason or super().refuses(optimizer, codec, training)

    def _split(self, epochs: float) -> tuple[float, float]:
        return split_epochs("lora_epochs", self.lora_epochs, 0.4, epochs)

    def phases(self, network: nn.Module, epochs: float) -> list[Phase]:
        """Train tau first (Eq. 5), then sigma (Eq. 6)."""
        if self.simultaneous:
            return super().phases(network, epochs)
        lora, rest = self._split(epochs)
        tau = self._tau_names(network)
        sigma = [name for name in parameter_names(network) if name not in tau]
        return [Phase(lora, [ParameterGroup(tau)]), Phase(rest, [ParameterGroup(sigma)])]

    def report(self, network: nn.Module, ctx: Context) -> dict[str, float]:
        """Return ||tau_i||, the change of tau_i since the start, where it is zero."""
        return {"tau": _norm(_low_rank(layer) for layer in factor_weights(network).values() if "a" in layer.factors)}

    def observe(self, observed: ObservedRound) -> dict[str, Any]:
        """Return the quantities of Figure 6 and Table 6."""
        seen = {"tau_change": fmean(figures["tau"] for figures in observed.figures)}
        if self.share in ("sigma", "both"):
            after, network = observed.after, observed.networks(1.0)
            sigma = sorted(after.keys() & set(parameter_names(network)) - self._tau_names(network))
            seen["sigma_change"] = _norm(after[n] - observed.first()[n] for n in sigma)
            if self.distances:
                seen["sigma_distance"] = fmean(_norm(r.tensors[n] - after[n] for n in sigma) for r in observed.replies)
        return seen


def _low_rank(layer: FactorWeight) -> Tensor:
    assert isinstance(layer.scheme, Additive)
    return layer.scale * layer.scheme.low_rank(layer.factors, layer.shape).detach()


def _norm(tensors: Iterable[Tensor]) -> float:
    """Return the 2-norm of all tensors together."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
