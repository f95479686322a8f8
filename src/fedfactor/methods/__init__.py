"""Which tensors go where; one file a method."""

from fedfactor.methods.fedamp import FedAMP
from fedfactor.methods.fedavg import FedAvg
from fedfactor.methods.fedbn import FedBN
from fedfactor.methods.fedcac import FedCAC
from fedfactor.methods.feddecomp import FedDecomp
from fedfactor.methods.fedhm import FedHM
from fedfactor.methods.fedpara import FedPara, PFedPara
from fedfactor.methods.fedper import FedPer
from fedfactor.methods.fedrep import FedRep
from fedfactor.methods.fedrod import FedRoD
from fedfactor.methods.fjord import FjORD
from fedfactor.methods.flanc import FLANC
from fedfactor.methods.heterofl import HeteroFL
from fedfactor.methods.lg_fedavg import LGFedAvg
from fedfactor.methods.local import Local
from fedfactor.methods.low_rank import LowRankMethod
from fedfactor.methods.origdrop import OrigDrop
from fedfactor.methods.pfedgate import PFedGate
from fedfactor.methods.pfedsd import PFedSD
from fedfactor.methods.prism import OrthDrop, PriSM
from fedfactor.methods.pufferfish import Pufferfish
from fedfactor.methods.slim import Slim
from fedfactor.protocol.method import Diagnostics, Group, Method, ObservedRound, Participant, Phase, Traits

__all__ = [
    "FLANC",
    "Diagnostics",
    "FedAMP",
    "FedAvg",
    "FedBN",
    "FedCAC",
    "FedDecomp",
    "FedHM",
    "FedPara",
    "FedPer",
    "FedRep",
    "FedRoD",
    "FjORD",
    "Group",
    "HeteroFL",
    "LGFedAvg",
    "Local",
    "LowRankMethod",
    "Method",
    "ObservedRound",
    "OrigDrop",
    "OrthDrop",
    "PFedGate",
    "PFedPara",
    "PFedSD",
    "Participant",
    "Phase",
    "PriSM",
    "Pufferfish",
    "Slim",
    "Traits",
]
