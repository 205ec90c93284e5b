"""Training runs: settings, local workers or torchrun's, the loop, and its record."""

from distlion.training.launch import run_workers
from distlion.training.loop import Progress
from distlion.training.record import RECORD_NAME, Record
from distlion.training.run import FIGURE_NAME, train
from distlion.training.settings import (
    ExchangeName,
    Norm,
    RuleName,
    Schedule,
    TaskName,
    TrainSettings,
    torchrun_world_size,
)

__all__ = [
    "FIGURE_NAME",
    "RECORD_NAME",
    "ExchangeName",
    "Norm",
    "Progress",
    "Record",
    "RuleName",
    "Schedule",
    "TaskName",
    "TrainSettings",
    "run_workers",
    "torchrun_world_size",
    "train",
]
