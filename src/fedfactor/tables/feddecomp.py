"""FedDecomp, Section 3.5: statements about cost, measured at the ranks that the paper uses."""

from __future__ import annotations

from functools import cache

from fedfactor.cost import measure
from fedfactor.factor.additive import Additive
from fedfactor.nn import factor_weights, factorize
from fedfactor.tables.counting import images, network, parameters
from fedfactor.tables.row import Row

BATCH = 100

# Section 4.1: each dataset's network; Section 4.3: its best (R_c, R_l). The last number is the images' side.
SETTINGS = {
    "CIFAR-10 (.6, .6)": ("resnet8", 10, Additive(conv=0.6, linear=0.6), 32),
    "CIFAR-100 (.8, .4)": ("resnet10", 100, Additive(conv=0.8, linear=0.4), 32),
    "Tiny ImageNet (.8, .4)": ("resnet10", 200, Additive(conv=0.8, linear=0.4), 64),
}

# Quantity, the statement as a number, and the paper's words.
MEMORY, TAU, MACS, UPLOAD = (
    "(sigma + tau) / theta",
    "tau / theta",
    "forward MACs / FedAvg's",
    "upload / FedAvg's",
)
STATEMENTS = {
    TAU: ("< 1 x", "'much fewer' parameters than theta, read as: fewer"),
    MEMORY: (
        "< 2 x",
        "memory 'slightly higher' than FedAvg's, read as: less than twice, which fewer parameters imply",
    ),
    MACS: (
        "< 1 x",
        "computation 'lower' than FedAvg's; but every step composes sigma + B A, then runs the dense layer, "
        f"and needs the gradient of the whole weight for those of B and A; batch of {BATCH}",
    ),
    UPLOAD: ("1 x", "'the same communication cost as FedAvg'"),
}


def rows() -> list[Row]:
    """Measure the statements for each network of the main experiments."""
    return [
        Row("feddecomp", "Section 3.5", setting, quantity, ratio, *STATEMENTS[quantity])
        for setting in SETTINGS
        for quantity, ratio in _ratios(setting).items()
    ]


@cache
def _ratios(setting: str) -> dict[str, float]:
    """Divide the costs of the decomposed network by those of the plain one."""
    name, classes, scheme, side = SETTINGS[setting]
    plain = network(name, classes=classes, stem="imagenet")
    split = factorize(plain, scheme)
    theta = parameters(plain)
    tau = sum(w.factors[f].numel() for w in factor_weights(split).values() for f in ("a", "b"))
    batch = images(BATCH, side)
    return {
        TAU: tau / theta,
        MEMORY: parameters(split) / theta,
        MACS: measure(split, batch).macs / measure(plain, batch).macs,
        UPLOAD: (parameters(split) - tau) / theta,
    }
