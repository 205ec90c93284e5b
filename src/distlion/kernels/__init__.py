"""Arithmetic on flat tensors: no state, no peers."""

from distlion.kernels.coin import Coin, Coins
from distlion.kernels.contract import (
    EXP_AVG_DTYPES,
    PARAM_DTYPES,
    SCALE_BLOCK_ELEMENTS,
    Coefficients,
    Kernels,
    ReplyFormat,
    Segment,
)
from distlion.kernels.dispatch import check_denormals, choose_kernels

__all__ = [
    "EXP_AVG_DTYPES",
    "PARAM_DTYPES",
    "SCALE_BLOCK_ELEMENTS",
    "Coefficients",
    "Coin",
    "Coins",
    "Kernels",
    "ReplyFormat",
    "Segment",
    "check_denormals",
    "choose_kernels",
]
