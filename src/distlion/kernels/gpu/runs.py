"""The table of a count: the part of each parameter that lies in the blocks at hand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from distlion.kernels.gpu import bits
from distlion.kernels.gpu.table import FIELDS, Rows
from distlion.layout import BLOCK_WORDS, WORD_ELEMENTS, Bucket


def list_runs(
    bucket: Bucket,
    present: npt.NDArray[np.bool_ | np.uint8],
    first_block: int,
    n_blocks: int,
) -> tuple[Rows, npt.NDArray[np.int32]]:
    """List the runs that some worker votes for.

    Args:
        bucket: The layout of the parameters.
        present: (workers, n_params), as in ``BlockVotes``.
        first_block: The first of the blocks at hand.
        n_blocks: Number of these blocks.

    Returns:
        The rows of a table, header included, and (runs, workers): the times that each vote counts.
    """
    begin, end = first_block * BLOCK_WORDS, (first_block + n_blocks) * BLOCK_WORDS
    fields, members = [], []
    n_present = present.sum(0, dtype=np.int64)
    for index, slot in enumerate(bucket.slots):
        first = max(begin, slot.bucket_word)
        if first >= min(end, slot.bucket_word + slot.n_words) or not n_present[index]:
            continue
        skipped = first - slot.bucket_word
        left = slot.n_elements - skipped * WORD_ELEMENTS
        n_elements = min((end - first) * WORD_ELEMENTS, left)
        members.append(index)
        fields.append((n_elements, first - begin, slot.first_word + skipped, slot.first_bit))
    rows = np.zeros((1 + len(fields), FIELDS), dtype=np.int64)
    if fields:
        rows[1:, bits.N_ELEMENTS.value : bits.FIRST_BIT.value + 1] = fields
        rows[1:, bits.PRESENT.value] = n_present[members]
    return rows, np.ascontiguousarray(present.T[members], dtype=np.int32)
