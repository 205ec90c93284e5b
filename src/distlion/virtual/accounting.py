"""The traffic of one of several virtual workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distlion.layout import FLOAT_BYTES
from distlion.step.clipping import plan_norms
from distlion.step.traffic import Traffic
from distlion.virtual.layout import ClusterLayout
from distlion.virtual.route import VirtualRoute
from distlion.wire.pattern import Exchange
from distlion.wire.transport import ByteCount


@dataclass
class Account:
    """The traffic of one worker in a step.

    Attributes:
        votes: Bytes for votes, and for all that precedes them.
        rest: Bytes for the part after a successful vote.
        up_bits, down_bits: Bits of votes and replies, as papers count: without frames and shards.
        momenta_up_bits, momenta_down_bits: Bits of momenta.
    """

    votes: ByteCount = field(default_factory=ByteCount)
    rest: ByteCount = field(default_factory=ByteCount)
    up_bits: int = 0
    down_bits: int = 0
    momenta_up_bits: float = 0.0
    momenta_down_bits: int = 0

    @classmethod
    def draw_up(
        cls, layout: ClusterLayout, routes: Sequence[VirtualRoute], *, step: int
    ) -> Account:
        """Sum up a step's traffic, before the step changes the state that sets the next one's."""
        settings, workers, last = layout.settings, layout.n_workers, layout.n_workers - 1
        pattern, n_votes = settings.exchange, layout.roster.n_votes
        assert isinstance(pattern, Exchange)  # the constructor refuses "auto"
        account = cls()
        for route in routes:
            account.votes += pattern.plan(route.rule.shape(route.bucket, n_votes), last)
            n_elements = sum(slot.n_elements for slot in route.bucket.slots)
            account.up_bits += n_elements * route.rule.vote_planes
            account.up_bits += len(route.bucket.slots) * route.rule.n_scales * 8 * FLOAT_BYTES
            account.down_bits += n_elements * route.rule.reply_planes(n_votes)
            account.down_bits += (
                len(route.bucket.slots) * route.rule.n_reply_scales * 8 * FLOAT_BYTES
            )
        clip = settings.clip_norm
        if workers > 1 and clip is not None and clip.scope == "global":
            account.votes += plan_norms(workers)
        if layout.examiner is not None:
            account.rest += layout.examiner.plan(step)
        if layout.momenta is not None:
            account.rest += layout.momenta.plan(step, pattern, last)
            for rows in layout.momenta.list_rows(step):
                account.momenta_up_bits += rows.up_bits
                account.momenta_down_bits += rows.down_bits
        return account


class Accounting:
    """The traffic of all steps."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._up_bits = self._down_bits = 0.0

    def count(self, account: Account, n_elements: int, *, committed: bool) -> None:
        """Count a step; a skipped step ended with its votes."""
        self._up_bits += account.up_bits + account.momenta_up_bits * committed
        self._down_bits += account.down_bits + account.momenta_down_bits * committed
        sent = account.votes + account.rest if committed else account.votes
        self.traffic = self.traffic.add_step(sent, ByteCount(), n_elements)

    def up_bits_per_parameter(self, n_elements: int) -> float:
        """Return a worker's bits of votes and momenta per element, averaged over all steps."""
        return self._up_bits / max(1, self.traffic.steps * n_elements)

    def down_bits_per_parameter(self, n_elements: int) -> float:
        """Return the bits of replies per element, averaged over all steps."""
        return self._down_bits / max(1, self.traffic.steps * n_elements)
