"""What is to be learnt: a model, an objective, metrics, and the clients' data."""

from fedfactor.data.batches import Batch, arguments, like, moved, targets_of
from fedfactor.task.metrics import ACCURACY, LOSS, Decider, Metric
from fedfactor.task.objective import Loss, logits_of, masked_logits
from fedfactor.task.task import EVALUATION_BATCH, BatchSums, Build, Task

__all__ = [
    "ACCURACY",
    "EVALUATION_BATCH",
    "LOSS",
    "Batch",
    "BatchSums",
    "Build",
    "Decider",
    "Loss",
    "Metric",
    "Task",
    "arguments",
    "like",
    "logits_of",
    "masked_logits",
    "moved",
    "targets_of",
]
