"""A network and narrower ones inside it: one set of weights, batch statistics for each."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.func import functional_call

from fedfactor.nn.norms import axis_blocks
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.plan import Piece, Plan, slice_plan


class Nested(nn.Module):
    """A network whose narrower selves take the leading part of every axis of its weights.

    Called like any network it is the widest one; `at` runs another. Narrower ones have no weights of their own, and
    gradients flow into those of the widest; what else they have, such as batch statistics, is theirs.
    """

    def __init__(self, widest: nn.Module, narrower: Mapping[float, nn.Module]) -> None:
        super().__init__()
        self.widest = widest
        self.buffers_of = nn.ModuleDict({_key(width): _Buffers(network) for width, network in narrower.items()})
        # Shells without numbers, and not registered: their parameters are nobody's.
        self._shells = {width: _shell(widest, network) for width, network in narrower.items()}

    def forward(self, x: Tensor) -> Tensor:
        """Run the widest network."""
        answers: Tensor = self.widest(x)
        return answers

    def at(self, width: float, x: Tensor) -> Tensor:
        """Run the network of a width; one that is not listed is the widest."""
        if width not in self._shells:
            return self.forward(x)
        shell, pieces = self._shells[width]
        weights = dict(self.widest.named_parameters())
        values = {name: piece.take(weights[piece.source]) for name, piece in pieces.items()}
        buffers = self.buffers_of[_key(width)]
        assert isinstance(buffers, _Buffers)
        answers: Tensor = functional_call(shell.train(self.training), {**values, **buffers.by_name()}, (x,))
        return answers

    @staticmethod
    def buffer_of(width: float, name: str) -> str:
        """Return under which name a narrower network's buffer, or the widest's of a narrower nest, is found here."""
        return f"buffers_of.{_key(width)}.{_flat(name.removeprefix('widest.'))}"


class _Buffers(nn.Module):
    """The buffers of a network, without it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.names = [name for name, _ in network.named_buffers()]
        lasting = network.state_dict()
        for name, buffer in network.named_buffers():
            self.register_buffer(_flat(name), buffer, persistent=name in lasting)

    def by_name(self) -> dict[str, Tensor]:
        """Return them by the names that the network has for them."""
        return {name: self.get_buffer(_flat(name)) for name in self.names}


def _shell(widest: nn.Module, network: nn.Module) -> tuple[nn.Module, Plan]:
    """Return a network without numbers, and where in the widest each of its parameters lies."""
    own, blocks = tensors_of(network), axis_blocks(network)
    first = {id(parameter): name for name, parameter in network.named_parameters()}
    plan = slice_plan(tensors_of(widest), {name: own[name] for name in first.values()}, blocks)
    # A weight that is used in two places must be given to both.
    everywhere = {name: first[id(p)] for name, p in network.named_parameters(remove_duplicate=False)}
    return network.to("meta"), {name: Piece(source, plan[source].index) for name, source in everywhere.items()}


def _key(width: float) -> str:
    return f"{width:g}".replace(".", "_")  # torch allows no dots in names


def _flat(name: str) -> str:
    return name.replace(".", "/")
