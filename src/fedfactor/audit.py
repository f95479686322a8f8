"""How much of a client's pictures is in what it uploads: gradients are matched until pictures appear.

The attack is deep leakage from gradients as FedDecomp's Section 4.6 uses it: pictures are changed, step by step, until
the gradient that they cause is like the one that was seen. Likeness is the cosine over all seen tensors together, the
prior is total variation, steps follow the sign of the slope, and pictures are held to the range of colours. This
follows the published code of Geiping et al. (arXiv:2003.14053; its README, `reconstruction_algorithms.py` and what it
is called with were read, of the paper the abstract). FedDecomp says no more of its attack, so steps, rate and prior are
settings here. By default that code takes 4,000 steps and gives total variation a weight of 0.0001 over normalised
pictures, which for CIFAR-10 is 0.0004 over colours from 0 to 1.

Who the attacker is: the server, or whoever reads its traffic. It knows the recipe with its seed, what the client was
sent, the shared part of what came back, how many pictures there are and their labels. (The paper is silent on labels;
of few pictures they can be found from a gradient, and an audit should err on the attacker's side.) It does not know:

- private tensors: it takes them as the network starts them, which is the same on all clients and follows from the seed;
- how many examples of each class the client has (FedRoD): it takes the counts of the labels that it knows;
- random numbers that the client drew in training: it draws its own.

What a client keeps that is not private (FedAMP's and pFedSD's last model) it has uploaded before, so that is known.
Uploaded norm statistics, which could sharpen the attack, are not used. Where a loss has a teacher (pFedSD, FedHM), how
its answer changes with a picture is left out of the slope.

A kept round N is the state after N rounds; what is attacked is what each client would upload next:

- `gradient`, the paper's: the gradient of the shared weights on a few of its pictures, as in training (batch norms use
  the batch), but without augmentation, at the tensors with which the next round begins;
- `update`: what it would really upload, after all its epochs on all its data through optimizer and codec. The change is
  taken for one large gradient of the few pictures; a recovered picture is compared with all the client's pictures of
  its class, and the nearest counts.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedfactor.checks import check_choice, check_number
from fedfactor.client.work import ready, work
from fedfactor.data.clients import FederatedData
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.coding import decode_down, decode_up, sections
from fedfactor.protocol.context import Context
from fedfactor.protocol.engine import Job
from fedfactor.protocol.message import Message, decode
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.settings import check_device_here
from fedfactor.protocol.setup import Setup, kept_of
from fedfactor.rng import derive, seeded, torch_rng
from fedfactor.runs.directory import RunError
from fedfactor.runs.open import Run
from fedfactor.runs.tasks import task_of
from fedfactor.server.federation import Federation
from fedfactor.server.state import Server
from fedfactor.task import like

LEAST_ERROR = 1e-12
"""Squared error a pixel below which pictures count as the same: 120 dB."""
MEMORY = 0.9
"""Share of the past in the mean of the signs of slopes."""


class NothingToAttack(ValueError):
    """A run that gives an attacker of pictures nothing."""


@dataclass(frozen=True)
class Attack:
    """How pictures are looked for."""

    mode: Literal["gradient", "update"] = "gradient"
    images: int = 5
    """Pictures a client."""
    iterations: int = 1000
    restarts: int = 1
    """Starts from other noise; the one whose gradient is most like what was seen counts."""
    lr: float = 0.1
    """Size of the first steps, the range of colours being 1; a tenth after 3/8, 5/8 and 7/8 of the steps each."""
    tv: float = 0.001
    """Weight of total variation beside the cosine distance.

    How much is best depends on how much the network lets through: a small CNN on digits 0.001, ResNet-8 on CIFAR-10,
    whose stem shrinks pictures at once, 1; the wrong one of the two leaves noise, or smooths everything away.
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
class Known:
    """All that the attacker has of one client."""

    message: Message
    """What the client was sent."""
    kept: dict[str, Tensors]
    """What it is taken to hold: no private tensor of its own."""
    seen: Tensors
    """The gradient, or the change downhill, of the weights that it uploads."""
    labels: Tensor


