"""Training runs: settings, workers (local, or started by torchrun), the loop, and its record."""

from distlion_lab.training.checkpoints import CHECKPOINTS_NAME, CheckpointSettings
from distlion_lab.training.compare import CompareProgress, compare
from distlion_lab.training.compare_settings import DEFAULT_METHODS, CompareSettings
from distlion_lab.training.delta_worker import find_delta_rule
from distlion_lab.training.local_workers import run_workers
from distlion_lab.training.loop import Progress
from distlion_lab.training.methods import BASELINE_NAMES, METHOD_NAMES, RULE_NAMES, find_rule
from distlion_lab.training.presets import PRESETS, Preset, make_quick
from distlion_lab.training.record import RECORD_NAME, Record
from distlion_lab.training.run import FIGURE_NAME, train
from distlion_lab.training.train_settings import (
    DEFAULT_RULE,
    OnDisagreement,
    Overlap,
    PartitionName,
    Schedule,
    TaskName,
    TrainSettings,
    torchrun_world_size,
)
from distlion_lab.training.workers import AUTO

__all__ = [
    "AUTO",
    "BASELINE_NAMES",
    "CHECKPOINTS_NAME",
    "DEFAULT_METHODS",
    "DEFAULT_RULE",
    "FIGURE_NAME",
    "METHOD_NAMES",
    "PRESETS",
    "RECORD_NAME",
    "RULE_NAMES",
    "CheckpointSettings",
    "CompareProgress",
    "CompareSettings",
    "OnDisagreement",
    "Overlap",
    "PartitionName",
    "Preset",
    "Progress",
    "Record",
    "Schedule",
    "TaskName",
    "TrainSettings",
    "compare",
    "find_delta_rule",
    "find_rule",
    "make_quick",
    "run_workers",
    "torchrun_world_size",
    "train",
]
