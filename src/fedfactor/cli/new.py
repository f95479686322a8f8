"""`fedfactor new`: write a method that passes the conformance suite, or a recipe that runs, as a file to start from."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from fedfactor.cli.common import tell

KINDS = ("method", "recipe")

METHOD = Template('''"""$name: what is new about it, in one line.

Try it:               python $name.py
From Python:          from $name import $cls; fedfactor.simulate(..., method=$cls(strength=0.01))
By name, in recipes:  an entry point in your package's pyproject.toml, then pip install -e . there:

    [project.entry-points."fedfactor.methods"]
    $name = "$name"

Test it:              from fedfactor.testing import check_method; check_method($cls())
Into fedfactor:       move it to src/fedfactor/methods and import it in that package's __init__.py
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedfactor.nn.state import tensors_of
from fedfactor.protocol.context import Context
from fedfactor.protocol.method import Method
from fedfactor.registry import described, register
from fedfactor.task import Build


@register("methods", "$name", paper="")
@dataclass(frozen=True)
class $cls(Method):
    """What the server holds, what travels and what is averaged, with the paper's equation.

    Deviations: what differs from the paper, and why.

    Use it where ... (the method's page in the docs shows this paragraph and the one above).
    """

    # Fields are hyper-parameters: recipes, the command line and the docs read names, defaults and help from here.
    keeps: str = field(default="", metadata=described("prefix of the layers that stay on the client; empty: none"))
    strength: float = field(default=0.001, metadata=described("weight of the mean square of all weights in the loss"))

    # Hooks. A hook that is not overridden does what FedAvg does. fedfactor.protocol.method lists them all.

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the task's model. Raises ValueError where the method would silently be another one."""
        model = build(1.0)
        if self.keeps and not self.private_names(model):
            layers = ", ".join(name for name, _ in model.named_children())
            raise ValueError(f"the model has no layer {self.keeps!r} to keep private; its layers are {layers}")
        return model

    def private_names(self, network: nn.Module) -> set[str]:
        """Return the names of the network's tensors that stay on the client."""
        return {name for name in tensors_of(network) if self.keeps and name.startswith(f"{self.keeps}.")}

    def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Add a penalty to the loss of a batch."""
        squares = torch.stack([parameter.square().mean() for parameter in network.parameters()])
        return super().objective(network, batch, ctx) + self.strength * squares.mean()


def main() -> None:
    """Train on the digits of scikit-learn (pip install scikit-learn) for a few rounds."""
    import fedfactor
    from fedfactor.data import federated, load

    result = fedfactor.simulate(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        federated(load("digits"), clients=10),
        method=$cls(),
        rounds=10,
        cohort=5,
        epochs=2,
        batch_size=16,
    )
    print(result)


if __name__ == "__main__":
    main()
''')

RECIPE = Template("""\
# $name: what this recipe tries, in one line.
#
#   fedfactor data show $name.toml                   how the data are split over clients
#   fedfactor run $name.toml                         writes runs/$name; --resume resumes an interrupted run
#   fedfactor run $name.toml --set train.rounds=2    overrides any key
#
# Keys marked "required" have no default. An error message lists the legal keys and values.
# runs/$name/recipe.toml contains every key with its value.
name = "$name"  # name of the run directory
seed = 0

[data]
name = "digits"  # required. 1,797 images of digits, no download needed (pip install scikit-learn). Your own images:
# name = "folder"
# path = "images"      # within --data-dir; train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png alone
# size = 32            # resize to squares of this side
# channels = 3         # or 1
# Other data: name = "package.module:function", a function of yours that returns a fedfactor.data.Dataset.

[partition]
kind = "dirichlet"  # iid; dirichlet: class shares drawn with alpha (smaller: less even); classes: k classes per client
clients = 20
alpha = 0.5

[model]
name = "digits_cnn"  # required: a network by name, or package.module:function

[method]
name = "fedpara"  # `fedfactor methods` lists all methods with their fields
gamma = 0.1

[optimizer]
name = "fedavg"  # fedprox, scaffold, feddyn, fedadam

[codec]
name = "float32"  # float16, fedpaq, int8 and topk send fewer bytes

[train]
rounds = 20
cohort = 5  # clients per round; a number below 1 is a share of all clients
epochs = 2
batch_size = 16
lr = 0.1
momentum = 0.0
schedule = "constant"  # cosine; or [train.schedule] with kind = "multistep", milestones, decay
device = "cpu"  # cuda, cuda:1, mps

# Devices of different capacity, for heterofl, fjord, flanc, fedhm, prism: shares of the model and of clients.
# [capacities]
# levels = [1.0, 0.5]
# shares = [0.3, 0.7]
# dynamic = false      # true: drawn again each round

[evaluate]
every = 5
clients = "selected"  # all: each client's own model on its own test data; none: only the server's model

# `fedfactor run $name.toml --small` applies this overlay, for a quick try.
[small.train]
rounds = 2

# Several runs from one file, each in its own directory:
# [[sweep.cases]]
# name = "dense"
# method = { name = "fedavg" }
# [[sweep.cases]]
# name = "factors"
# method = { name = "fedpara", gamma = 0.3 }
""")


def new(
    kind: Annotated[str, typer.Argument(help="method or recipe.")],
    name: Annotated[str, typer.Argument(help="Its name, which is also the name of the file.")],
    folder: Annotated[Path, typer.Option("--out", "-o", help="Folder to write into.")] = Path(),
) -> None:
    """Write a method or a recipe to start from. It runs as it is."""
    path = write_new(kind, name, folder)
    tell(f"wrote {path}; next: {'python' if kind == 'method' else 'fedfactor run'} {path}")


def write_new(kind: str, name: str, folder: Path = Path()) -> Path:
    """Write a method or a recipe to start from into a folder and return its path. Never overwrites a file."""
    if kind not in KINDS:
        raise ValueError(f"`fedfactor new` writes a {' or a '.join(KINDS)}, got {kind!r}")
    path = folder / f"{name}{'.py' if kind == 'method' else '.toml'}"
    text = method_text(name) if kind == "method" else recipe_text(name)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"{path} exists already; choose another name, or remove the file") from None
    except FileNotFoundError:
        raise ValueError(f"the folder {folder} does not exist; create it before writing {path.name} into it") from None
    return path


def method_text(name: str) -> str:
    """Return the source of a method to start from."""
    from fedfactor.registry import entries

    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ValueError(
            f"a method's name consists of lower-case letters, digits and _, such as my_method, got {name!r}"
        )
    if name in entries("methods"):
        raise ValueError(f"a method {name!r} exists already; choose another name")
    return METHOD.substitute(name=name, cls="".join(word.capitalize() for word in name.split("_")))


def recipe_text(name: str) -> str:
    """Return a recipe to start from."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) or name.endswith(".toml"):
        raise ValueError(
            f"a recipe's name is also the name of a directory, such as my-recipe, and has no suffix .toml, got {name!r}"
        )
    return RECIPE.substitute(name=name)