@dataclass(frozen=True)
class Colours:
    """The range of colours of a data set, as stored, and the map between it (0 to 1) and a network's inputs."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, data: FederatedData) -> Colours:
        """Find the range over all training pictures: a fact of the format, not of a client."""
        stored = data.train[0]
        if stored.dim() != 4 or stored.shape[1] not in (1, 3):
            raise NothingToAttack(
                "the attack looks for grey or coloured pictures (examples, 1 or 3 channels, height, width); this run's "
                f"inputs are {list(stored.shape)}"
            )
        ends = torch.stack([stored.min(), stored.max()]).view(2, 1, 1, 1)
        low, high = data.transform.test(ends.expand(2, *stored.shape[1:]).contiguous())
        return cls(low, high)

    def inputs(self, pictures: Tensor) -> Tensor:
        """Normalise pictures for a network."""
        low, high = self.low.to(pictures), self.high.to(pictures)
        return low + pictures * (high - low)

    def pictures(self, inputs: Tensor) -> Tensor:
        """Undo the normalisation."""
        return (inputs - self.low) / (self.high - self.low)


def psnr(picture: Tensor, original: Tensor) -> float:
    """Return -10 log10(||x - x*||^2 / (m n)) of pictures (channels, m, n) with colours from 0 to 1, in dB (Sec. 4.6).

    The sum runs over the channels too but is divided by pixels, as the paper writes it: of three channels this is 4.8
    dB less than the PSNR of the mean squared error.
    """
    error = (picture.double() - original.double()).square().sum() / original[0].numel()
    return float(-10 * error.clamp(min=LEAST_ERROR).log10())


def total_variation(pictures: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbours, down plus across."""
    return pictures.diff(dim=-2).abs().mean() + pictures.diff(dim=-1).abs().mean()


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """Return 1 - cosine of all tensors together: blind to how long a gradient is."""
    a, b = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (found, wanted))
    return 1 - F.cosine_similarity(a, b, dim=0, eps=1e-20)


def uploaded_weights(setup: Setup, message: Message) -> list[str]:
    """Return the names of the trained weights that a client sends back for a job."""
    setup, capacity = setup.at(message.fields["round"]), message.fields["capacity"]
    network, trained = setup.network(capacity), setup.trained(capacity)
    down = decode_down(setup.codec, trained, sections(message.tensors).get("model", {}))
    private = setup.method.private_names(network)
    return [name for name in tensors_of(network) if name in down and name in trained and name not in private]


def gradient(
    setup: Setup, network: nn.Module, ctx: Context, batch: tuple[Tensor, Tensor], names: Sequence[str], further: bool
) -> list[Tensor]:
    """Differentiate the method's loss on one batch; `further`: the gradient can be differentiated too."""
    parameters = dict(network.named_parameters())
    loss = setup.method.objective(network, batch, ctx)
    of = [parameters[name] for name in names]
    return list(torch.autograd.grad(loss, of, create_graph=further, materialize_grads=True))


def known(setup: Setup, job: Job, attack: Attack, inputs: Tensor, targets: Tensor) -> Known:
    """Let the client do its part and return what the attacker gets of it; `inputs` are the pictures it is after."""
    message = decode(job.message)
    client, round, capacity = (message.fields[key] for key in ("client", "round", "capacity"))
    names, own = uploaded_weights(setup, message), kept_of(setup, job.state, round)
    reply = work(setup, job.message, job.state)[0] if attack.mode == "update" else None
    setup = setup.at(round)
    start = setup.kept(capacity)
    kept = {name: start.get(name, tensor) for name, tensor in own.get("kept", {}).items()}
    if reply is not None:
        network, ctx = ready(setup, message, {"kept": kept}, targets)
        coded = sections(decode(reply).tensors)["model"]
        after = decode_up(setup.codec, setup.trained(capacity), coded, ctx.down)
        before = tensors_of(network)
        seen = {name: before[name] - after[name].to(before[name]) for name in names}
    else:
        network, ctx = ready(setup, message, own, setup.task.data.of(client)[1])
        network.train()
        first = next(network.parameters())
        with seeded(derive(setup.training.seed, "train", round, client), first.device):
            batch = like(inputs, first), targets.to(first.device)
            seen = dict(zip(names, gradient(setup, network, ctx, batch, names, False), strict=True))
    return Known(message, {"kept": kept}, seen, targets)


def reconstruct(
    setup: Setup, known: Known, attack: Attack, colours: Colours, on_iteration: Callable[[], None] = lambda: None
) -> tuple[Tensor, float]:
    """Look for the pictures; return the best found, colours from 0 to 1, and how far off their gradient is."""
    setup = setup.at(known.message.fields["round"])
    network, ctx = ready(setup, known.message, known.kept, known.labels)
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
                # Adam on signs: the mean of their squares is 1, so the mean of the signs is the whole step.
                mean = MEMORY * mean + (1 - MEMORY) * slope.sign()
                rate = attack.lr * 0.1 ** sum(8 * step >= eighths * attack.iterations for eighths in (3, 5, 7))
                moved = pictures.detach() - rate * mean / (1 - MEMORY ** (step + 1))
                pictures = moved.clamp(0, 1)
                on_iteration()
            score = float(off(pictures, False))
            if best is None or score < best[1]:
                best = pictures.cpu(), score
    assert best is not None  # there is at least one start
    return best


