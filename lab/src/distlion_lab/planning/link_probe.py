"""Measurement of the link between workers, together and one by one, to find slow ranks."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial

import torch

from distlion.wire import ByteCount, Gloo, LinkModel, probe_link
from distlion.wire.gloo import GlooTransfer
from distlion.wire.probe import (
    MAX_CHUNK_BYTES,
    TARGET_ROUNDS,
    TINY_BYTES,
    TINY_TRIES,
    TRIES,
    first_chunk_bytes,
    gather_integers,
    make_model,
    time_ns,
    uncounted,
)

# Long enough that a rate limiter's credit in between matters little.
_TARGET_S = 0.02


@dataclass(frozen=True)
class LinkProbe:
    """The result of a probe; equal on all ranks.

    Attributes:
        combined: The link when all ranks send at once, by the slowest of them.
        ranks: The link of each rank when only it exchanges with all others.
    """

    combined: LinkModel
    ranks: tuple[LinkModel, ...]

    @property
    def slowest(self) -> int:
        """The rank with the lowest rate; the first of equal ones."""
        return min(range(len(self.ranks)), key=lambda rank: self.ranks[rank].rate_bit_per_s)

    @property
    def slowdown(self) -> float:
        """The ratio of the median rank's rate to the slowest rank's."""
        rates = [model.rate_bit_per_s for model in self.ranks]
        return statistics.median(rates) / min(rates)


def probe_ranks(link: Gloo, *, step: int) -> LinkProbe:
    """Measure all ranks together, then each one while the others only answer it.

    A slow rank slows down every exchange, so only a measurement one by one finds it. With two
    workers it stays unknown. This takes as many rounds as there are ranks.

    Args:
        link: As for ``probe_link``.
        step: As for ``probe_link``.

    Raises:
        PeerLostError: A peer's connection closed.
        StepTimeoutError: A peer did not answer in time.
    """
    combined = probe_link(link, step=step)
    if link.n_members == 1:
        return LinkProbe(combined, (combined,))
    peers = link.n_members - 1
    target_s = max(_TARGET_S, TARGET_ROUNDS * combined.latency_s)
    chunk_bytes = int(combined.rate_bit_per_s * target_s / 8 / peers)
    chunk_bytes = min(MAX_CHUNK_BYTES, max(first_chunk_bytes(link.n_members), chunk_bytes))
    mine = (0, 0)
    for rank in range(link.n_members):
        tiny_ns = min(_time_alone(link, rank, TINY_BYTES, step) for _ in range(TINY_TRIES))
        _time_alone(link, rank, chunk_bytes, step)
        taken_ns = min(_time_alone(link, rank, chunk_bytes, step) for _ in range(TRIES))
        if rank == link.rank:
            mine = (tiny_ns, taken_ns)
    with uncounted(link):
        rows = gather_integers(link, mine, step=step)
    return LinkProbe(
        combined, tuple(make_model(link, tiny, peers * chunk_bytes, taken) for tiny, taken in rows)
    )


def _time_alone(link: Gloo, rank: int, chunk_bytes: int, step: int) -> int:
    """Time an all-to-all in which only ``rank`` sends to all, and all send only to it."""
    is_alone = rank == link.rank
    sizes = [chunk_bytes * (is_alone != (peer == rank)) for peer in range(link.n_members)]
    chunks = torch.zeros(sum(sizes), dtype=torch.uint8, device="cpu")
    received = torch.zeros_like(chunks)
    start = partial(link.process_group.alltoall_base, received, chunks, sizes, sizes)
    what = f"probe of rank {link.ranks[rank]}"
    return time_ns(lambda: GlooTransfer(link, start, ByteCount(), step=step, what=what).wait())
