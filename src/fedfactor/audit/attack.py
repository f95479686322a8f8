"""Gradient inversion: what the attacker knows of a client, and the search for pictures with a similar gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedfactor.audit.result import AttackResult, AuditResult
from fedfactor.client.work import ready, work
from fedfactor.data.clients import FederatedData
from fedfactor.data.records import Records
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.coding import decode_down, decode_up, sections
from fedfactor.protocol.context import Context
from fedfactor.protocol.engine import Job
from fedfactor.protocol.message import Message, decode
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.privacy import protected
from fedfactor.protocol.settings import check_device_here
from fedfactor.protocol.setup import Setup, kept_of
from fedfactor.rng import derive, one_thread, seeded, torch_rng
from fedfactor.runs.directory import RunError
from fedfactor.runs.open import Run
from fedfactor.runs.tasks import task_of
from fedfactor.server.federation import Federation
from fedfactor.server.state import Server
from fedfactor.support.checks import check_choice, check_number
from fedfactor.task import like

MOMENTUM = 0.9
"""Decay of the running mean of the gradient's signs."""


class NothingToAttack(ValueError):
    """Raised if a run has no pictures or uploads nothing that depends on them."""


@dataclass(frozen=True)
class Attack:
    """Settings of an attack."""

    mode: Literal["gradient", "update"] = "gradient"
    images: int = 5
    """Pictures per client."""
    iterations: int = 1000
    restarts: int = 1
    """Number of starts, each from different noise. The result with the most similar gradient counts."""
    lr: float = 0.1
    """Size of the first steps, for colours from 0 to 1. It drops to a tenth after 3/8, 5/8 and 7/8 of the steps."""
    tv: float = 0.001
    """Weight of the total variation, relative to the cosine distance.

    The best value depends on how much detail the network preserves: 0.001 for a small CNN on digits, 1 for ResNet-8 on
    CIFAR-10, which downsamples pictures in its first layer. A weight that is too low leaves noise, one that is too high
    removes all detail.
    """
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("gradient", "update"))
        for name in ("images", "iterations", "restarts"):
            check_number(name, getattr(self, name), 1, whole=True)
        for name in ("lr", "tv"):
            check_number(name, getattr(self, name), 0)
        check_number("seed", self.seed, 0, whole=True)


@dataclass(frozen=True)
class Knowledge:
    """All that the attacker knows of one client."""

    message: Message
    """The client's download."""
    kept: dict[str, Tensors]
    """What the attacker assumes the client to hold: initial values in place of the client's private tensors."""
    seen: Tensors
    """The gradient of the uploaded weights, or the weights before training minus those after it."""
    labels: Tensor


@dataclass(frozen=True)
class Colours:
    """The range of a data set's colours, which maps colours from 0 to 1 to the network's inputs and back."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, data: FederatedData) -> Colours:
        """Return the range over all training pictures. It is a property of the data format, not of a client."""
        if isinstance(data.train, Records):
            raise NothingToAttack("the attack recovers pictures that are stored as tensors; this run reads datasets")
        stored = data.train[0]
        if stored.dim() != 4 or stored.shape[1] not in (1, 3):
            raise NothingToAttack(
                "the attack recovers grey or colour pictures of shape (examples, 1 or 3 channels, height, width); the "
                f"inputs of this run have the shape {list(stored.shape)}"
            )
        ends = torch.stack([stored.min(), stored.max()]).view(2, 1, 1, 1)
        low, high = data.transform.test(ends.expand(2, *stored.shape[1:]).contiguous())
        return cls(low, high)

    def inputs(self, pictures: Tensor) -> Tensor:
        """Convert pictures to inputs of the network."""
        low, high = self.low.to(pictures), self.high.to(pictures)
        return low + pictures * (high - low)

    def pictures(self, inputs: Tensor) -> Tensor:
        """Convert inputs of the network to pictures."""
        return (inputs - self.low) / (self.high - self.low)


def total_variation(pictures: Tensor) -> Tensor:
    """Return the mean absolute difference of vertical neighbours plus that of horizontal neighbours."""
    return pictures.diff(dim=-2).abs().mean() + pictures.diff(dim=-1).abs().mean()


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """Return 1 - cosine similarity over all tensors together, which ignores the length of the gradients."""
    a, b = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (found, wanted))
    return 1 - F.cosine_similarity(a, b, dim=0, eps=1e-20)


def uploaded_weights(setup: Setup, message: Message) -> list[str]:
    """Return the names of the trained weights that a client uploads in reply to a message."""
    setup, capacity = setup.at(message.fields["round"]), message.fields["capacity"]
    network, trained = setup.network(capacity), setup.trained(capacity)
    down = decode_down(setup.codec, trained, sections(message.tensors).get("model", {}))
    private = setup.method.private_names(network)
    return [name for name in tensors_of(network) if name in down and name in trained and name not in private]


def gradient(
    setup: Setup, network: nn.Module, ctx: Context, batch: tuple[Tensor, Tensor], names: Sequence[str], further: bool
) -> list[Tensor]:
    """Return the gradient of the method's loss on one batch. `further`: the gradient itself can be differentiated."""
    parameters = dict(network.named_parameters())
    loss, weights = setup.method.objective(network, batch, ctx), [parameters[name] for name in names]
    return list(torch.autograd.grad(loss, weights, create_graph=further, materialize_grads=True))


