"""Adapters in PEFT's format, written and read without PEFT: LoRA and LoHa of linear layers and convolutions.

A folder has `adapter_config.json` and `adapter_model.safetensors`. PEFT's LoRA is B A with B (out, r) and A (r, in);
its LoHa is FedPara's product, with cores for kernels larger than 1 x 1 (`use_effective_conv2d`). Both are multiplied by
alpha / r. Tensors that are trained whole are stored with their module (`modules_to_save`).
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fedfactor.factor import ChannelSplit, Dense, Hadamard
from fedfactor.factor.base import Factors, Scheme, Unfit, WeightShape
from fedfactor.nn.adapt import Tune, shared_memory, with_changes
from fedfactor.nn.layers import FactorConv, FactorLinear, FactorWeight, factor_weights, site_names
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.message import finite
from fedfactor.protocol.plan import Tensors
from fedfactor.runs.weights import read
from fedfactor.support.hub import split_name

PREFIX = "base_model.model."
"""What PEFT writes in front of each name."""
CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""Files with the tensors of an adapter; the first that exists is read, and only the first is ever written."""
PARTS = {
    "LORA": ("lora_A.weight", "lora_B.weight"),
    "LOHA": ("hada_w1_a", "hada_w1_b", "hada_t1", "hada_w2_a", "hada_w2_b", "hada_t2"),
}
"""The tensors of a layer, by the type of the adapter."""
ALPHA = {"LORA": "lora_alpha", "LOHA": "alpha"}
PLAIN: dict[str, dict[str, Any]] = {
    "LORA": {"lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "use_rslora": False, "use_dora": False},
    "LOHA": {"rank_dropout": 0.0, "module_dropout": 0.0, "use_effective_conv2d": True},
}
"""Settings of written adapters that are the same for all."""
REFUSED = {"use_dora": False, "lora_bias": False, "fan_in_fan_out": False, "bias": "none", "layer_replication": None}
"""Settings that change what an adapter computes, and the only value with which one is read."""
OTHER_BASES = ("pissa", "olora", "corda", "loftq")
"""Beginnings of `init_lora_weights` with which PEFT changes the base too, when it loads an adapter."""

Form = tuple[str, Tensors, int]
"""The change of one layer: type of the adapter, its tensors, and its rank."""


class NoAdapter(ValueError):
    """PEFT's format has no form for a change; the message says which, and why."""


# Writing


@torch.no_grad()
def adapter_of(network: nn.Module, base: str = "") -> tuple[dict[str, Any], Tensors]:
    """Return configuration and tensors of the adapter in a network whose layers have a frozen base and a change.

    Args:
        network: The network, with the values that it has after training.
        base: Where the base comes from, for the configuration.

    Raises:
        NoAdapter: PEFT cannot express a change, or a tensor that is trained whole.
    """
    sites = site_names(network)
    layers = {sites[name]: layer for name, layer in factor_weights(network).items() if layer.base is not None}
    factored = {name: layer for name, layer in layers.items() if not isinstance(layer.scheme, Dense)}
    if not factored:
        raise NoAdapter("the method trains dense changes, and PEFT's adapters are of low rank")
    forms = {name: _form(name, layer) for name, layer in factored.items()}
    kinds = {kind for kind, _, _ in forms.values()}
    if len(kinds) > 1:
        raise NoAdapter("some layers have the form of LoRA and others that of LoHa, but an adapter has one")
    (kind,) = kinds
    tensors = {f"{name}.{part}": t for name, (_, parts, _) in forms.items() for part, t in parts.items()}
    saved = _saved(network, {name: layer for name, layer in layers.items() if name not in factored})
    hidden = [(name, module) for name in factored for module in saved if name.endswith(module)]
    if hidden:
        raise NoAdapter("PEFT finds modules by the end of their names, and would take {} for {}".format(*hidden[0]))
    tensors |= {f"{module}.{key}": tensor for module, state in saved.items() for key, tensor in state.items()}
    ranks = {name: rank for name, (_, _, rank) in forms.items()}
    alphas = {name: _whole(factored[name].scale * rank) for name, rank in ranks.items()}
    (rank, _), (alpha, _) = (Counter(found.values()).most_common(1)[0] for found in (ranks, alphas))
    names = [name for name, _ in network.named_modules() if name not in factored]
    others = [name for name in names if name.endswith(tuple(f".{one}" for one in factored))]
    model, revision = split_name(base) or (base, None)
    config = {
        "peft_type": kind, "task_type": None, "base_model_name_or_path": model or None, "revision": revision,
        "inference_mode": True,
        "r": rank, ALPHA[kind]: alpha, "target_modules": [*factored], "exclude_modules": others or None,
        "modules_to_save": [*saved] or None,
        "rank_pattern": {f"^{re.escape(name)}": own for name, own in ranks.items() if own != rank},
        "alpha_pattern": {f"^{re.escape(name)}": own for name, own in alphas.items() if own != alpha},
        **PLAIN[kind],
    }  # fmt: skip
    return config, {PREFIX + name: tensor.detach().clone() for name, tensor in tensors.items()}


def _form(name: str, layer: FactorWeight) -> Form:
    """Return the change of one layer as PEFT has it."""
    if not isinstance(layer, FactorLinear | FactorConv):
        raise NoAdapter(f"PEFT adapts linear layers and convolutions, but {name} is a part of another layer")
    loha = isinstance(layer.scheme, Hadamard)
    if isinstance(layer, FactorConv):
        plain = {"padding_mode": "zeros"} | ({} if loha else {"dilation": (1,) * len(layer.shape.kernel)})
        wrong = [key for key, value in plain.items() if layer.settings[key] != value]
        if wrong:
            raise NoAdapter(
                f"PEFT's adapters ignore {wrong[0]} = {layer.settings[wrong[0]]!r} of the convolution {name}"
            )
    if loha:
        return _loha(name, layer)
    try:
        b, a = layer.scheme.as_product(layer.factors, layer.shape)
    except Unfit as reason:
        raise NoAdapter(f"{name}: {reason}") from None
    b = b.view(*b.shape, *(1 for _ in layer.shape.kernel))
    return "LORA", dict(zip(PARTS["LORA"], (a, b), strict=True)), len(a)


def _loha(name: str, layer: FactorWeight) -> Form:
    """Return FedPara's factors as PEFT's. pFedPara's W2 + 1 has one component more, and W1 gets one of zeros."""
    scheme, shape, factors = layer.scheme, layer.shape, layer.factors
    assert isinstance(scheme, Hadamard)
    if scheme.tanh:
        raise NoAdapter(f"{name}: PEFT's LoHa has no tanh")
    found: Tensors = {}
    for side, more in (("1", 0.0), ("2", 1.0)):
        x, y, core = factors[f"x{side}"], factors[f"y{side}"], factors.get(f"t{side}")
        if scheme.personal:
            x, y = (F.pad(one, (0, 1), value=more) for one in (x, y))
            if core is not None:
                core = F.pad(core, (0, 1, 0, 0, 0, 1))
                core[-1, :, -1] = more
        if core is not None and shape.area == 1:
            x, core = x @ core[:, 0], None
        if core is None:
            found |= {f"hada_w{side}_a": x, f"hada_w{side}_b": y.T}
            continue
        kernel = (*shape.kernel, 1)[:2]  # PEFT's cores have two axes, also for one axis of the kernel
        found |= {f"hada_w{side}_a": x.T, f"hada_w{side}_b": y.T}
        found[f"hada_t{side}"] = core.mT.reshape(len(core), len(core), *kernel)
    return "LOHA", found, factors["x1"].shape[1] + scheme.personal


def _saved(network: nn.Module, dense: Mapping[str, FactorWeight]) -> dict[str, Tensors]:
    """Return the tensors of the modules that are trained whole, or have a dense change, by module."""
    found: dict[str, Tensors] = {}
    for name, layer in dense.items():
        if not isinstance(layer, FactorLinear | FactorConv):
            raise NoAdapter(f"{name} has a dense change, and is only a part of a layer")
        found[name] = dict(layer.plain().state_dict())
    changes = {f"{name}.{key}" for name, layer in factor_weights(network).items() for key in layer.factors}
    for name in tensors_of(network):
        module, _, _ = name.rpartition(".")
        if name in changes or module in found:
            continue
        owner = network.get_submodule(module)
        if isinstance(owner, FactorWeight) or any(owner.children()):
            what = "a layer with a change" if isinstance(owner, FactorWeight) else "a module with others inside"
            raise NoAdapter(f"{name} is trained whole, and belongs to {what}, which PEFT cannot store")
        found[module] = dict(owner.state_dict())
    return found


def _whole(number: float) -> int | float:
    """Return a number as an integer if it is one, as PEFT writes alpha."""
    return int(number) if number == int(number) else number


def write_adapter(folder: Path, config: Mapping[str, Any], data: bytes | bytearray | memoryview) -> None:
    """Write an adapter into a folder, which must exist; `data` is a safetensors file."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / FILES[0]).write_bytes(data)


# Reading


def started(model: Any, tune: Tune | None) -> Any:
    """Return a model, or a function that builds it, with the adapter that `tune` names; the given one is unchanged."""
    if tune is None or not tune.adapter:
        return model
    if isinstance(model, nn.Module):
        return with_adapter(copy.deepcopy(model, shared_memory(model, tune)), tune)
    return lambda: with_adapter(model(), tune)


def with_adapter(model: nn.Module, tune: Tune) -> nn.Module:
    """Give a model the changes and trained tensors of the adapter that `tune` names, if any; change and return it.

    Tensors that `tune` trains whole and that have another shape in the adapter are left as they are.

    Raises:
        ValueError: The folder has no adapter, its type is not supported, or it does not fit the model.
    """
    if not tune.adapter:
        return model
    folder = Path(tune.adapter)
    config, tensors = read_adapter(folder)
    kind = config["peft_type"]
    layers: dict[str, Tensors] = {}
    rest: Tensors = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        part = next((part for part in PARTS[kind] if name.endswith(f".{part}")), None)
        if part is None:
            rest[re.sub(r"\.modules_to_save(\.default)?", "", name)] = tensor
        else:
            layers.setdefault(name.removesuffix(f".{part}"), {})[part] = tensor
    own = model.state_dict(keep_vars=True)
    for name, tensor in rest.items():
        if name not in own or (own[name].shape != tensor.shape and not tune.trains(name)):
            raise ValueError(f"the adapter in {folder} does not fit the model, which has no {name} of its shape")
    try:
        changes = {name: _change(name, kind, parts, config, model) for name, parts in layers.items()}
        model = with_changes(model, changes)
    except (ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"the adapter in {folder} does not fit the model: {error}") from None
    for name, tensor in rest.items():
        if own[name].shape == tensor.shape:
            own[name].data = tensor.to(own[name].dtype)
    return model


def read_adapter(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """Return configuration and tensors of an adapter. Raise ValueError if it is none that can be read."""
    path = folder / CONFIG
    if not path.exists():
        raise ValueError(f"{folder} has no {CONFIG}: tune.adapter is a folder that PEFT's save_pretrained has written")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind not in PARTS:
        raise ValueError(f"{path}: only adapters of the types {' and '.join(PARTS)} can be read, got {kind}")
    for key, value in REFUSED.items():
        if config.get(key, value) != value:
            raise ValueError(f"{path}: an adapter with {key} = {config[key]!r} cannot be read")
    if str(start := config.get("init_lora_weights")).lower().startswith(OTHER_BASES):
        raise ValueError(
            f"{path}: with init_lora_weights = {start!r}, the adapter belongs to a base that PEFT changes; save it as "
            "a change of the original one (path_initial_model_for_weight_conversion of save_pretrained)"
        )
    tensors = read(next((folder / name for name in FILES if (folder / name).exists()), folder / FILES[0]))
    bad = [name for name, tensor in tensors.items() if not finite(tensor)]
    if bad:
        raise ValueError(f"the adapter in {folder}: {bad[0]} has NaN or infinite entries")
    return config, tensors


def _change(
    name: str, kind: str, parts: Tensors, config: Mapping[str, Any], model: nn.Module
) -> tuple[Scheme, Factors, float]:
    """Return scheme, factors and alpha of one layer."""
    patterns = config.get("alpha_pattern") or {}
    alpha = next((patterns[key] for key in patterns if re.match(rf"(.*\.)?({key})$", name)), config[ALPHA[kind]])
    if kind == "LORA":
        a, b = (parts[part] for part in PARTS[kind])
        rank = len(a)
        alpha = alpha * math.sqrt(rank) if config.get("use_rslora") else alpha
        return ChannelSplit(rank=rank), {"u": b, "v": a}, float(alpha)
    shape = WeightShape.of(model.get_submodule(name).weight)  # type: ignore[arg-type]  # checked later
    rank, flat = len(parts["hada_w1_b"]), "hada_t1" not in parts
    factors: Factors = {}
    for side in "12":
        x, y = parts[f"hada_w{side}_a"], parts[f"hada_w{side}_b"].T
        factors |= {f"x{side}": x if flat else x.T, f"y{side}": y}
        if shape.kernel and (not flat or shape.area == 1):
            core = torch.eye(rank).view(rank, 1, rank) if flat else parts[f"hada_t{side}"].flatten(2).mT
            factors[f"t{side}"] = core
    whole = {key: factor.contiguous() for key, factor in factors.items()}
    return Hadamard(rank=rank, reshape=flat and shape.area != 1), whole, float(alpha)
