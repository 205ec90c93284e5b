"""Lion, alone and with workers that vote: what a user constructs."""

from distlion.optim.base import VotingBase
from distlion.optim.distributed_lion import DistributedLion
from distlion.optim.lion import Lion
from distlion.optim.lion_cub import lion_cub
from distlion.optim.rehearsal import is_trying_overlap, rehearse_step
from distlion.optim.saved_groups import WORKER_KEY, describe_move
from distlion.optim.saved_state import list_kept
from distlion.options import ClipNorm, Diagnosis, MomentumSync, Nodes
from distlion.step import Traffic

__all__ = [
    "WORKER_KEY",
    "ClipNorm",
    "Diagnosis",
    "DistributedLion",
    "Lion",
    "MomentumSync",
    "Nodes",
    "Traffic",
    "VotingBase",
    "describe_move",
    "is_trying_overlap",
    "lion_cub",
    "list_kept",
    "rehearse_step",
]
