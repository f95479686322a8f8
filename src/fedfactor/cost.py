"""What a model costs: parameters, multiply-accumulates, activation memory, bytes and seconds on a link.

Nothing is estimated from layer types. A copy of the model runs on the meta device, where tensors have shapes
but no numbers, and every matrix product it makes is counted; so factorised layers, and any other torch code,
count as what they really do. A model that looks at its numbers, as in `if x.max() > 1`, runs on the CPU instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fedfactor.meta import result
from fedfactor.rng import seeded

aten = torch.ops.aten

MIB = 2**20
TRAINING = 3
"""Operations of a training step per operation of its forward pass: the backward pass has two products for each."""


@dataclass(frozen=True)
class LayerCost:
    """One module's own share: its children's are rows of their own.

    `outputs` counts the elements of the module's (first) output over all calls.
    """

    name: str
    kind: str
    parameters: int
    macs: int
    outputs: int


@dataclass(frozen=True)
class Cost:
    """The cost of one forward pass, of what it keeps for the backward pass, and of the model itself.

    `parameters`, `trainable` and `buffers` count elements, a tensor used in two places once. `activations`
    counts the elements, `activation_bytes` the bytes of all that autograd saves for the backward pass, except
    parameters and buffers: inputs, intermediate results, composed weights, masks, pooling indices. A storage
    that several operations save is counted once and as a whole, since it is kept as a whole.
    """

    parameters: int
    trainable: int
    buffers: int
    macs: int
    activations: int
    activation_bytes: int
    layers: tuple[LayerCost, ...]

    def __rich__(self) -> Table:
        return table(self)


class Uncountable(RuntimeError):
    """The model can process the example, but its operations cannot be counted."""


def measure(model: nn.Module, example: Any) -> Cost:
    """Count what one forward pass of `model` on `example` costs; neither is changed.

    Nothing is computed, unless the model looks at its numbers. Raise Uncountable if only the counting fails.

    `example` is an input with its batch axis, a tuple of inputs, or a mapping of inputs by name; all but
    `parameters`, `trainable` and `buffers` grow with its batch. The model is measured in the mode it is in, as
    train() and eval() save different tensors. Matrix products and convolutions are counted; element-wise
    operations are not.

    Attention and recurrent layers are counted as the products they are defined by. A fused kernel of a device
    makes the same products but may save fewer tensors, or a workspace of its own.
    """
    trace = _trace(model, example)
    owners: set[int] = set()
    layers = []
    for name, module in model.named_modules():
        # A tied parameter belongs to the first of its owners, so that the rows add up to the total.
        own = {id(p): p.numel() for p in module.parameters(recurse=False) if id(p) not in owners}
        owners.update(own)
        seen = trace.modules[name]
        if own or seen.macs or (seen.outputs and not any(True for _ in module.children())):
            row = LayerCost(name, type(module).__name__, sum(own.values()), seen.macs, seen.outputs)
            layers.append(row)
    parameters = list(model.parameters())
    return Cost(
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        buffers=sum(b.numel() for b in model.buffers()),
        macs=sum(row.macs for row in layers),
        activations=trace.saved_elements,
        activation_bytes=trace.saved_bytes,
        layers=tuple(layers),
    )


def ptflops_macs(model: nn.Module, example: Any) -> int:
    """Count operations as FedHM's Table 8 does, which is the way of the tool ptflops.

    To the multiply-accumulates of all layers it adds one an output for a bias, two an element for batch
    normalisation (one if it has no affine part), one an element for ReLU and its kin, and one an input
    element for pooling. Other element-wise work, the addition of residual branches say, costs nothing.

    ResNet-18, 10 classes, 32 x 32: 557.22 M, of which 555.42 M are multiply-accumulates.
    """
    modules = dict(model.named_modules())
    return sum(seen.macs + _extras(modules[name], seen) for name, seen in _trace(model, example).modules.items())


def wire_bytes(content: nn.Module | Mapping[str, Tensor] | Iterable[Tensor], dtype: torch.dtype = torch.float32) -> int:
    """Count the bytes of a model's or of some tensors' elements, floating-point ones sent as `dtype`.

    Integers are sent as they are, and so do a model's (persistent) buffers: rounding running statistics saves
    little and can break a model. Names, shapes and framing are not counted: only an encoded message has them.
    """
    if isinstance(content, nn.Module):
        parameters = {id(p) for p in content.parameters()}
        state = {id(t): t for t in content.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
        buffers = sum(t.nbytes for i, t in state.items() if i not in parameters)
        return buffers + wire_bytes(content.parameters(), dtype)
    tensors = content.values() if isinstance(content, Mapping) else content
    width: int = dtype.itemsize
    return sum(t.numel() * (width if t.is_floating_point() else t.element_size()) for t in tensors)


def link_seconds(size: float, mbps: float, transfers: int = 2) -> float:
    """Return the seconds `size` bytes take on a link, down and up, by FedPara's rule (D.1, Table 7).

    The rule is t = 2 x model size (Mbyte) / network speed (Mbyte/s), where the table's sizes are in MiB (2^20
    bytes) and its n Mbps are n/8 MiB per second. FedPara's VGG16 of 1.547 M parameters then takes 47.2, 9.44
    and 1.888 s at 2, 10 and 50 Mbps (printed 47.2, 9.44, 1.88), the original one 465.5, 93.10 and 18.620 s
    (printed 470.2, 94.04, 18.61). 18.61 is this rule for 15.25 M parameters, truncated; 470.2 and 94.04 fit
    no rule that gives the other cells.
    """
    if mbps <= 0:
        raise ValueError(f"mbps must be greater than 0, got {mbps:g}")
    return transfers * (size / MIB) / (mbps / 8)


def table(cost: Cost) -> Table:
    """Lay a cost out as a table for `rich.print`, one row per layer and the totals below."""
    caption = (
        f"trainable {cost.trainable:,}, buffers {cost.buffers:,}; "
        f"saved for backward {cost.activations:,} elements, {cost.activation_bytes / MIB:,.2f} MiB"
    )
    view = Table(caption=caption, show_footer=True)
    view.add_column("layer", "total")
    view.add_column("kind")
    view.add_column("parameters", f"{cost.parameters:,}", justify="right")
    view.add_column("MACs", f"{cost.macs:,}", justify="right")
    view.add_column("outputs", justify="right")
    for row in cost.layers:
        counts = (f"{n:,}" if n else "" for n in (row.parameters, row.macs, row.outputs))
        view.add_row(row.name or "(model)", row.kind, *counts)
    return view


@dataclass
class _Seen:
    """What passed through one module."""

    macs: int = 0
    inputs: int = 0
    outputs: int = 0


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products, and adds them to the innermost module that is running."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = {name: _Seen() for name, _ in model.named_modules()}
        self.saved_elements = 0
        self.saved_bytes = 0
        self._running: list[_Seen] = []
        # Held, not only noted: the id of a freed storage would be given to another one.
        self._storages = {s._cdata: s for s in map(Tensor.untyped_storage, [*model.parameters(), *model.buffers()])}
        for name, module in model.named_modules():
            self._watch(self.modules[name], module)

    def save(self, tensor: Tensor) -> None:
        """Note a tensor that autograd wants to keep."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage
            self.saved_bytes += storage.nbytes()
            self.saved_elements += storage.nbytes() // tensor.element_size()

    def _watch(self, seen: _Seen, module: nn.Module) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(seen)
            seen.inputs += _first_numel((args, kwargs))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._running.pop()
            seen.outputs += _first_numel(output)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to import its compiler in order to exclude this class from it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = getattr(func, "overloadpacket", None)
        output = result(operation, args, kwargs or {})
        if output is None:
            output = func(*args, **(kwargs or {}))
        rule = _PRODUCTS.get(operation)
        if rule is not None and self._running:
            self._running[-1].macs += rule(args, output)
        return output


