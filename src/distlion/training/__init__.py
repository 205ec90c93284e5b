"""Training runs: settings, local workers or torchrun's, the loop, and its record."""

from distlion.training.checkpoints import CHECKPOINTS_NAME, CheckpointSettings
from distlion.training.compare import CompareProgress, compare
from distlion.training.compare_settings import CompareSettings
from distlion.training.contenders import METHOD_NAMES
from distlion.training.local_workers import run_workers
from distlion.training.loop import Progress
from distlion.training.presets import PRESETS, Preset, make_quick
from distlion.training.record import RECORD_NAME, Record
from distlion.training.run import FIGURE_NAME, train
from distlion.training.train_settings import (
    AUTO,
    BASELINE_NAMES,
    RULE_NAMES,
    BaselineName,
    Overlap,
    PartitionName,
    Schedule,
    TaskName,
    TrainSettings,
    torchrun_world_size,
)

__all__ = [
    "AUTO",
    "BASELINE_NAMES",
    "CHECKPOINTS_NAME",
    "FIGURE_NAME",
    "METHOD_NAMES",
    "PRESETS",
    "RECORD_NAME",
    "RULE_NAMES",
    "BaselineName",
    "CheckpointSettings",
    "CompareProgress",
    "CompareSettings",
    "Overlap",
    "PartitionName",
    "Preset",
    "Progress",
    "Record",
    "Schedule",
    "TaskName",
    "TrainSettings",
    "compare",
    "make_quick",
    "run_workers",
    "torchrun_world_size",
    "train",
]