def observe(setup: Setup, job: Job, attack: Attack, inputs: Tensor, targets: Tensor) -> Knowledge:
    """Do the client's work and return what the attacker learns. `inputs` and `targets` are the pictures to recover."""
    message = decode(job.message)
    client, round, capacity = (message.fields[key] for key in ("client", "round", "capacity"))
    names, own = uploaded_weights(setup, message), kept_of(setup, job.state, round)
    reply = work(setup, job.message, job.state)[0] if attack.mode == "update" else None
    setup = setup.at(round)
    start = setup.kept(capacity)
    kept = {name: start.get(name, tensor) for name, tensor in own.get("kept", {}).items()}
    guess = {"kept": kept, "moved": own.get("moved", {})}  # the server knows how far the base has moved
    if reply is not None:
        network, ctx = ready(setup, message, guess, (inputs, targets))
        coded = sections(decode(reply).tensors)["model"]
        after = decode_up(setup.codec, setup.trained(capacity), coded, ctx.down)
        before = tensors_of(network)
        seen = {name: before[name] - after[name].to(before[name]) for name in names}
    else:
        network, ctx = ready(setup, message, own, setup.task.data.of(client))
        network.train()
        first = next(network.parameters())
        with seeded(derive(setup.training.seed, "train", round, client), first.device):
            batch = like(inputs, first), targets.to(first.device)
            seen = dict(zip(names, gradient(setup, network, ctx, batch, names, False), strict=True))
        if setup.privacy and setup.privacy.where == "client":
            nothing = {name: torch.zeros_like(tensor) for name, tensor in seen.items()}
            noise_seed = derive(attack.seed, "audit-privacy", round, client)  # not the run's: the attacker knows that
            seen = protected(seen, nothing, frozenset(names), setup.privacy, noise_seed)
    return Knowledge(message, guess, seen, targets)


def reconstruct(
    setup: Setup, known: Knowledge, attack: Attack, colours: Colours, on_iteration: Callable[[], None] = lambda: None
) -> tuple[Tensor, float]:
    """Search for the pictures. Return the best ones, with colours from 0 to 1, and the distance of their gradient."""
    setup = setup.at(known.message.fields["round"])
    network, ctx = ready(setup, known.message, known.kept, (known.labels, known.labels))
    network.train()
    first, names, wanted = next(network.parameters()), list(known.seen), list(known.seen.values())
    labels = known.labels.to(first.device)
    shape = (len(labels), *colours.low.shape)

    def off(pictures: Tensor, further: bool) -> Tensor:
        batch = like(colours.inputs(pictures), first), labels
        return distance(gradient(setup, network, ctx, batch, names, further), wanted)

    best: tuple[Tensor, float] | None = None
    with seeded(derive(attack.seed, "audit", ctx.round, ctx.client), first.device):
        for restart in range(attack.restarts):
            rng = torch_rng(attack.seed, f"audit-noise-{restart}", ctx.round, ctx.client)
            pictures = torch.rand(shape, generator=rng).to(first.device)
            mean = torch.zeros_like(pictures)
            for step in range(attack.iterations):
                pictures.requires_grad_()
                cost = off(pictures, True) + attack.tv * total_variation(pictures)
                (slope,) = torch.autograd.grad(cost, pictures)
                # Adam on signs. The mean of their squares is 1, so the step is the mean of the signs.
                mean = MOMENTUM * mean + (1 - MOMENTUM) * slope.sign()
                rate = attack.lr * 0.1 ** sum(8 * step >= eighths * attack.iterations for eighths in (3, 5, 7))
                moved = pictures.detach() - rate * mean / (1 - MOMENTUM ** (step + 1))
                pictures = moved.clamp(0, 1)
                on_iteration()
            score = float(off(pictures, False))
            if best is None or score < best[1]:
                best = pictures.cpu(), score
    assert best is not None  # restarts >= 1
    return best


