"""The federated methods, one file per method."""

from typing import Any

from fedfactor.methods.fed_sb import FedSB
from fedfactor.methods.fedamp import FedAMP
from fedfactor.methods.fedavg import FedAvg
from fedfactor.methods.fedbn import FedBN
from fedfactor.methods.fedcac import FedCAC
from fedfactor.methods.feddecomp import FedDecomp
from fedfactor.methods.fedex_lora import FedExLora
from fedfactor.methods.fedhm import FedHM
from fedfactor.methods.fedpara import FedPara, PFedPara
from fedfactor.methods.fedper import FedPer
from fedfactor.methods.fedrep import FedRep
from fedfactor.methods.fedrod import FedRoD
from fedfactor.methods.fedrolex import FedRolex
from fedfactor.methods.fedsa_lora import FedSALora
from fedfactor.methods.fedsvd import FedSVD
from fedfactor.methods.ffa_lora import FFALora
from fedfactor.methods.fjord import FjORD
from fedfactor.methods.flanc import FLANC
from fedfactor.methods.flexlora import FlexLora
from fedfactor.methods.flora import FLoRA
from fedfactor.methods.heterofl import HeteroFL
from fedfactor.methods.hetlora import HetLora
from fedfactor.methods.lg_fedavg import LGFedAvg
from fedfactor.methods.local import Local
from fedfactor.methods.lora import Lora
from fedfactor.methods.low_rank import LowRankMethod
from fedfactor.methods.origdrop import OrigDrop
from fedfactor.methods.orthdrop import OrthDrop
from fedfactor.methods.pfedgate import PFedGate
from fedfactor.methods.pfedsd import PFedSD
from fedfactor.methods.prism import PriSM
from fedfactor.methods.pufferfish import Pufferfish
from fedfactor.methods.raflora import RaFLora
from fedfactor.methods.rolora import RoLora
from fedfactor.methods.slim import Slim
from fedfactor.protocol.method import Diagnostics, Method, ObservedRound, ParameterGroup, Participant, Phase, Traits
from fedfactor.registry import create, names

__all__ = [
    "FLANC",
    "Diagnostics",
    "FFALora",
    "FLoRA",
    "FedAMP",
    "FedAvg",
    "FedBN",
    "FedCAC",
    "FedDecomp",
    "FedExLora",
    "FedHM",
    "FedPara",
    "FedPer",
    "FedRep",
    "FedRoD",
    "FedRolex",
    "FedSALora",
    "FedSB",
    "FedSVD",
    "FjORD",
    "FlexLora",
    "HetLora",
    "HeteroFL",
    "LGFedAvg",
    "Local",
    "Lora",
    "LowRankMethod",
    "Method",
    "ObservedRound",
    "OrigDrop",
    "OrthDrop",
    "PFedGate",
    "PFedPara",
    "PFedSD",
    "ParameterGroup",
    "Participant",
    "Phase",
    "PriSM",
    "Pufferfish",
    "RaFLora",
    "RoLora",
    "Slim",
    "Traits",
    "create_method",
    "list_methods",
]


def list_methods(pattern: str = "*") -> list[str]:
    """Return the sorted names of the registered methods that match a pattern such as `fed*`, plug-ins included."""
    return names("methods", pattern)


def create_method(name: str, **options: Any) -> Method:
    """Build a method by name. Options are its fields, which `fedfactor methods` lists with their defaults.

    Raises:
        ValueError: There is no such method, or it has no such field.
    """
    created = create("methods", name, **options)
    assert isinstance(created, Method)
    return created
