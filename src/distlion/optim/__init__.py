"""The optimizers that a user constructs: Lion, alone and with workers that vote."""

from distlion.optim.base import VotingBase
from distlion.optim.distributed_lion import DistributedLion
from distlion.optim.lion import Lion
from distlion.optim.papers import lion_cub
from distlion.optim.param_groups import group_params

__all__ = [
    "DistributedLion",
    "Lion",
    "VotingBase",
    "group_params",
    "lion_cub",
]