def matched(pictures: Tensor, labels: Tensor, originals: Tensor, their_labels: Tensor) -> list[int]:
    """Return the index of the original for each picture: of the same label, closest pairs first, each original once.

    The order of pictures with the same label is unknown, because it does not change the gradient.
    """
    apart = torch.cdist(pictures.flatten(1).double(), originals.flatten(1).double())
    apart[labels[:, None] != their_labels[None, :]] = torch.inf
    found: dict[int, int] = {}
    while len(found) < len(pictures):
        picture, original = divmod(int(apart.argmin()), len(originals))
        found[picture] = original
        apart[picture], apart[:, original] = torch.inf, torch.inf
    return [found[picture] for picture in range(len(pictures))]


def audit(
    directory: Path | str,
    attack: Attack | None = None,
    *,
    rounds: Sequence[int] = (),
    clients: int = 20,
    data_dir: Path | str | None = None,
    device: str = "cpu",
    on_start: Callable[[int], None] = lambda iterations: None,
    on_iteration: Callable[[], None] = lambda: None,
    on_attack: Callable[[AttackResult], None] = lambda result: None,
) -> AuditResult:
    """Attack the clients of a run.

    Args:
        directory: The run directory.
        attack: Settings of the attack.
        rounds: Rounds to attack, among those that the recipe lists as `run.keep_rounds`. Default: all of them.
        clients: How many clients to attack, from the first one on.
        data_dir: Where the data sets are.
        device: Where to compute.
        on_start: Called once with the total number of iterations.
        on_iteration: Called after each iteration.
        on_attack: Called with each result.

    Raises:
        RunError: If the run has kept no round, or not the requested one.
        NothingToAttack: If the data are not pictures, or the method uploads no trained weight.
    """
    attack, run = attack or Attack(), Run(directory)
    check_number("clients", clients, 1, whole=True)
    check_device_here(device)
    if not run.kept:
        raise RunError(
            f"{directory} has kept no round to attack: repeat the run with run.keep_rounds, for example "
            "--set run.keep_rounds=[10,20,30,40,50]"
        )
    kept = [Run(directory, round) for round in rounds or run.kept]  # raises RunError for a round that was not kept
    task, _ = task_of(run.recipe, data_dir)
    colours = Colours.of(task.data)
    chosen = range(min(clients, task.data.clients))
    on_start(len(kept) * len(chosen) * attack.restarts * attack.iterations)
    found: list[AttackResult] = []
    with one_thread():
        for one in kept:
            state = one.rebuilt(task, device)
            for result in attack_clients(state.federation, state.server, chosen, attack, colours, on_iteration):
                found.append(result)
                on_attack(result)
    return AuditResult(str(directory), str(run.recipe.method), asdict(attack), found)


def attack_clients(
    federation: Federation,
    server: Server,
    clients: Sequence[int],
    attack: Attack,
    colours: Colours,
    on_iteration: Callable[[], None] = lambda: None,
) -> Iterator[AttackResult]:
    """Attack what clients would upload in the next round."""
    setup, now, data = federation.setup, federation.setup.at(server.round), federation.setup.task.data
    asked = [federation.dispatch.participant(client, server.round) for client in clients]
    networks = {who.capacity: now.network(who.capacity) for who in asked}
    view = now.method.prepare(server.tensors, networks, training=True)
    for job in federation.dispatch.jobs("train", server, view, asked, federation.store):
        if not uploaded_weights(setup, decode(job.message)):
            raise NothingToAttack(f"{setup.method.name} uploads no trained weight, so there is nothing to attack")
        examples = data.of(job.client)
        assert isinstance(examples, tuple)  # `Colours.of` refuses others
        stored, targets = examples
        own = colours.pictures(data.transform.test(stored).float())
        rng = torch_rng(attack.seed, "audit-images", client=job.client)  # the same pictures in all rounds
        where = torch.randperm(len(targets), generator=rng)[: attack.images]
        labels = targets[where]
        observed = observe(setup, job, attack, data.transform.test(stored[where]), labels)
        pictures, off = reconstruct(setup, observed, attack, colours, on_iteration)
        if attack.mode == "gradient":
            own, targets = own[where], labels
        originals = own[matched(pictures, labels, own, targets)]
        yield AttackResult(server.round, job.client, labels.tolist(), originals, pictures, off)
