"""The step of workers that vote: what it consists of, below what a user constructs."""

from distlion.voting.alone import (
    check_finite,
    commit_alone,
    gather_alone,
    move_alone,
    step_alone,
)
from distlion.voting.buffers import average_buffers
from distlion.voting.clipping import ClipNorm, clip_alone, clip_together, plan_norms
from distlion.voting.custody import Custody, Gather, custody_among, name_worker
from distlion.voting.description import Description, FixedGroups, check_frozen
from distlion.voting.diagnostics import Diagnosis, Examiner, ParameterReply
from distlion.voting.gradients import GradientWatch, describe_sparse
from distlion.voting.handshake import refuse_step
from distlion.voting.hyperparameters import (
    GroupNumbers,
    check_hyperparameters,
    check_step,
    describe_hyperparameters,
    read_groups,
    read_step,
)
from distlion.voting.memory import check_own_memory, check_shared_memory
from distlion.voting.momentum_stage import (
    SELECTED_KEY,
    MomentumStage,
    describe_selection,
    fill_selection,
)
from distlion.voting.momentum_sync import MomentumSync
from distlion.voting.nodes import NodePieces, Nodes
from distlion.voting.outcome import describe_problem, log_abstention, log_skip
from distlion.voting.overlap import Overlap
from distlion.voting.param import Make, VotingParam, is_dtensor, local_tensor, take_gradients
from distlion.voting.peers import Peers
from distlion.voting.settings import Settings
from distlion.voting.shard_pieces import ShardPieces
from distlion.voting.sharding import find_sharding
from distlion.voting.traffic import Traffic
from distlion.voting.vote import CastVote, StepInputs, cast_votes, check_unchanged

__all__ = [
    "SELECTED_KEY",
    "CastVote",
    "ClipNorm",
    "Custody",
    "Description",
    "Diagnosis",
    "Examiner",
    "FixedGroups",
    "Gather",
    "GradientWatch",
    "GroupNumbers",
    "Make",
    "MomentumStage",
    "MomentumSync",
    "NodePieces",
    "Nodes",
    "Overlap",
    "ParameterReply",
    "Peers",
    "Settings",
    "ShardPieces",
    "StepInputs",
    "Traffic",
    "VotingParam",
    "average_buffers",
    "cast_votes",
    "check_finite",
    "check_frozen",
    "check_hyperparameters",
    "check_own_memory",
    "check_shared_memory",
    "check_step",
    "check_unchanged",
    "clip_alone",
    "clip_together",
    "commit_alone",
    "custody_among",
    "describe_hyperparameters",
    "describe_problem",
    "describe_selection",
    "describe_sparse",
    "fill_selection",
    "find_sharding",
    "gather_alone",
    "is_dtensor",
    "local_tensor",
    "log_abstention",
    "log_skip",
    "move_alone",
    "name_worker",
    "plan_norms",
    "read_groups",
    "read_step",
    "refuse_step",
    "step_alone",
    "take_gradients",
]
