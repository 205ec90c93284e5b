"""The optimizers that a user constructs: Lion, alone and with workers that vote."""

from distlion.optim.base import VotingBase
from distlion.optim.distributed_lion import DistributedLion
from distlion.optim.lion import Lion
from distlion.optim.papers import lion_cub
from distlion.optim.param_groups import group_params
from distlion.optim.rehearsal import is_trying_overlap, rehearse_step

__all__ = [
    "DistributedLion",
    "Lion",
    "VotingBase",
    "group_params",
    "is_trying_overlap",
    "lion_cub",
    "rehearse_step",
]
