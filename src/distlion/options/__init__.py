"""Options of an optimizer: nodes, shards, overlap, clipping, averages, diagnoses."""

from distlion.options.buffers import average_buffers
from distlion.options.clipping import (
    ClipNorm,
    NormClipper,
    clip_alone,
    clip_together,
    make_clip_alone,
    plan_norms,
)
from distlion.options.diagnostics import Diagnosis, Examiner
from distlion.options.exclusion import AGREEMENT_KEY, export_agreement, is_agreement
from distlion.options.follow_up import FollowUp, describe_kept
from distlion.options.matrix_cuts import find_matrices
from distlion.options.momentum_stage import (
    SELECTED_KEY,
    MomentumStage,
    fill_selection,
)
from distlion.options.momentum_sync import MomentumSync
from distlion.options.newcomers import Newcomers, begin_momentum, check_newcomers
from distlion.options.node_route import NodeRoute
from distlion.options.nodes import PIECE_UNIT_ELEMENTS, NodePieces, Nodes
from distlion.options.overlap import Overlap
from distlion.options.overlap_trial import OverlapTrial
from distlion.options.settings import Settings, check_choice
from distlion.options.shard_pieces import OwnShards, ShardPieces
from distlion.options.sharding import Sharding, find_sharding

__all__ = [
    "AGREEMENT_KEY",
    "PIECE_UNIT_ELEMENTS",
    "SELECTED_KEY",
    "ClipNorm",
    "Diagnosis",
    "Examiner",
    "FollowUp",
    "MomentumStage",
    "MomentumSync",
    "Newcomers",
    "NodePieces",
    "NodeRoute",
    "Nodes",
    "NormClipper",
    "Overlap",
    "OverlapTrial",
    "OwnShards",
    "Settings",
    "ShardPieces",
    "Sharding",
    "average_buffers",
    "begin_momentum",
    "check_choice",
    "check_newcomers",
    "clip_alone",
    "clip_together",
    "describe_kept",
    "export_agreement",
    "fill_selection",
    "find_matrices",
    "find_sharding",
    "is_agreement",
    "make_clip_alone",
    "plan_norms",
]
