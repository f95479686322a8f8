"""Files to start from: a method that passes the conformance suite as it is, a recipe that runs as it is."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

from fedfactor.registry import entries

KINDS = ("method", "recipe")

METHOD = Template('''"""$name: what is new about it, in one line.

Try it:               python $name.py
From Python:          from $name import $cls; fedfactor.simulate(..., method=$cls(strength=0.01))
By name, in recipes:  an entry point in your package's pyproject.toml, then pip install -e . there:

    [project.entry-points."fedfactor.methods"]
    $name = "$name"

Test it:              once its name is known, in a checkout of fedfactor: pytest tests/conformance -k $name
Into fedfactor:       move it to src/fedfactor/methods and import it in that package's __init__.py
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedfactor.client import Context
from fedfactor.methods import Method
from fedfactor.registry import described, register
from fedfactor.task import Task


@register("methods", "$name", paper="")
@dataclass(frozen=True)
class $cls(Method):
    """What the server holds, what travels and what is averaged, with the paper's equation.

    Deviations: what differs from the paper, and why.

    Use it where ... (this paragraph and the one above stand on the method's page).
    """

    # Fields are hyper-parameters: recipes, the command line and the docs read names, defaults and help from here.
    keeps: str = field(default="", metadata=described("prefix of the layers that stay on the client; empty: none"))
    strength: float = field(default=0.001, metadata=described("weight of the mean square of all weights in the loss"))

    # Hooks below; those that are not written do what FedAvg does. fedfactor.methods.base lists them all.

    def private(self, name: str) -> bool:
        """Tell whether a tensor of the network stays on the client."""
        return bool(self.keeps) and name.startswith(f"{self.keeps}.")

    def check(self, task: Task, network: nn.Module) -> None:
        """Refuse what would silently be another method."""
        if self.keeps and not self.private_names(network):
            layers = ", ".join(name for name, _ in network.named_children())
            raise ValueError(f"the model has no layer {self.keeps!r} to keep private; its layers are {layers}")

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
# $name: what is tried, in one line.
#
#   fedfactor data show $name.toml                   who has how much of what
#   fedfactor run $name.toml                         into runs/$name; --resume carries on after a kill
#   fedfactor run $name.toml --set train.rounds=2    any key can be set from outside
#
# Every key has a default unless it says so here; a wrong one is answered with what is legal.
# runs/$name/recipe.toml has all of them, written out.
name = "$name"  # names the run directory
seed = 0

[data]
name = "digits"  # required. 1,797 real digits that need no download (pip install scikit-learn). Your own pictures:
# name = "folder"
# path = "pictures"    # within --data-dir; train/CLASS/*.png and test/CLASS/*.png, or CLASS/*.png alone
# size = 32            # resize to squares of this side
# channels = 3         # or 1
# Anything else: name = "package.module:function" of your own, which returns a fedfactor.data.Dataset.

[partition]
kind = "dirichlet"  # iid; dirichlet: class proportions drawn with alpha, the smaller the more uneven; classes: k each
clients = 20
alpha = 0.5

[model]
name = "digits_cnn"  # required: a network by name, or package.module:function of your own

[method]
name = "fedpara"  # fedfactor methods lists them with their fields
gamma = 0.1

[optimizer]
name = "fedavg"  # fedprox, scaffold, feddyn, fedadam

[codec]
name = "float32"  # float16, fedpaq, int8, topk: fewer bytes

[train]
rounds = 20
cohort = 5  # clients a round; a share below 1, such as 0.1, counts too
epochs = 2
batch_size = 16
lr = 0.1
momentum = 0.0
schedule = "constant"  # cosine; or [train.schedule] with kind = "multistep", milestones, decay
device = "cpu"  # cuda, cuda:1, mps

# Devices of several sizes, for heterofl, fjord, flanc, fedhm, prism: a share of the model, and of the clients.
# [capacities]
# levels = [1.0, 0.5]
# shares = [0.3, 0.7]
# dynamic = false      # true: redrawn every round

[evaluate]
every = 5
clients = "selected"  # all: every client's own model on its own test data; none: the server's model only

# fedfactor run $name.toml --small lays this over the rest, for a quick try.
[small.train]
rounds = 2

# Several runs from one file, each in a directory of its own:
# [[sweep.cases]]
# name = "dense"
# method = { name = "fedavg" }
# [[sweep.cases]]
# name = "factors"
# method = { name = "fedpara", gamma = 0.3 }
""")


def new(kind: str, name: str, folder: Path = Path()) -> Path:
    """Write a method or a recipe to start from into a folder, and return its path; nothing is overwritten."""
    if kind not in KINDS:
        raise ValueError(f"there is no new {kind!r}; there are {' and '.join(KINDS)}")
    path = folder / f"{name}{'.py' if kind == 'method' else '.toml'}"
    text = method_text(name) if kind == "method" else recipe_text(name)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"{path} is there already; give another name, or remove it") from None
    except FileNotFoundError:
        raise ValueError(f"there is no folder {folder} to write {path.name} into") from None
    return path


def method_text(name: str) -> str:
    """Return the source of a method to start from."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ValueError(f"a method's name is made of small letters, digits and _, such as my_method, got {name!r}")
    if name in entries("methods"):
        raise ValueError(f"there is a method {name!r} already; give another name")
    return METHOD.substitute(name=name, cls="".join(word.capitalize() for word in name.split("_")))


def recipe_text(name: str) -> str:
    """Return a recipe to start from."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) or name.endswith(".toml"):
        raise ValueError(f"a recipe's name can name a directory, such as my-recipe, and has no ending, got {name!r}")
    return RECIPE.substitute(name=name)
