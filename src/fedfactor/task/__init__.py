"""What is to be learnt: a model, an objective, and the clients' data."""

from fedfactor.data.batches import Batch, arguments, like, targets_of
from fedfactor.task.objective import Loss, logits_of, masked_logits
from fedfactor.task.task import EVALUATION_BATCH, BatchSums, Build, Task

__all__ = [
    "EVALUATION_BATCH",
    "Batch",
    "BatchSums",
    "Build",
    "Loss",
    "Task",
    "arguments",
    "like",
    "logits_of",
    "masked_logits",
    "targets_of",
]
