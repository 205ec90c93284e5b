"""Arithmetic on flat tensors: no state, no peers."""

from distlion.kernels.coin import Coin, Coins
from distlion.kernels.contract import (
    EXP_AVG_DTYPES,
    FLOAT32_MAX,
    PARAM_DTYPES,
    SCALE_BLOCK_ELEMENTS,
    Coefficients,
    Kernels,
    ReplyFormat,
    Segment,
)
from distlion.kernels.counting import BlockVotes
from distlion.kernels.dispatch import check_denormals, choose_kernels
from distlion.kernels.feedback import FLOAT_PLANES, count_estimates, tree_mean
from distlion.kernels.lots import encode_lots, read_directions
from distlion.kernels.orthogonal import (
    compute_direction,
    give_direction,
    list_batches,
    matrix_shape,
    orthogonalize,
    orthogonalize_batch,
    orthogonalize_directions,
    step_alone_orthogonal,
)
from distlion.kernels.sums import add_sums, settle_sum, start_sum
from distlion.kernels.tally import VoteFormat, settle_tally, tally_votes

__all__ = [
    "EXP_AVG_DTYPES",
    "FLOAT32_MAX",
    "FLOAT_PLANES",
    "PARAM_DTYPES",
    "SCALE_BLOCK_ELEMENTS",
    "BlockVotes",
    "Coefficients",
    "Coin",
    "Coins",
    "Kernels",
    "ReplyFormat",
    "Segment",
    "VoteFormat",
    "add_sums",
    "check_denormals",
    "choose_kernels",
    "compute_direction",
    "count_estimates",
    "encode_lots",
    "give_direction",
    "list_batches",
    "matrix_shape",
    "orthogonalize",
    "orthogonalize_batch",
    "orthogonalize_directions",
    "read_directions",
    "settle_sum",
    "settle_tally",
    "start_sum",
    "step_alone_orthogonal",
    "tally_votes",
    "tree_mean",
]
