"""What is to be learnt: a model, an objective, and the clients' data."""

from fedfactor.task.task import EVALUATION_BATCH, BatchSums, Build, Task, like, masked_logits

__all__ = ["EVALUATION_BATCH", "BatchSums", "Build", "Task", "like", "masked_logits"]
