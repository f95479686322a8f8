"""A network with narrower networks nested inside: shared weights, separate batch statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fedfactor.nn.norms import axis_blocks
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.plan import Piece, Plan, slice_plan


class Nested(nn.Module):
    """A network with narrower ones, whose weights are the leading part of each axis of its weights.

    Calling it runs the widest network; `at` runs a narrower one. Narrower networks have no weights of their own:
    gradients flow into the weights of the widest. Their buffers, such as batch statistics, are their own.
    """

    def __init__(self, widest: nn.Module, narrower: Mapping[float, nn.Module]) -> None:
        super().__init__()
        self.widest = widest
        self.buffers_of = nn.ModuleDict({_key(width): _Buffers(network) for width, network in narrower.items()})
        # On the meta device and not registered, so that their parameters are not parameters of this module.
        self._shells = {width: _shell(widest, network) for width, network in narrower.items()}

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the outputs of the widest network."""
        return self.widest(*args, **named)

    def at(self, width: float, *args: Any, **named: Any) -> Any:
        """Return the outputs of the network of a width, or of the widest if there is none of this width."""
        if width not in self._shells:
            return self.forward(*args, **named)
        shell, pieces = self._shells[width]
        weights = dict(self.widest.named_parameters())
        values = {name: piece.take(weights[piece.source]) for name, piece in pieces.items()}
        buffers = self.buffers_of[_key(width)]
        assert isinstance(buffers, _Buffers)
        return functional_call(shell.train(self.training), {**values, **buffers.by_name()}, args, named)

    @staticmethod
    def buffer_of(width: float, name: str) -> str:
        """Return the name here of a buffer of the narrower network, or of the widest network of a narrower `Nested`."""
        return f"buffers_of.{_key(width)}.{_flat(name.removeprefix('widest.'))}"


class _Buffers(nn.Module):
    """The buffers of a network, without the network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.names = [name for name, _ in network.named_buffers()]
        lasting = network.state_dict()
        for name, buffer in network.named_buffers():
            self.register_buffer(_flat(name), buffer, persistent=name in lasting)

    def by_name(self) -> dict[str, Tensor]:
        """Return the buffers by their names in the network."""
        return {name: self.get_buffer(_flat(name)) for name in self.names}


def _shell(widest: nn.Module, network: nn.Module) -> tuple[nn.Module, Plan]:
    """Return the network on the meta device, and the position of each of its parameters in the widest network."""
    own, blocks = tensors_of(network), axis_blocks(network)
    first = {id(parameter): name for name, parameter in network.named_parameters()}
    plan = slice_plan(tensors_of(widest), {name: own[name] for name in first.values()}, blocks)
    # A weight that two modules share must be passed to both.
    everywhere = {name: first[id(p)] for name, p in network.named_parameters(remove_duplicate=False)}
    return network.to("meta"), {name: Piece(source, plan[source].index) for name, source in everywhere.items()}


def _key(width: float) -> str:
    return f"{width:g}".replace(".", "_")  # torch allows no dots in names


def _flat(name: str) -> str:
    return name.replace(".", "/")
