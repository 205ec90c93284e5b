"""Every worker's state: saved whole, checked, re-mapped when the number of workers changes."""

from distlion.checkpoint.load import LoadedCheckpoint, load_checkpoint
from distlion.checkpoint.manifest import Manifest
from distlion.checkpoint.remap import WORLD_CHANGES, WorldChange
from distlion.checkpoint.save import PendingCheckpoint, save_checkpoint
from distlion.checkpoint.verify import CheckpointReport, inspect_checkpoint, verify_checkpoint

__all__ = [
    "WORLD_CHANGES",
    "CheckpointReport",
    "LoadedCheckpoint",
    "Manifest",
    "PendingCheckpoint",
    "WorldChange",
    "inspect_checkpoint",
    "load_checkpoint",
    "save_checkpoint",
    "verify_checkpoint",
]
