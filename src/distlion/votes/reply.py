"""The result of a vote on one parameter, element by element."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from distlion.kernels.contract import ReplyFormat
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, Slot


class ParameterReply(NamedTuple):
    """The place of the reply on one parameter.

    Attributes:
        position: Number of the parameter among the trainable ones.
        slot: Its place in the bucket.
        packed: (blocks, planes, 8) int64, the reply on the bucket.
        reply_format: The format in which it encodes S.
        n_present: Number of workers that voted.
    """

    position: int
    slot: Slot
    packed: Tensor
    reply_format: ReplyFormat
    n_present: int

    def read(self, index: Tensor) -> list[int]:
        """Read S of some elements of the parameter."""
        words = self.slot.bucket_word + index // WORD_ELEMENTS
        chosen = self.packed[words // BLOCK_WORDS, :, words % BLOCK_WORDS]
        bits = (chosen >> (index % WORD_ELEMENTS)[:, None]) & 1
        if self.reply_format is ReplyFormat.COUNT:
            places = 2 ** torch.arange(bits.shape[1], device=bits.device)
            updates = 2 * (bits * places).sum(1) - self.n_present
        else:
            updates = 2 * bits[:, 0] - 1
            if self.reply_format is ReplyFormat.TERNARY:
                updates = updates * bits[:, 1]
        read: list[int] = updates.tolist()
        return read
