"""Fine-tuning: a frozen base, and small changes of some of its layers."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedfactor.factor.base import Factors, Scheme, WeightShape
from fedfactor.factor.dense import Dense
from fedfactor.nn.factorize import (
    CONVOLUTIONS,
    LINEAR,
    _changed,
    _decide,
    _owner,
    _replace,
    _Site,
    _tied,
    _weights,
    _with_changes,
    _wrap,
)
from fedfactor.nn.frozen import Frozen, freeze, mark_tuned
from fedfactor.nn.layers import FactorWeight, Start, factor_weights
from fedfactor.support.checks import check_number, near

ATTENTION = (
    "query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "q", "v", "query_key_value", "qkv", "in_proj_weight",
    "q_proj_weight", "v_proj_weight",
)  # fmt: skip
"""Names of the projections in attention layers that are adapted by default, as LoRA does: queries and values."""


NONE = ("none",)
"""Targets that stand for no layer: linear probing, if the classifier is trained whole."""


@dataclass(frozen=True)
class Tune:
    """How a pre-trained model is fine-tuned: which layers get a change, and which tensors are trained whole.

    All other tensors are frozen. They are the base, which server and clients both have.
    """

    targets: tuple[str, ...] = ()
    """Patterns of layers whose change is trained, such as `query` or `*.conv1`. Empty: queries and values of attention,
    or all linear layers and convolutions in a model without attention. `["none"]`: only `train` is trained."""
    alpha: float = 16.0
    """The change is multiplied by alpha / r, where r is its rank; the change of a method without ranks is not."""
    train: tuple[str, ...] = ()
    """Patterns of tensors that are trained and sent whole, such as `classifier`."""
    adapter: str = ""
    """Folder of an adapter in PEFT's format that changes and trained tensors start from; its alpha is used for its
    layers. Without `targets`, its layers are the targets."""

    def __post_init__(self) -> None:
        for name in ("targets", "train"):
            if isinstance(patterns := getattr(self, name), str):
                raise ValueError(f"tune.{name} must be a list of patterns, got {patterns!r}")
            object.__setattr__(self, name, tuple(patterns))
        check_number("tune.alpha", self.alpha, 0, above=True)

    def trains(self, name: str) -> bool:
        """Return whether a tensor is trained whole."""
        return matches(name, self.train)


def adapt(
    model: nn.Module,
    scheme: Scheme,
    *,
    targets: Iterable[str] = (),
    train: Iterable[str] = (),
    alpha: float = Tune.alpha,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Return a copy of a model for fine-tuning: W = W0 + (alpha / r) * (the composed factors), which start at zero.

    The copy shares the memory of all tensors that are frozen. `compose` returns the plain model.

    Args:
        model: A pre-trained model.
        scheme: The scheme of the change: `LowRank(rank=8)` is LoRA, `Hadamard(rank=8)` is LoHa (FedPara), `Dense()`
            trains the whole change.
        targets: Patterns of layers that get a change: see `Tune.targets`.
        train: Patterns of tensors that are trained whole. All others are frozen.
        alpha: The change is multiplied by alpha / r, where r is its rank.
        generator: Source of random factors.

    Raises:
        ValueError: A pattern matches nothing, or the rank is above that of a layer.
    """
    how = Tune(tuple(targets), alpha, tuple(train))
    return tuned(copy.deepcopy(model, shared_memory(model, how)), how, scheme, generator)


def shared_memory(model: nn.Module, how: Tune | None) -> dict[int, Frozen]:
    """Return frozen parameters in place of those that are not trained, for `copy.deepcopy`: copies share them."""
    return {
        id(parameter): Frozen(parameter)
        for name, parameter in model.named_parameters()
        if (not how.trains(name) if how else not parameter.requires_grad)
    }


