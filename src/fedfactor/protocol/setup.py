"""The setup of a run that server and clients share."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from fedfactor.models.width import Width
from fedfactor.nn import factor_weights, unfitted
from fedfactor.nn.adapt import fresh_changes, starts_of
from fedfactor.nn.frozen import Frozen, base_of
from fedfactor.nn.state import tensors_of, weights_sha256
from fedfactor.protocol.attack import Attack
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.coding import sections
from fedfactor.protocol.message import Bytes, decode
from fedfactor.protocol.method import Method, fixed_names, form_of, has_global_model
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.privacy import Privacy
from fedfactor.protocol.settings import Training
from fedfactor.protocol.states import at_hand
from fedfactor.rng import derive, one_thread, seeded
from fedfactor.task import Task


@dataclass
class Setup:
    """What server and clients of a run agree on: its task, and its settings. Networks are built once per capacity."""

    task: Task
    method: Method
    optimizer: Optimizer
    codec: Codec
    training: Training
    attack: Attack | None = None
    """What hostile clients do."""
    privacy: Privacy | None = None
    """How updates are clipped, and which noise they get."""
    _prototype: tuple[nn.Module, Tensor] | None = None
    """The task's model, if it has a frozen base, and the state of torch's generator after it was built."""
    _forms: list[Setup] = field(default_factory=list)
    _networks: dict[float, nn.Module] = field(default_factory=dict)
    _plain: dict[float, nn.Module] = field(default_factory=dict)
    _kept: dict[float, Tensors] = field(default_factory=dict)
    _trained: dict[float, frozenset[str]] = field(default_factory=dict)
    _fixed: dict[float, frozenset[str]] = field(default_factory=dict)

    def bind(self, levels: Sequence[float]) -> None:
        """Adapt the method to the task and the run's capacity levels; call this before networks are built."""
        traits, missing = self.method.traits, f"which this {self.task.kind} task does not have"
        if traits.needs_classes and not self.task.one_class_each:
            raise ValueError(f"{traits.needs_classes} needs one class per example, {missing}")
        if traits.needs_logits and not self.task.has_classes:
            raise ValueError(f"{traits.needs_logits} needs logits of classes, {missing}")
        if self.task.tune is not None and self.method.untunable:
            raise ValueError(cannot_tune(self.method))
        if self.attack and self.attack.kind == "label_flip" and not self.task.data.described:
            self.task.data.mislabelled(self.task.data.of(0))  # raises ValueError if there are no classes to flip
        self.method = self.method.bind(self.task, levels)

    def at(self, round: int) -> Setup:
        """Return the setup of a round: another one if the method has another form in that round."""
        method = form_of(self.method, round)
        if method is self.method or method == self.method:
            return self
        found = next((form for form in self._forms if form.method == method), None)
        if found is None:
            found = self.fresh(method)
            self._forms.append(found)
        return found

    def fresh(self, method: Method | None = None) -> Setup:
        """Return a setup that shares the base with this one, but has built no networks yet."""
        parts = (self.optimizer, self.codec, self.training, self.attack, self.privacy, self._prototype)
        return Setup(self.task, method or self.method, *parts)

    def attacked_by(self, client: int) -> Attack | None:
        """Return what a client does if it is hostile."""
        if self.attack and client in self.attack.hostile(self.training.seed, self.task.data.clients):
            return self.attack
        return None

    def build(self, width: float | Width = 1.0) -> nn.Module:
        """Build the task's model. If it has a frozen base, it is built once, and all copies share the base."""
        if self._prototype is None:
            with unfitted(active=False):  # a frozen base is needed with its values
                model = self.task.build(width)
            if not base_of(model):
                return model
            self._prototype = model, torch.get_rng_state()
        if width != 1.0:
            raise ValueError(
                f"{self.method.name} trains networks of other widths, but the frozen parameters of the model (its "
                "base) have one size; use a method that trains the whole model"
            )
        model, after = self._prototype
        torch.set_rng_state(after)  # so that what is drawn next does not depend on whether the model was built anew
        return copy.deepcopy(model, dict(fresh_changes(model)) if self.task.tune else None)

    @cached_property
    def base_sha256(self) -> str:
        """The SHA-256 of the frozen base: names, types, shapes and values; empty if the model has none.

        An adapter that the run starts from is part of it: methods may keep some of its factors fixed.
        """
        self.network(1.0)  # builds the model
        model = self._prototype[0] if self._prototype else None
        return weights_sha256({**base_of(model), **starts_of(model)}) if model else ""

    def network(self, capacity: float) -> nn.Module:
        """Return the network of a capacity. It is one object, which each user fills with its own tensors."""
        if capacity not in self._networks:
            with unfitted():  # its values are replaced in any case
                built = self.initial(capacity)
            self._networks[capacity] = built
            self._trained[capacity] = frozenset(name for name, p in built.named_parameters() if p.requires_grad)
            self._fixed[capacity] = frozenset(fixed_names(built))
        return self._networks[capacity]

    def move(self, network: nn.Module, total: Tensors) -> None:
        """Set the base of a network to the given one plus the sum of its moves, if the method moves it.

        Layers that the method factorises without a given base start from zeros.
        """
        if not self.method.traits.moves_base:
            return
        given = factor_weights(self._prototype[0]) if self._prototype else {}
        for name, layer in factor_weights(network).items():
            assert layer.base is not None
            base = given[name].base if name in given else None
            start = torch.zeros_like(layer.base) if base is None else base.to(layer.base.device)
            moved = total.get(f"{name}.w".removeprefix("."))
            now = start if moved is None else start + moved.to(start.device)
            layer.base = Frozen(now.to(layer.base.dtype))

    def initial(self, capacity: float) -> nn.Module:
        """Build the network of a capacity with its initial values.

        Their seed does not depend on the client, so private parts start equal on all clients.
        """
        with seeded(derive(self.training.seed, "init")), one_thread():
            built = self.method.network(self.build, capacity)
        return built.to(self.training.torch_device, self.training.torch_dtype)

    def plain(self, capacity: float) -> nn.Module:
        """Return the server's model at a capacity as a plain module to be filled: one object, like `network`."""
        if capacity not in self._plain:
            fresh = self.fresh()
            start = self.method.initial(fresh.network)
            self._plain[capacity] = self.method.deploy(start, fresh.network(capacity), capacity, {})
        return self._plain[capacity]

    @property
    def has_global_model(self) -> bool:
        """Whether the server's tensors are a complete model without a client's private tensors."""
        return has_global_model(self.method, self.network(1.0))

    def trained(self, capacity: float) -> frozenset[str]:
        """Return the names of the parameters that are trained, which codecs may change; frozen ones are left out."""
        self.network(capacity)
        return self._trained[capacity]

    def uploaded(self, capacity: float, down: Tensors) -> Tensors:
        """Return the tensors of a download that are uploaded: all but parameters that the method does not train."""
        self.network(capacity)
        return {name: tensor for name, tensor in down.items() if name not in self._fixed[capacity]}

    def kept(self, capacity: float) -> Tensors:
        """Return the initial private tensors, which clients have before they first take part."""
        if capacity not in self._kept:
            private = self.method.private_names(self.network(capacity))
            values = tensors_of(self.initial(capacity)) if private else {}
            self._kept[capacity] = {name: tensor for name, tensor in values.items() if name in private}
        return self._kept[capacity]


def cannot_tune(method: Method) -> str:
    """Return why a method cannot be used with `[tune]`."""
    return f"{method.name} cannot fine-tune a frozen base ([tune]): {method.untunable}. Use fedavg, lora or fedpara"


def kept_of(setup: Setup, state: Bytes | None, round: int) -> dict[str, Tensors]:
    """Return a client's state by section; empty if it was kept with another form of the method."""
    if not state:
        return {}
    message = decode(at_hand(state))
    same = setup.at(message.fields["round"]) is setup.at(round)
    return sections(message.tensors) if same else {}