def matched(pictures: Tensor, labels: Tensor, originals: Tensor, their_labels: Tensor) -> list[int]:
    """Say which original each picture is: of its label, closest pairs first, every original once.

    A gradient is the same in whatever order pictures of one label come.
    """
    apart = torch.cdist(pictures.flatten(1).double(), originals.flatten(1).double())
    apart[labels[:, None] != their_labels[None, :]] = torch.inf
    found: dict[int, int] = {}
    while len(found) < len(pictures):
        picture, original = divmod(int(apart.argmin()), len(originals))
        found[picture] = original
        apart[picture], apart[:, original] = torch.inf, torch.inf
    return [found[picture] for picture in range(len(pictures))]


@dataclass(frozen=True)
class Attacked:
    """What came out for one client in one round."""

    round: int
    client: int
    labels: list[int]
    originals: Tensor
    pictures: Tensor
    distance: float
    """1 - cosine between the gradient that the pictures cause and the one that was seen."""
    psnr: list[float] = field(init=False)
    flat: list[float] = field(init=False)
    """PSNR of a picture of one colour, the original's mean: what knowing nothing but the brightness gives."""

    def __post_init__(self) -> None:
        means = self.originals.mean((-2, -1), keepdim=True).expand_as(self.originals)
        for name, pictures in (("psnr", self.pictures), ("flat", means)):
            object.__setattr__(self, name, [psnr(a, b) for a, b in zip(pictures, self.originals, strict=True)])

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, and the pictures as PNG files in base64, each original and what was recovered of it."""
        return {
            **{key: getattr(self, key) for key in ("round", "client", "labels", "psnr", "flat", "distance")},
            "originals": [_base64(picture) for picture in self.originals],
            "recovered": [_base64(picture) for picture in self.pictures],
        }


@dataclass(frozen=True)
class Report:
    """All attacks on a run."""

    run: str
    method: str
    attack: Attack
    attacks: list[Attacked]

    @property
    def rounds(self) -> list[int]:
        """The rounds that were attacked."""
        return sorted({one.round for one in self.attacks})

    def figures(self, round: int | None = None) -> dict[str, float]:
        """Return average and largest PSNR over pictures, clients and rounds (Table 7), or of one round."""
        chosen = [one for one in self.attacks if round in (None, one.round)]
        values, flat = ([value for one in chosen for value in getattr(one, name)] for name in ("psnr", "flat"))
        return {
            "average": sum(values) / len(values),
            "maximum": max(values),
            "flat_average": sum(flat) / len(flat),
            "flat_maximum": max(flat),
            "better_than_flat": sum(a > b for a, b in zip(values, flat, strict=True)) / len(values),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return all settings, figures and pictures."""
        return {
            "run": self.run,
            "method": self.method,
            "attack": asdict(self.attack),
            "psnr": self.figures(),
            "rounds": {str(round): self.figures(round) for round in self.rounds},
            "attacks": [one.as_dict() for one in self.attacks],
        }

    def write(self, path: Path) -> None:
        """Write figures and pictures as one HTML file to look at, and beside it as JSON for other programs."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(self.as_dict(), indent=1))
        path.write_text(self.html(), encoding="utf-8")

    def html(self) -> str:
        """Return a page that needs no other file: figures, then originals above what was recovered."""
        head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in self.figures())
        rows = "".join(
            f"<tr><th>{name}</th>" + "".join(f"<td>{value:.2f}</td>" for value in figures.values()) + "</tr>"
            for name, figures in [("all", self.figures()), *((f"round {r}", self.figures(r)) for r in self.rounds)]
        )
        settings = ", ".join(f"{key} {value}" for key, value in asdict(self.attack).items())
        return PAGE.format(
            run=escape(self.run),
            method=escape(self.method),
            settings=escape(settings),
            meaning=escape(MEANINGS[self.attack.mode]),
            table=f"<table><tr><th></th>{head}</tr>{rows}</table>",
            pictures="".join(map(_section, self.attacks)),
        )


MEANINGS = {
    "gradient": "Attacked is the gradient of what a client shares, on these very pictures, before its next round.",
    "update": "Attacked is what a client would really upload next, after all its epochs on all its data. Shown beside "
    "a recovered picture is the nearest of the client's pictures of that class.",
}

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{run}: recovered pictures</title><style>
body {{ font-family: sans-serif; margin: 2em; max-width: 70em }}
td, th {{ padding: .2em .8em; text-align: right }}
figure {{ display: inline-block; margin: .3em; text-align: center; font-size: 80% }}
img {{ width: 5em; image-rendering: pixelated; display: block; margin: .1em }}
</style></head><body><h1>What can be recovered from {run}</h1>
<p>{method}</p><p>{meaning}</p><p>{settings}</p>
<p>PSNR in dB, higher is closer; <em>flat</em> is that of a picture of one colour, the original's mean: an attack that
is no better has recovered no shape. <em>Better than flat</em> is the share of such pictures.</p>
{table}<p>Above the client's own picture, below what was recovered.</p>{pictures}</body></html>
"""


