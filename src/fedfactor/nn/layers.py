"""Layers whose weights are stored as factors.

Each is made from an ordinary torch layer, with its settings and biases, and `plain()` returns that layer with the
composed weight. Factors are parameters with plain names (`conv1.x1`, `lstm.weight_ih_l0.x1`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedfactor.factor.base import ConvGeometry, Factors, Scheme, WeightShape, convolve
from fedfactor.nn.frozen import Frozen
from fedfactor.profile import span

MakeWeight = Callable[[str, Tensor], "FactorWeight | None"]
"""Returns the factors for the name and the tensor of a weight, or `None` if the weight stays dense."""


class Start(NamedTuple):
    """Factors that a change of a base starts from, and what their product is multiplied by."""

    factors: Factors
    scale: float


class FactorWeight(nn.Module):
    """One weight, stored as the factors of a scheme, or as their sum with a frozen base: W0 + (alpha / r) F."""

    base: Frozen | None
    start: Start | None = None
    """Of the change of a base: the factors of an adapter that it starts from."""

    def __init__(
        self,
        scheme: Scheme,
        shape: WeightShape,
        factors: Factors,
        base: Frozen | None = None,
        alpha: float = 1.0,
    ) -> None:
        super().__init__()
        self.scheme = scheme
        self.shape = shape
        self.alpha = alpha
        rank = scheme.alpha_rank(shape) if base is not None else None
        self.scale = 1.0 if rank is None else alpha / rank
        self.register_parameter("base", base)
        self.factor_names = tuple(factors)
        self._held: Tensor | None = None
        for name, factor in factors.items():
            if isinstance(factor, Frozen) or name in scheme.frozen:
                self.register_parameter(name, Frozen(factor))
                continue
            frozen = isinstance(factor, nn.Parameter) and not factor.requires_grad
            self.register_parameter(name, nn.Parameter(factor.detach(), requires_grad=not frozen))

    @property
    def factors(self) -> Factors:
        """The factors by name, as parameters."""
        return {name: self._parameters[name] for name in self.factor_names}  # type: ignore[misc]

    @property
    def weight(self) -> Tensor:
        """The dense weight, composed at each access (only once inside `composed_once`); differentiable."""
        if self._held is not None:
            return self._held
        with span("composing"):
            if self.base is None:
                return self.scheme.compose(self.factors, self.shape)
            return self.scheme.added_to(self.base, self.scale, self.factors, self.shape)

    def change(self) -> Tensor:
        """Return what the factors add to the frozen base."""
        return self.scale * self.scheme.compose(self.factors, self.shape)

    def with_change(self, weight: FactorWeight) -> FactorWeight:
        """Return the same layer with other factors, without composing a weight."""
        new = self.__class__.__new__(self.__class__)
        _take_over(new, self)
        rest = {name: p for name, p in self._parameters.items() if name not in ("base", *self.factor_names)}
        new.__dict__["_parameters"] = {**weight._parameters, **rest}
        for name in ("scheme", "shape", "alpha", "scale", "factor_names", "start"):
            new.__dict__[name] = getattr(weight, name)
        return new

    def apply_to(self, x: Tensor, geometry: ConvGeometry | None, bias: Tensor | None) -> Tensor:
        """Apply the layer to `x`; `geometry` is `None` for a linear layer."""
        if self.base is None and self._held is None:
            return self.scheme.forward(x, self.factors, self.shape, geometry, bias)
        beside = self.scheme.sequential and self._held is None
        weight = self.base if beside and self.base is not None else self.weight
        out = F.linear(x, weight, bias) if geometry is None else convolve(x, weight, bias, geometry)
        if beside:
            out = torch.add(out, self.scheme.forward(x, self.factors, self.shape, geometry), alpha=self.scale)
        return out

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the weight that `composed_once` holds."""
        return {**self.__dict__, "_held": None}

    def extra_repr(self) -> str:
        """Return shape and scheme, for printing the module."""
        return f"{self.shape}, {self.scheme}"


class FactorLinear(FactorWeight):
    """A linear layer whose weight is stored as factors."""

    bias: nn.Parameter | None

    def __init__(self, plain: nn.Linear, weight: FactorWeight) -> None:
        super().__init__(weight.scheme, weight.shape, weight.factors, weight.base, weight.alpha)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.register_parameter("bias", plain.bias)
        _take_over_hooks(self, plain)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return self.apply_to(x, None, self.bias)

    def plain(self) -> nn.Linear:
        """Return the ordinary layer with the composed weight."""
        layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        return _filled(layer, self)


