"""The federated optimizers (steps of clients and server), one file per optimizer."""

from fedfactor.optimizers.fedadam import FedAdam
from fedfactor.optimizers.fedavg import FedAvgOptimizer
from fedfactor.optimizers.feddyn import FedDyn
from fedfactor.optimizers.fedprox import FedProx
from fedfactor.optimizers.scaffold import Scaffold
from fedfactor.protocol.optimizer import Optimizer

__all__ = ["FedAdam", "FedAvgOptimizer", "FedDyn", "FedProx", "Optimizer", "Scaffold"]