def _section(one: Attacked) -> str:
    figures = "".join(
        f"<figure>{_image(original)}{_image(picture)}{value:.1f} dB</figure>"
        for original, picture, value in zip(one.originals, one.pictures, one.psnr, strict=True)
    )
    return f"<h2>Round {one.round}, client {one.client}</h2>{figures}"


def _image(picture: Tensor) -> str:
    return f'<img alt="" src="data:image/png;base64,{_base64(picture)}">'


def _base64(picture: Tensor) -> str:
    return base64.b64encode(png(picture)).decode()


def png(picture: Tensor) -> bytes:
    """Write a picture (1 or 3 channels, height, width) with colours from 0 to 1 as a PNG file of 8 bits a colour."""
    channels, height, width = picture.shape
    colours = (picture.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0)
    lines = b"".join(b"\0" + row.contiguous().numpy().tobytes() for row in colours)  # 0: the line is not filtered
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")]
    packed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


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
    on_attack: Callable[[Attacked], None] = lambda attacked: None,
) -> Report:
    """Attack the first `clients` clients of a run in some of its kept rounds (none given: in all of them).

    `on_start` is told how many iterations there will be in all.
    """
    attack, run = attack or Attack(), Run(directory)
    check_number("clients", clients, 1, whole=True)
    check_device_here(device)
    if not run.kept:
        raise RunError(
            f"{directory} has kept no round to attack; run its recipe again with keep_rounds, such as "
            "--set run.keep_rounds=[10,20,30,40,50]"
        )
    kept = [Run(directory, round) for round in rounds or run.kept]  # says which were not kept
    task, _ = task_of(run.recipe, data_dir)
    colours = Colours.of(task.data)
    chosen = range(min(clients, task.data.clients))
    on_start(len(kept) * len(chosen) * attack.restarts * attack.iterations)
    found: list[Attacked] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same bits everywhere
    try:
        for one in kept:
            result = one.rebuilt(task, device)
            for attacked in attacks(result.federation, result.server, chosen, attack, colours, on_iteration):
                found.append(attacked)
                on_attack(attacked)
    finally:
        torch.set_num_threads(threads)
    return Report(str(directory), str(run.recipe.method), attack, found)


def attacks(
    federation: Federation,
    server: Server,
    clients: Sequence[int],
    attack: Attack,
    colours: Colours,
    on_iteration: Callable[[], None] = lambda: None,
) -> Iterator[Attacked]:
    """Attack clients as the next round would ask them."""
    setup, now, data = federation.setup, federation.setup.at(server.round), federation.setup.task.data
    asked = [federation.dispatch.participant(client, server.round) for client in clients]
    networks = {who.capacity: now.network(who.capacity) for who in asked}
    view = now.method.prepare(server.tensors, networks, training=True)
    for job in federation.dispatch.jobs("train", server, view, asked, federation.store):
        if not uploaded_weights(setup, decode(job.message)):
            raise NothingToAttack(f"{setup.method.name} uploads no trained weight: there is nothing to attack")
        stored, targets = data.of(job.client)
        own = colours.pictures(data.transform.test(stored).float())
        rng = torch_rng(attack.seed, "audit-images", client=job.client)  # the same ones in all rounds
        where = torch.randperm(len(targets), generator=rng)[: attack.images]
        labels = targets[where]
        seen = known(setup, job, attack, data.transform.test(stored[where]), labels)
        pictures, off = reconstruct(setup, seen, attack, colours, on_iteration)
        if attack.mode == "gradient":
            own, targets = own[where], labels
        originals = own[matched(pictures, labels, own, targets)]
        yield Attacked(server.round, job.client, labels.tolist(), originals, pictures, off)
