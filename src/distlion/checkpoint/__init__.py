"""Every worker's state: saved completely, checked, remapped if the number of workers changes."""

from distlion.checkpoint.folder import Manifest
from distlion.checkpoint.load import (
    Check,
    LoadedCheckpoint,
    check_checkpoints,
    load_checkpoint,
    load_together,
)
from distlion.checkpoint.remap import WORLD_CHANGES, WorldChange
from distlion.checkpoint.save import (
    PendingCheckpoint,
    check_checkpoint_folder,
    prune_checkpoints,
    save_checkpoint,
)
from distlion.checkpoint.verify import (
    CheckpointReport,
    inspect_checkpoint,
    read_extra,
    verify_checkpoint,
)

__all__ = [
    "WORLD_CHANGES",
    "Check",
    "CheckpointReport",
    "LoadedCheckpoint",
    "Manifest",
    "PendingCheckpoint",
    "WorldChange",
    "check_checkpoint_folder",
    "check_checkpoints",
    "inspect_checkpoint",
    "load_checkpoint",
    "load_together",
    "prune_checkpoints",
    "read_extra",
    "save_checkpoint",
    "verify_checkpoint",
]
