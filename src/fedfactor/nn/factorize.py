"""Replacing the layers of any model by factorised ones, and back."""

from __future__ import annotations

import copy
import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedfactor.factor.base import Factors, Scheme, Unfit, WeightShape
from fedfactor.factor.dense import Dense, WeightNorm
from fedfactor.nn.frozen import Frozen, is_tuned, mark_tuned
from fedfactor.nn.layers import (
    FactorConv,
    FactorConv1d,
    FactorConv2d,
    FactorGRU,
    FactorLinear,
    FactorLSTM,
    FactorMultiheadAttention,
    FactorRNN,
    FactorWeight,
    _FactorRecurrent,
)

RECURRENT: dict[type[nn.Module], type[_FactorRecurrent]] = {
    nn.LSTM: FactorLSTM,
    nn.GRU: FactorGRU,
    nn.RNN: FactorRNN,
}
CONVOLUTIONS: dict[type[nn.Module], type[FactorConv]] = {nn.Conv1d: FactorConv1d, nn.Conv2d: FactorConv2d}
LINEAR: tuple[type[nn.Module], ...] = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
FACTORED = (FactorLinear, FactorConv, _FactorRecurrent, FactorMultiheadAttention)


@dataclass(frozen=True)
class Finding:
    """A weight that stays dense, and the reason."""

    layer: str
    reason: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.reason}"


@dataclass(frozen=True)
class _Site:
    """One weight of a model that could be factorised, and the decision about it."""

    layer: str
    """Name of the module."""
    attribute: str
    """Name of the weight in the module."""
    weight: Tensor
    """The weight; for a layer with a frozen base, the base."""
    scheme: Scheme | None
    """The scheme of its factors; `None`: the weight stays dense."""
    reason: str = ""
    owner: FactorWeight | None = None
    """The module that has the weight as factors already."""

    @property
    def name(self) -> str:
        """The name of the layer, or of the weight if a layer has several."""
        if self.attribute == "weight":
            return self.layer or "weight"
        return f"{self.layer}.{self.attribute}".removeprefix(".")


_fitting = ContextVar("_fitting", default=True)


@contextmanager
def unfitted(active: bool = True) -> Iterator[None]:
    """Let `factorize` draw random factors within this block, even with `keep_weights`: to save time, if only the form
    of a model is needed. If not `active`, end the effect of such a block around this one."""
    token = _fitting.set(not active)
    try:
        yield
    finally:
        _fitting.reset(token)


