"""Real training jobs: data and model, from embedded data up to a user's own."""

from distlion_lab.tasks.base import Batch, Score, Task, batch_loss, score_batch, seeded_generator
from distlion_lab.tasks.images import ImageTask
from distlion_lab.tasks.partition import (
    ByBook,
    ByClass,
    Contiguous,
    Even,
    ImagePartition,
    TextPartition,
)
from distlion_lab.tasks.text import TextTask, Tokenizer

__all__ = [
    "Batch",
    "ByBook",
    "ByClass",
    "Contiguous",
    "Even",
    "ImagePartition",
    "ImageTask",
    "Score",
    "Task",
    "TextPartition",
    "TextTask",
    "Tokenizer",
    "batch_loss",
    "score_batch",
    "seeded_generator",
]
