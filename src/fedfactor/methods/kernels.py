"""The fold of methods whose clients train principal kernels of the server's dense layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from fedfactor.factor import ChannelSplit
from fedfactor.factor.base import WeightShape
from fedfactor.methods.composing import factors_of, product
from fedfactor.protocol.plan import Held, HoldersMean, Piece, Plan, Reply, Tensors


class KernelMean(HoldersMean):
    """The mean of PriSM's U' and V', element by element, composed at the end."""

    def __init__(
        self, server: Tensors, view: Tensors, weight: Callable[[Reply], float], layers: Mapping[str, str]
    ) -> None:
        super().__init__(view, weight)
        self._server, self._layers = server, layers
        self.picks: dict[str, list[int]] = {}
        """The number of clients that trained each kernel, by layer; known after `result`."""

    def changes(self, reply: Reply) -> Iterator[tuple[Piece, Tensor]]:
        """Yield the composed changes of layers, and the changes of all other tensors."""
        places = self.places(reply.plan, reply.capacity)
        for layer in self._layers:
            both = (reply.tensors, reply.reference)
            new, old = (product(tensors[f"{layer}.u"], tensors[f"{layer}.v"]) for tensors in both)
            yield next(places), new - old
        for name in sorted(reply.tensors.keys() - factors_of(self._layers)):
            yield reply.plan[name], reply.change(name)

    def places(self, plan: Plan, capacity: float) -> Iterator[Piece]:
        """Yield the positions of composed layers, and of all other tensors."""
        for layer, name in self._layers.items():
            u, v = (plan[f"{layer}.{factor}"].index for factor in "uv")
            yield Piece(name, (u[0], *v[1:]) if u else ())
        yield from (plan[name] for name in sorted(plan.keys() - factors_of(self._layers)))

    def result(self) -> tuple[Tensors, Held]:
        """Add the change of the composed kernels to the server's weights."""
        mean, held = super().result()
        for layer, name in self._layers.items():
            shape = WeightShape.of(self._server[name])
            before, after = (
                ChannelSplit().compose({factor: tensors[f"{layer}.{factor}"] for factor in "uv"}, shape)
                for tensors in (self.view, mean)
            )
            mean[name] = mean[name] + (after - before)  # one of them has changed: see `changes`
            u, v = held[f"{layer}.u"], held[f"{layer}.v"]
            held[name] = held[name] + _reached(u, v)
            kernels = len(self.view[f"{layer}.v"])
            # A client that has a kernel has it for the first input.
            self.picks[layer] = v.flatten(1)[:, 0].int().tolist() if isinstance(v, Tensor) else [round(v)] * kernels
        return {name: mean[name] for name in self._server}, {name: held[name] for name in self._server}


def _reached(u: Tensor | float, v: Tensor | float) -> Tensor | float:
    """Return how many clients could change each entry of U V, through its row of U or its column of V."""
    if not (isinstance(u, Tensor) and isinstance(v, Tensor)):  # all held the whole tensor
        return max(int(part.max() if isinstance(part, Tensor) else part) for part in (u, v))
    rows, columns = u.amax(1), v.amax(0, keepdim=True)
    return torch.maximum(rows.reshape(len(rows), *[1] * (columns.dim() - 1)), columns)
