"""The optimizers that a user constructs: Lion, alone and with workers that vote."""

from distlion.optim.around import Inner, check_inner
from distlion.optim.base import VotingBase, expect_all_saved, read_state
from distlion.optim.common_point import CommonPoint, copy_to_common, find_delta
from distlion.optim.distributed_lion import DistributedLion
from distlion.optim.inner_optimizers import InnerOptimizers, check_owners
from distlion.optim.inner_state import find_broken, reset_broken
from distlion.optim.late_vote import move_on
from distlion.optim.lion import Lion
from distlion.optim.lion_cub import lion_cub
from distlion.optim.local_arguments import Schedule, check_delay, check_every_steps
from distlion.optim.local_state import check_schedule
from distlion.optim.local_steps import LocalSteps
from distlion.optim.local_votes import LocalVotes, Progress
from distlion.optim.outer_step import OuterMomentum, OuterStep
from distlion.optim.papers import paper_settings
from distlion.optim.param_groups import describe_groups, group_params
from distlion.optim.parts import divide, take_turns
from distlion.optim.rehearsal import is_trying_overlap, rehearse_step
from distlion.optim.saved_groups import WORKER_KEY, describe_move
from distlion.optim.saved_state import list_kept
from distlion.options import ClipNorm, Diagnosis, MomentumSync, Nodes
from distlion.step import Traffic

__all__ = [
    "WORKER_KEY",
    "ClipNorm",
    "CommonPoint",
    "Diagnosis",
    "DistributedLion",
    "Inner",
    "InnerOptimizers",
    "Lion",
    "LocalSteps",
    "LocalVotes",
    "MomentumSync",
    "Nodes",
    "OuterMomentum",
    "OuterStep",
    "Progress",
    "Schedule",
    "Traffic",
    "VotingBase",
    "check_delay",
    "check_every_steps",
    "check_inner",
    "check_owners",
    "check_schedule",
    "copy_to_common",
    "describe_groups",
    "describe_move",
    "divide",
    "expect_all_saved",
    "find_broken",
    "find_delta",
    "group_params",
    "is_trying_overlap",
    "lion_cub",
    "list_kept",
    "move_on",
    "paper_settings",
    "read_state",
    "rehearse_step",
    "reset_broken",
    "take_turns",
]
