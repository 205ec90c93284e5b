"""The traffic of one of several virtual workers."""

from __future__ import annotations

from collections.abc import Sequence

from distlion.layout import FLOAT_BYTES
from distlion.step.momentum import MomentumRows
from distlion.step.traffic import Traffic
from distlion.virtual.bucket import VirtualBucket
from distlion.wire.transport import ByteCount


class Accounting:
    """The traffic of all steps.

    Attributes:
        traffic: Bytes and messages.
        up_bits, down_bits: A worker's bits of votes and momenta, and those of replies, as papers
            count: without frames and shards.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.up_bits = self.down_bits = 0.0

    def count(
        self,
        buckets: Sequence[VirtualBucket],
        momenta: Sequence[MomentumRows],
        rest: ByteCount,
        n_elements: int,
    ) -> None:
        """Count a step.

        Args:
            buckets: The buckets that voted.
            momenta: The momenta that were averaged.
            rest: Bytes of everything but votes.
            n_elements: Elements of all trainable parameters.
        """
        for bucket in buckets:
            slots, vote, scale_bits = bucket.layout.slots, bucket.vote, 8 * FLOAT_BYTES
            n_voted = sum(slot.n_elements for slot in slots)
            self.up_bits += n_voted * vote.vote_planes
            self.up_bits += len(slots) * bucket.rule.n_scales * scale_bits
            self.down_bits += n_voted * vote.reply_planes
            self.down_bits += len(slots) * bucket.rule.n_reply_scales * scale_bits
        self.up_bits += sum(rows.up_bits for rows in momenta)
        self.down_bits += sum(rows.down_bits for rows in momenta)
        sent = sum((bucket.plan() for bucket in buckets), rest)
        self.traffic = self.traffic.add_step(sent, ByteCount(), n_elements)
