"""Arithmetic on flat tensors: no state, no peers."""

from distlion.kernels.coin import Coin, Coins
from distlion.kernels.contract import FLOAT32_MAX, Coefficients, ReplyFormat, Segment, VoteFormat
from distlion.kernels.counting import BlockVotes
from distlion.kernels.dispatch import check_denormals, choose_kernels
from distlion.kernels.orthogonal import matrix_shape, orthogonalize
from distlion.kernels.reference import Kernels

__all__ = [
    "FLOAT32_MAX",
    "BlockVotes",
    "Coefficients",
    "Coin",
    "Coins",
    "Kernels",
    "ReplyFormat",
    "Segment",
    "VoteFormat",
    "check_denormals",
    "choose_kernels",
    "matrix_shape",
    "orthogonalize",
]
