"""What server and clients of a run agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from fedfactor.nn.state import tensors_of
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.coding import sections
from fedfactor.protocol.message import Bytes, decode
from fedfactor.protocol.method import Method, form_of, has_global_model
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.settings import Training
from fedfactor.protocol.states import at_hand
from fedfactor.rng import derive, seeded
from fedfactor.task import Task


@dataclass
class Setup:
    """What server and clients of a run agree on; networks are built once a capacity and refilled."""

    task: Task
    method: Method
    optimizer: Optimizer
    codec: Codec
    training: Training
    _forms: list[Setup] = field(default_factory=list)
    _networks: dict[float, nn.Module] = field(default_factory=dict)
    _kept: dict[float, Tensors] = field(default_factory=dict)
    _trained: dict[float, frozenset[str]] = field(default_factory=dict)

    def bind(self, levels: Sequence[float]) -> None:
        """Fit the method to the task and the run's capacity levels; before anything is built."""
        self.method = self.method.bind(self.task, levels)

    def at(self, round: int) -> Setup:
        """Return the setup as it is in a round: another one where the method has another form then."""
        method = form_of(self.method, round)
        if method == self.method:
            return self
        found = next((form for form in self._forms if form.method == method), None)
        if found is None:
            found = Setup(self.task, method, self.optimizer, self.codec, self.training)
            self._forms.append(found)
        return found

    def network(self, capacity: float) -> nn.Module:
        """Return the network of a capacity: one object, refilled by whoever uses it.

        The seed of its first values has no client in it, so private parts start equal everywhere.
        """
        if capacity not in self._networks:
            with seeded(derive(self.training.seed, "init")):
                built = self.method.network(self.task.build, capacity)
            built = built.to(self.training.torch_device, self.training.torch_dtype)
            self._networks[capacity] = built
            self._trained[capacity] = frozenset(name for name, p in built.named_parameters() if p.requires_grad)
            private = self.method.private_names(built)
            self._kept[capacity] = {name: t.clone() for name, t in tensors_of(built).items() if name in private}
        return self._networks[capacity]

    @property
    def has_global_model(self) -> bool:
        """Whether the server's tensors make a model without what a client keeps."""
        return has_global_model(self.method, self.network(1.0))

    def trained(self, capacity: float) -> frozenset[str]:
        """Return the names of the parameters that the model's author did not freeze: what codecs may change."""
        self.network(capacity)
        return self._trained[capacity]

    def kept(self, capacity: float) -> Tensors:
        """Return what a client that never took part holds: private tensors as they start."""
        self.network(capacity)
        return self._kept[capacity]


def kept_of(setup: Setup, state: Bytes | None, round: int) -> dict[str, Tensors]:
    """Read what a client kept, by section; what it kept of another form of the method is of no use any more."""
    if not state:
        return {}
    message = decode(at_hand(state))
    same = setup.at(message.fields["round"]) is setup.at(round)
    return sections(message.tensors) if same else {}
