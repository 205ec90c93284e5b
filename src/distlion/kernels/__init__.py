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
from distlion.kernels.dispatch import check_denormals, choose_kernels
from distlion.kernels.tally import VoteFormat, settle_tally, tally_votes

__all__ = [
    "EXP_AVG_DTYPES",
    "FLOAT32_MAX",
    "PARAM_DTYPES",
    "SCALE_BLOCK_ELEMENTS",
    "Coefficients",
    "Coin",
    "Coins",
    "Kernels",
    "ReplyFormat",
    "Segment",
    "VoteFormat",
    "check_denormals",
    "choose_kernels",
    "settle_tally",
    "tally_votes",
]