def fresh_changes(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return zeros in place of dense changes that start at zero, for `copy.deepcopy`.

    Their memory is not touched, so they cost nothing if a method replaces them by factors.
    """
    changes = [layer for layer in factor_weights(model).values() if layer.base is not None and layer.start is None]
    dense = [layer.factors["w"] for layer in changes]
    return {id(w): nn.Parameter(_untouched(w)) for w in dense}


def _untouched(like: Tensor) -> Tensor:
    """Return zeros that the operating system provides when they are first written to; torch would write them."""
    return torch.from_numpy(np.zeros(like.nbytes, np.uint8)).view(like.dtype).view(like.shape)


def tuned(
    model: nn.Module, how: Tune, scheme: Scheme | None = None, generator: torch.Generator | None = None
) -> nn.Module:
    """Freeze a model and give its target layers a change, which by default is dense; change and return the model.

    The changes start at zero, or with those that the model has already (`with_changes`).
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in how.train:
        if not any(matches(name, [pattern]) for name in names):
            raise ValueError(
                f"tune.train: {pattern!r} matches no tensor; {near(pattern, _parts(names))}there are {_some(names)}"
            )
    sites = _targets(model, how, scheme or Dense())
    everything = {*names, *(name for name, _ in model.named_buffers(remove_duplicate=False))}
    freeze(model, {name for name in everything if not how.trains(name)})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(how.trains(name))
    made: dict[str, dict[str, FactorWeight]] = {}
    for site in sites:
        owner, parameters = site.owner, model.get_submodule(site.layer)._parameters
        base, alpha = (owner.base, owner.alpha) if owner else (parameters[site.attribute], how.alpha)
        assert site.scheme is not None and isinstance(base, Frozen)
        change = _changed(site.scheme, base, alpha, generator, owner)
        change.start = Start(owner.factors, owner.scale) if owner else None
        made.setdefault(site.layer, {})[site.attribute] = change

    def rebuild(name: str, module: nn.Module) -> nn.Module:
        if name not in made:
            return module
        return (_with_changes if isinstance(module, FactorWeight) else _wrap)(module, made[name])

    return mark_tuned(_replace(model, rebuild))


def with_changes(model: nn.Module, changes: Mapping[str, tuple[Scheme, Factors, float]]) -> nn.Module:
    """Give layers of a model a change: its scheme, factors and alpha by layer; change and return the model.

    Raises:
        ValueError: The model has no such layer, or the factors do not fit it.
    """
    found, made = dict(model.named_modules()), dict[str, dict[str, FactorWeight]]()
    for name, (scheme, factors, alpha) in changes.items():
        layer = found.get(name)
        if layer is None or type(layer) not in (*LINEAR, *CONVOLUTIONS):
            what = "is no linear layer or convolution" if layer else "does not exist in the model"
            raise ValueError(f"layer {name!r} {what}; {near(name, found)}layers are {_some([*found][1:])}")
        weight: Tensor = layer.weight
        shape, sizes = WeightShape.of(weight), {key: tuple(factor.shape) for key, factor in factors.items()}
        if sizes != (wanted := scheme.shapes(shape)):
            raise ValueError(f"layer {name!r} ({shape}): the factors have the sizes {sizes}, not {wanted}")
        own = {key: factor.to(weight) for key, factor in factors.items()}
        made[name] = {"weight": FactorWeight(scheme, shape, own, Frozen(weight), alpha)}
    return _replace(model, lambda name, module: _wrap(module, made[name]) if name in made else module)


def starts_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the factors of the adapter that the changes of a model start from, by name."""
    found = {name: layer.start.factors for name, layer in factor_weights(model).items() if layer.start}
    return {f"{name}.{key}": factor.detach() for name, factors in found.items() for key, factor in factors.items()}


def _targets(model: nn.Module, how: Tune, scheme: Scheme) -> list[_Site]:
    """Return the weights that get a change. Raise ValueError if a pattern matches none that can be adapted."""
    tied = _tied(model)
    found = [(_Site(layer, a, weight, None, owner=_owner(m, a)), m) for layer, a, weight, m in _weights(model)]
    names = [site.name for site, _ in found]
    if how.targets == NONE:
        if not how.train:
            raise ValueError("tune.targets is 'none', and tune.train lists no tensor: nothing would be trained")
        return []
    started = [site.name for site, _ in found if site.owner is not None and site.owner.base is not None]
    chosen: list[_Site] = []
    for pattern in how.targets or started or default_targets(names, how):
        meant = [(site, module) for site, module in found if matches(site.name, [pattern])]
        tried = [_decide(site, module, scheme, tied, adapting=True) for site, module in meant]
        fit = [site for site in tried if site.scheme is not None]
        if not fit and how.targets:
            why = f" that can be adapted: {tried[0].name}: {tried[0].reason}" if tried else ""
            layers = f"; {near(pattern, _parts(names))}layers are {_some(names)}"
            raise ValueError(f"tune.targets: {pattern!r} matches no layer{why or layers}")
        chosen += [site for site in fit if site.name not in {other.name for other in chosen}]
    if not chosen and not how.train:
        raise ValueError("tune.targets: the model has no linear layer or convolution that could be adapted")
    left = [name for name in started if name not in {site.name for site in chosen}]
    if left:
        raise ValueError(f"tune.adapter changes the layer {left[0]!r}, which tune.targets does not match")
    both = [site.name for site in chosen if how.trains(f"{site.layer}.{site.attribute}".removeprefix("."))]
    if both:
        raise ValueError(
            f"{both[0]!r} is matched by tune.targets and by tune.train: a layer is trained whole, or its change is"
        )
    return chosen


def default_targets(names: list[str], how: Tune) -> list[str]:
    """Return the layers that are adapted if the user names none."""
    attention = [name for name in names if name.rpartition(".")[2] in ATTENTION]
    return [name for name in attention or names if not how.trains(name) and not how.trains(f"{name}.weight")]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern is a name, or a part of it between dots: `query` matches `layer.0.query.weight`."""
    dotted = f".{name}."
    return any(fnmatch.fnmatchcase(dotted, f"*.{pattern}.*") for pattern in patterns)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _parts(names: list[str]) -> list[str]:
    """Return the names, and their parts between dots."""
    return [*dict.fromkeys([*names, *(part for name in names for part in name.split("."))])]