def factorize(
    model: nn.Module,
    scheme: Scheme,
    *,
    skip: Iterable[str] = (),
    per_layer: Mapping[str, Scheme | None] | None = None,
    keep_weights: bool = False,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Return a copy of a model with factorised layers. Layers that cannot be factorised stay dense: see `check`.

    In a model with a frozen base (`adapt`), the changes of the adapted layers are factorised, and nothing else. They
    start at zero unless the model has changes already and `keep_weights` is set.

    Args:
        model: Any model.
        scheme: The scheme of the factors.
        skip: Patterns of layers to leave dense: `"classifier"` (and everything in it), `"*.conv1"`,
            `"lstm.weight_hh*"`.
        per_layer: Other schemes by pattern; `None` leaves a layer dense. The first match counts.
        keep_weights: Compute the factors from the weights. Otherwise they are random, and the composed weight has the
            standard deviation of the weight that it replaces.
        generator: Source of random factors.

    Raises:
        ValueError: A pattern matches no layer, or with `keep_weights` a scheme has no factors for a given weight.
    """
    sites = [site for site in _sites(model, scheme, skip, per_layer) if site.scheme is not None]
    chosen = {(site.layer, site.attribute): _factor_weight(site, keep_weights, generator) for site in sites}
    # Dense changes that are replaced need not be copied: they may be as large as the base.
    changes = [site.owner for site in sites if site.owner is not None and site.owner.base is not None]
    model = copy.deepcopy(model, {id(owner.factors["w"]): owner.factors["w"] for owner in changes})

    def rebuild(name: str, module: nn.Module) -> nn.Module:
        ours = {attribute: weight for (layer, attribute), weight in chosen.items() if layer == name}
        if not ours:
            return module
        if all(weight.base is not None for weight in ours.values()):
            return _with_changes(module, ours)
        if isinstance(module, (_FactorRecurrent, FactorMultiheadAttention)):
            ours = {**module.factored(), **ours}
        return _wrap(module.plain() if isinstance(module, FACTORED) else module, ours)

    return _replace(model, rebuild)


def check(
    model: nn.Module,
    scheme: Scheme,
    *,
    skip: Iterable[str] = (),
    per_layer: Mapping[str, Scheme | None] | None = None,
) -> list[Finding]:
    """Return the weights that `factorize` would leave dense, with reasons; layers in `skip` are not listed."""
    found = [Finding(s.name, s.reason) for s in _sites(model, scheme, skip, per_layer) if s.scheme is None and s.reason]
    return found + list(_unsupported(model))


def compose(model: nn.Module, *, keep_base: bool = False, shared: bool = False) -> nn.Module:
    """Return a copy of a model with ordinary torch layers, which have the composed weights and the original names.

    With `keep_base`, layers with a frozen base stay as they are. With `shared`, the copy is for reading only: it has
    the model's own tensors where nothing is composed.
    """

    def rebuild(name: str, module: nn.Module) -> nn.Module:
        if not isinstance(module, FACTORED) or (keep_base and any(w.base is not None for w in _owned(module))):
            return module
        return module.plain()

    own = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())} if shared else {}
    return mark_tuned(_replace(copy.deepcopy(model, own), rebuild), tuned=keep_base and is_tuned(model))


def _owned(module: nn.Module) -> list[FactorWeight]:
    """Return the factorised weights of one layer."""
    return [module] if isinstance(module, FactorWeight) else list(module.factored().values())  # type: ignore[operator]


def weight_norm(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer with weight normalisation per row, which `factorize` keeps."""
    return factorize(layer, WeightNorm(Dense()), keep_weights=True)


def first_layers(model: nn.Module, count: int) -> list[str]:
    """Return the names of the first `count` layers with weights, which a hybrid network keeps dense."""
    layers = dict.fromkeys(layer for layer, attribute, weight, module in _weights(model))
    if not 0 <= count <= len(layers):
        raise ValueError(f"the model has {len(layers)} layers with weights, so the first {count} cannot stay dense")
    return list(layers)[:count]


def outer_layers(model: nn.Module) -> list[str]:
    """Return the names of stem, 1 x 1 convolutions and classifier, which methods for inner layers leave dense."""
    layers = [(name, module) for name, module in model.named_modules() if type(module) in (*LINEAR, *CONVOLUTIONS)]
    convolutions = [name for name, module in layers if type(module) in CONVOLUTIONS]
    points = [name for name, module in layers if name in convolutions and set(module.kernel_size) == {1}]
    classifier = [name for name, module in layers if name not in convolutions][-1:]
    return [*dict.fromkeys([*convolutions[:1], *points, *classifier])]


def _replace(
    model: nn.Module,
    rebuild: Callable[[str, nn.Module], nn.Module],
    name: str = "",
    done: dict[int, nn.Module] | None = None,
) -> nn.Module:
    """Apply `rebuild(name, module)` from the leaves up. A module that is used in two places is rebuilt once.

    Not a recursive closure: it would be a cycle that keeps the model in memory.
    """
    done = {} if done is None else done
    if id(model) not in done:
        for child_name, child in list(model._modules.items()):
            if child is not None:
                model._modules[child_name] = _replace(child, rebuild, f"{name}.{child_name}".removeprefix("."), done)
        done[id(model)] = rebuild(name, model)
    return done[id(model)]


def _weights(model: nn.Module) -> Iterator[tuple[str, str, Tensor, nn.Module]]:
    """Yield (layer, attribute, weight, module) for each weight of a supported layer, in order of definition."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        kind = type(module)
        if kind in LINEAR or kind in CONVOLUTIONS or isinstance(module, (FactorLinear, FactorConv)):
            yield name, "weight", _weight(module, "weight"), module
        elif kind in RECURRENT or isinstance(module, _FactorRecurrent):
            for attribute, weight in zip(module._flat_weights_names, module._flat_weights, strict=True):
                if attribute.startswith("weight"):
                    yield name, attribute, weight, module
            if isinstance(module, _FactorRecurrent):
                inside += (f"{name}.",)
        elif isinstance(module, nn.MultiheadAttention):
            for attribute in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                if (weight := _weight(module, attribute)) is not None:
                    yield name, attribute, weight, module


def _weight(module: nn.Module, attribute: str) -> Any:
    """Return a weight; for a layer with a frozen base, the base, which need not be composed."""
    owner = _owner(module, attribute)
    return getattr(module, attribute) if owner is None or owner.base is None else owner.base


def _sites(
    model: nn.Module, scheme: Scheme, skip: Iterable[str], per_layer: Mapping[str, Scheme | None] | None
) -> list[_Site]:
    """Return all weights with the scheme that they get, or the reason why they get none."""
    skip, special = [skip] if isinstance(skip, str) else list(skip), dict(per_layer or {})
    found = list(_weights(model))
    names = [_Site(layer, attribute, weight, None).name for layer, attribute, weight, _ in found]
    for pattern in [*skip, *special]:
        if not any(_matches(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise ValueError(
                f"pattern {pattern!r} matches no layer that could be factorised, such as {', '.join(near)}"
            )
    tied, sites = _tied(model), []
    owners = [_owner(module, attribute) for _, attribute, _, module in found]
    adapted = is_tuned(model) or any(owner is not None and owner.base is not None for owner in owners)
    for (layer, attribute, weight, module), name, owner in zip(found, names, owners, strict=True):
        site = _Site(layer, attribute, weight, None, owner=owner)
        untouched = adapted and (owner is None or owner.base is None)
        if untouched or any(_matches(name, pattern) for pattern in skip):
            sites.append(site)
            continue
        wanted = next((special[pattern] for pattern in special if _matches(name, pattern)), scheme)
        if wanted is not None:
            site = _decide(site, module, wanted, tied)
        sites.append(site)
    return sites


def _owner(module: nn.Module, attribute: str) -> FactorWeight | None:
    """Return the module that has a weight as factors, or `None` if it is an ordinary parameter."""
    if isinstance(module, (_FactorRecurrent, FactorMultiheadAttention)):
        return module.factored().get(attribute)
    return module if isinstance(module, FactorWeight) else None


def _decide(
    site: _Site, module: nn.Module, scheme: Scheme, tied: dict[int, list[str]], adapting: bool = False
) -> _Site:
    """Decide about one weight. `adapting` means that the weight becomes the frozen base of a change."""
    owner = site.owner
    if owner is not None:
        normed = isinstance(owner.scheme, WeightNorm) and isinstance(owner.scheme.inner, Dense)
        again = adapting and owner.base is not None  # a change that starts from an adapter
        if not again and (adapting or not (normed if owner.base is None else isinstance(owner.scheme, Dense))):
            return replace(site, reason=f"already factorised by {owner.scheme}; compose the model first")
        scheme = WeightNorm(scheme) if owner.base is None else scheme.as_change()
    elif site.attribute not in module._parameters:
        return replace(site, reason="its weight is computed from other tensors (weight_norm, spectral_norm, pruning)")
    elif adapting:
        scheme = scheme.as_change()
    elif isinstance(site.weight, Frozen):
        return replace(site, reason="its weight is frozen (requires_grad=False)")
    if getattr(module, "groups", 1) != 1:
        return replace(site, reason=f"grouped convolution ({module.groups} groups) stays dense")
    others = (
        []
        if owner is not None and owner.base is not None
        else [
            name for name in tied.get(id(site.weight), []) if name != f"{site.layer}.{site.attribute}".removeprefix(".")
        ]
    )
    if others:
        return replace(site, reason=f"its weight is shared with {', '.join(others)}")
    try:
        scheme.shapes(WeightShape.of(site.weight))
    except Unfit as reason:
        return replace(site, reason=str(reason))
    except ValueError as error:
        raise ValueError(f"layer {site.name!r} ({WeightShape.of(site.weight)}): {error}") from None
    return replace(site, scheme=scheme)


def _factor_weight(site: _Site, keep_weights: bool, generator: torch.Generator | None) -> FactorWeight:
    assert site.scheme is not None
    shape, weight = WeightShape.of(site.weight), site.weight.detach()
    if site.owner is not None and site.owner.base is not None:
        before = site.owner if keep_weights or site.owner.start else None
        return _changed(site.scheme, site.owner.base, site.owner.alpha, generator, before)
    factors: Factors
    if weight.is_meta:
        factors = {name: weight.new_empty(size) for name, size in site.scheme.shapes(shape).items()}
    elif keep_weights and _fitting.get():
        try:
            factors = site.scheme.from_dense(weight, generator)
        except Unfit as reason:
            raise ValueError(f"layer {site.name!r} cannot keep its weight: {reason}") from reason
    else:
        # The model's own initialisation sets the size of the weights, unless a weight is constant (zeros).
        std = float(weight.float().std()) if weight.numel() > 1 else 0.0
        factors = site.scheme.init(shape, generator, std=std or None)
    trains = site.weight.requires_grad
    own: Factors = {n: nn.Parameter(factor.to(weight), requires_grad=trains) for n, factor in factors.items()}
    return FactorWeight(site.scheme, shape, own)


def _changed(
    scheme: Scheme, base: Frozen, alpha: float, generator: torch.Generator | None, before: FactorWeight | None = None
) -> FactorWeight:
    """Return a weight that is a frozen base plus a change, which starts at zero or with the change `before`."""
    shape, base = WeightShape.of(base), Frozen(base)
    if base.is_meta:
        return FactorWeight(
            scheme, shape, {name: base.new_empty(size) for name, size in scheme.shapes(shape).items()}, base, alpha
        )
    factors = scheme.zero(base.detach(), generator)
    made = FactorWeight(scheme, shape, {name: factor.to(base) for name, factor in factors.items()}, base, alpha)
    if before is None:
        return made
    same = before.start is not None and _sizes(before.start.factors) == _sizes(made.factors)
    if before.start is not None and same and before.start.scale == made.scale:
        factors = {name: before.start.factors[name].detach().clone() for name in factors}
    # The frozen factors of a network are never replaced, so an adapter is needed with its values.
    elif (_fitting.get() or before.start) and (change := before.change().detach()).any():
        factors = scheme.from_dense(change / made.scale, generator)
    else:
        return made
    return FactorWeight(scheme, shape, {name: factor.to(base) for name, factor in factors.items()}, base, alpha)


def _sizes(factors: Factors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(factor.shape) for name, factor in factors.items()}


def _with_changes(module: nn.Module, weights: dict[str, FactorWeight]) -> nn.Module:
    """Replace the changes of a layer with a frozen base."""
    if isinstance(module, FactorWeight):
        return module.with_change(weights["weight"])
    for old in module.named_children():
        new = next((w for a, w in weights.items() if module.factored().get(a) is old[1]), None)  # type: ignore[operator]
        if new is not None:
            module._modules[old[0]] = new
    return module


def _wrap(module: nn.Module, weights: dict[str, FactorWeight]) -> nn.Module:
    """Replace weights of one ordinary layer by factors."""

    def make(name: str, tensor: Tensor) -> FactorWeight | None:
        return weights.get(name)

    if isinstance(module, nn.Linear):
        return FactorLinear(module, weights["weight"])
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return CONVOLUTIONS[type(module)](module, weights["weight"])
    if isinstance(module, nn.RNNBase):
        return RECURRENT[type(module)](module, make)
    assert isinstance(module, nn.MultiheadAttention)
    return FactorMultiheadAttention(module, make)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def _tied(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by the id of the parameter."""
    names: dict[int, list[str]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{module_name}.{name}".removeprefix("."))
    return names


def _unsupported(model: nn.Module) -> Iterator[Finding]:
    """Yield weights of two or more axes in layers that are not supported."""
    known = {id(module) for _, _, _, module in _weights(model)}
    for name, module in model.named_modules():
        if id(module) in known or isinstance(module, FactorWeight):
            continue
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() > 1:
                where = f"{name}.{attribute}".removeprefix(".")
                yield Finding(where, f"{type(module).__name__} layers are not factorised")