class FactorConv(FactorWeight):
    """A convolution (1-d or 2-d, without groups) whose weight is stored as factors."""

    bias: nn.Parameter | None

    def __init__(self, plain: nn.Conv1d | nn.Conv2d, weight: FactorWeight) -> None:
        super().__init__(weight.scheme, weight.shape, weight.factors, weight.base, weight.alpha)
        self.settings: dict[str, Any] = {
            key: getattr(plain, key) for key in ("stride", "padding", "dilation", "padding_mode")
        }
        # Torch stores (last axis before, after, next axis before, after), also for padding="same".
        around: list[int] = list(plain._reversed_padding_repeated_twice)
        symmetric = plain.padding_mode == "zeros" and around[::2] == around[1::2]
        self.pad_first = None if symmetric else around
        padding = tuple(around[::2][::-1]) if symmetric else (0,) * len(plain.stride)
        if not symmetric and plain.padding_mode == "zeros":
            self.pad_mode = "constant"
        else:
            self.pad_mode = plain.padding_mode
        self.geometry = ConvGeometry(tuple(plain.stride), padding, tuple(plain.dilation))
        self.register_parameter("bias", plain._parameters["bias"])
        _take_over_hooks(self, plain)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve (batch, in, *pixels) to (batch, out, *pixels)."""
        if self.pad_first is not None:
            x = F.pad(x, self.pad_first, mode=self.pad_mode)
        return self.apply_to(x, self.geometry, self.bias)

    def plain(self) -> nn.Conv1d | nn.Conv2d:
        """Return the ordinary layer with the composed weight."""
        kind = nn.Conv1d if len(self.shape.kernel) == 1 else nn.Conv2d
        layer = kind(
            self.shape.inp,
            self.shape.out,
            self.shape.kernel,  # type: ignore[arg-type]
            bias=self.bias is not None,
            device="meta",
            **self.settings,
        )
        return _filled(layer, self)


class FactorConv1d(FactorConv):
    """A 1-d convolution stored as factors."""


class FactorConv2d(FactorConv):
    """A 2-d convolution stored as factors."""


class _FactorRecurrent(nn.RNNBase):
    """A recurrent layer whose fused gate matrices are stored as factors, each in a `FactorWeight` with torch's name.

    Torch's own forward reads `_flat_weights`. Composing the weights there keeps all its features: packed sequences,
    projections, both directions.
    """

    kind: ClassVar[type[nn.RNNBase]]

    def __init__(self, plain: nn.RNNBase, make: MakeWeight) -> None:
        _take_over(self, plain)
        self.__dict__.pop("_flat_weights", None)
        for name in plain._flat_weights_names:
            weight = make(name, getattr(plain, name)) if name.startswith("weight") else None
            if weight is not None:
                del self._parameters[name]
                self._modules[name] = weight

    @property
    def _flat_weights(self) -> list[Tensor]:  # type: ignore[override]
        members = [getattr(self, name) for name in self._flat_weights_names]
        return [member.weight if isinstance(member, FactorWeight) else member for member in members]

    def factored(self) -> dict[str, FactorWeight]:
        """Return the weights that are stored as factors, by torch's names."""
        return {name: module for name, module in self._modules.items() if isinstance(module, FactorWeight)}

    def _init_flat_weights(self) -> None:
        """Do nothing: the weights are composed when they are read."""

    def _update_flat_weights(self) -> None:
        """Do nothing, for the same reason."""

    def flatten_parameters(self) -> None:
        """Do nothing: composed weights are new tensors at each step."""

    def plain(self) -> nn.RNNBase:
        """Return the ordinary layer with the composed weights."""
        layer: nn.RNNBase = self.kind.__new__(self.kind)
        _take_over(layer, self)
        # Biases and dense weights stay the same parameters: they may be frozen, or shared with another layer.
        layer._modules.clear()
        layer._parameters.clear()
        for name in self._flat_weights_names:
            factored = self._modules.get(name)
            own = composed_parameter(factored) if isinstance(factored, FactorWeight) else self._parameters[name]
            layer._parameters[name] = own
        layer._init_flat_weights()
        return layer


class FactorLSTM(_FactorRecurrent, nn.LSTM):
    """An LSTM whose gate matrices (4 hidden x in) are stored as factors."""

    kind = nn.LSTM


class FactorGRU(_FactorRecurrent, nn.GRU):
    """A GRU whose gate matrices (3 hidden x in) are stored as factors."""

    kind = nn.GRU


class FactorRNN(_FactorRecurrent, nn.RNN):
    """A plain recurrent network whose matrices are stored as factors."""

    kind = nn.RNN


_PROJECTIONS = {
    "in_proj_weight": "in_proj",
    "q_proj_weight": "q_proj",
    "k_proj_weight": "k_proj",
    "v_proj_weight": "v_proj",
}