def _trace(model: nn.Module, example: Any) -> _Trace:
    # Autograd saves nothing in inference mode, and refuses tensors made there.
    with torch.inference_mode(False), torch.enable_grad():
        try:
            return _run(_meta_copy(model), tree_map_only(Tensor, _meta_tensor, example))
        except Exception:
            return _real_trace(model, example)


def _real_trace(model: nn.Module, example: Any) -> _Trace:
    """Count on the CPU with numbers. Raise Uncountable if that fails, or what the model raises if it cannot run."""
    try:
        with seeded(0):
            return _run(copy.deepcopy(model).cpu(), tree_map_only(Tensor, Tensor.cpu, example))
    except Exception as error:
        was_training = model.training
        try:
            with torch.no_grad():
                _call(model.eval(), example)
        finally:
            model.train(was_training)
        raise Uncountable(f"the model's operations cannot be counted: {error}") from error


def _run(meta: nn.Module, inputs: Any) -> _Trace:
    trace = _Trace(meta)
    with (
        # Fused attention is one opaque operation; by its definition it is products that can be counted.
        sdpa_kernel(SDPBackend.MATH),
        torch.autograd.graph.saved_tensors_hooks(trace.save, _no_backward),
        trace,
    ):
        _call(meta, inputs)
    return trace


def _call(model: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        model(**inputs)
    elif isinstance(inputs, tuple):
        model(*inputs)
    else:
        model(inputs)


def _meta_copy(model: nn.Module) -> nn.Module:
    # Telling deepcopy that the tensors are copied already saves their memory, and keeps tied ones tied.
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_meta_tensor(parameter), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _meta_tensor(buffer)
    return copy.deepcopy(model, memo)


def _meta_tensor(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _no_backward(packed: None) -> Tensor:
    raise RuntimeError("a cost measurement has no backward pass")


def _first_numel(tree: Any) -> int:
    return next((leaf.numel() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)), 0)


def _convolution(args: Any, output: Tensor) -> int:
    x, weight, transposed = args[0], args[1], args[6]
    # Every output sums over one kernel; of a transposed convolution, every input is spread over one.
    return int((x if transposed else output).numel() * weight[0].numel())


_PRODUCTS: dict[Any, Callable[[Any, Any], int]] = {
    aten.mm: lambda args, _: args[0].numel() * args[1].shape[-1],
    aten.bmm: lambda args, _: args[0].numel() * args[1].shape[-1],
    aten.addmm: lambda args, _: args[1].numel() * args[2].shape[-1],
    aten.baddbmm: lambda args, _: args[1].numel() * args[2].shape[-1],
    aten.addbmm: lambda args, _: args[1].numel() * args[2].shape[-1],
    aten.mv: lambda args, _: args[0].numel(),
    aten.addmv: lambda args, _: args[1].numel(),
    aten.dot: lambda args, _: args[0].numel(),
    aten.convolution: _convolution,
    # The LSTM of the CPU; its input is time x batch x features.
    aten.mkldnn_rnn_layer: lambda args, _: args[0].shape[:2].numel() * (args[1].numel() + args[2].numel()),
}


_POOLING = (
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
)
_RECTIFIERS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU)


def _extras(module: nn.Module, seen: _Seen) -> int:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return seen.inputs * (2 if module.affine else 1)
    if isinstance(module, _RECTIFIERS):
        return seen.outputs
    if isinstance(module, _POOLING):
        return seen.inputs
    return seen.outputs if seen.macs and isinstance(getattr(module, "bias", None), Tensor) else 0