class FactorMultiheadAttention(nn.MultiheadAttention):
    """Attention whose input projections are stored as factors (`in_proj.x1`, ...).

    The output projection is an ordinary linear layer and is replaced like any other. Torch's attention and Transformer
    layers read the projections as attributes, so they are properties here.
    """

    def __init__(self, plain: nn.MultiheadAttention, make: MakeWeight) -> None:
        _take_over(self, plain)
        for name, module in _PROJECTIONS.items():
            tensor = plain._parameters[name]
            weight = None if tensor is None else make(name, tensor)
            if weight is not None:
                del self._parameters[name]
                self._modules[module] = weight

    def factored(self) -> dict[str, FactorWeight]:
        """Return the projections that are stored as factors, by torch's names."""
        held = {name: self._modules.get(module) for name, module in _PROJECTIONS.items()}
        return {name: module for name, module in held.items() if isinstance(module, FactorWeight)}

    def _projection(self, name: str) -> Tensor | None:
        factored = self._modules.get(_PROJECTIONS[name])
        return factored.weight if isinstance(factored, FactorWeight) else self._parameters.get(name)

    in_proj_weight = property(lambda self: self._projection("in_proj_weight"))
    q_proj_weight = property(lambda self: self._projection("q_proj_weight"))
    k_proj_weight = property(lambda self: self._projection("k_proj_weight"))
    v_proj_weight = property(lambda self: self._projection("v_proj_weight"))

    def plain(self) -> nn.MultiheadAttention:
        """Return the ordinary layer with the composed projections."""
        layer = nn.MultiheadAttention.__new__(nn.MultiheadAttention)
        _take_over(layer, self)
        weights: dict[str, nn.Parameter | None] = {name: self._parameters.get(name) for name in _PROJECTIONS}
        weights |= {name: composed_parameter(weight) for name, weight in self.factored().items()}
        layer._parameters.clear()
        layer._parameters.update({**weights, **{n: p for n, p in self._parameters.items() if n not in weights}})
        for module in _PROJECTIONS.values():
            layer._modules.pop(module, None)
        return layer


PlainLayer = TypeVar("PlainLayer", bound=nn.Linear | nn.Conv1d | nn.Conv2d)


def _filled(layer: PlainLayer, factored: FactorLinear | FactorConv) -> PlainLayer:
    """Put the composed weight and the bias into a layer on the meta device."""
    layer.weight = composed_parameter(factored)
    layer._parameters["bias"] = factored.bias
    _take_over_hooks(layer, factored)
    return layer


def composed_parameter(factored: FactorWeight) -> nn.Parameter:
    """Return the composed weight as a new parameter; it is frozen if all its factors are."""
    trains = any(factor.requires_grad for factor in factored.factors.values())
    return nn.Parameter(factored.weight.detach().contiguous(), requires_grad=trains)


def _take_over_hooks(new: nn.Module, old: nn.Module) -> None:
    """Copy hooks and training mode from `old` to `new`."""
    for key, value in old.__dict__.items():
        if key.endswith("_hooks") or "_hooks_" in key:
            new.__dict__[key] = value.copy()
    new.train(old.training)


def _take_over(new: nn.Module, old: nn.Module) -> None:
    """Copy settings, parameters and sub-modules from `old` to `new`; the dictionaries that hold them are not shared."""
    for key, value in old.__dict__.items():
        new.__dict__[key] = value.copy() if isinstance(value, (dict, list)) else value


def factor_weights(model: nn.Module) -> dict[str, FactorWeight]:
    """Return the factorised weights of a model, by the names of their modules."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FactorWeight)}


def dense_names(model: nn.Module) -> dict[str, str]:
    """Return the name that each factorised weight has in the plain model, by the name of its module.

    If the factors are the change of a frozen base, it is the name of the dense change.
    """
    weights, found = factor_weights(model), dict[str, str]()
    for layer, name in site_names(model).items():
        whole = isinstance(weights[layer], (FactorLinear, FactorConv))
        dense = f"{layer}.w" if weights[layer].base is not None else f"{name}.weight" if whole else name
        found[layer] = dense.removeprefix(".")
    return found


def site_names(model: nn.Module) -> dict[str, str]:
    """Return the name by which patterns select each factorised weight, by the name of its module."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, (FactorLinear, FactorConv)):
            found[name] = name
        elif isinstance(module, _FactorRecurrent):
            found.update({f"{name}.{attribute}": f"{name}.{attribute}" for attribute in module.factored()})
        elif isinstance(module, FactorMultiheadAttention):
            found.update({f"{name}.{_PROJECTIONS[a]}": f"{name}.{a}" for a in module.factored()})
    return {name.removeprefix("."): dense.removeprefix(".") for name, dense in found.items()}


@contextmanager
def composed_once(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Compose each weight once for the whole block, and yield the composed weights by module name.

    It saves time for layers that are called often in one step, and gives access to gradients of composed weights.
    """
    layers = factor_weights(model)
    before = {name: layer._held for name, layer in layers.items()}
    try:
        for layer in layers.values():
            layer._held = layer.weight
        yield {name: layer.weight for name, layer in layers.items()}
    finally:
        for name, layer in layers.items():
            layer._held = before[name]
