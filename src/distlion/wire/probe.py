"""Measurement of the link between voters, all of them together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from distlion.wire.cost import LinkModel
from distlion.wire.transport import Transport

TINY_BYTES = 64
TINY_TRIES = 9
# Sent by a rank in the first exchange, which also drains the credit of a rate limiter.
_FIRST_BYTES = 192 * 1024
MAX_CHUNK_BYTES = 4 * 1024 * 1024
_TARGET_NS = 5_000_000
# On a link with latency, TCP's slow start takes some round trips.
TARGET_ROUNDS = 4
TRIES = 3

ALONE = LinkModel(latency_s=0.0, rate_bit_per_s=1e15)
"""The model of a single worker, which sends nothing."""


def probe_link(link: Transport, *, step: int) -> LinkModel:
    """Measure latency and rate with all ranks sending at once; every rank must call it.

    1 all-to-alls of 64 bytes: the fastest is the latency. 2 one of 192 KiB to all peers together. 3
    three of a size that should take 5 ms or four times the latency, at least as large as in 2 and
    at most 4 MiB a peer; again while the rate found asks for a quarter more: the fastest of all
    gives the rate. The time of an exchange is the slowest rank's.

    The fastest counts because other processes on a machine can only make an exchange slower.

    Args:
        link: The link; its count of bytes does not change.
        step: The step that errors name.

    Returns:
        The model, equal on all ranks; ``ALONE`` for a single worker.

    Raises:
        PeerLostError: A peer's connection closed.
        StepTimeoutError: A peer did not answer in time.
    """
    if link.n_members == 1:
        return ALONE
    with uncounted(link):
        # 1 latency
        _time_exchange(link, TINY_BYTES, step)  # connections may have to be made
        latency_ns = min(_measure(link, TINY_BYTES, TINY_TRIES, step))

        # 2 a first size
        chunk_bytes = first_chunk_bytes(link.n_members)
        first_ns = min(_measure(link, chunk_bytes, 1, step))

        # 3 the rate
        wanted_bytes = _choose_chunk_bytes(chunk_bytes, first_ns, latency_ns)
        models: list[LinkModel] = []
        while not models or 4 * wanted_bytes >= 5 * chunk_bytes:
            chunk_bytes = wanted_bytes
            taken_ns = min(_measure(link, chunk_bytes, TRIES, step))
            models.append(
                make_model(link, latency_ns, (link.n_members - 1) * chunk_bytes, taken_ns)
            )
            wanted_bytes = _choose_chunk_bytes(chunk_bytes, taken_ns, latency_ns)
    return max(models, key=lambda model: model.rate_bit_per_s)


def agree_on_model(link: Transport, model: LinkModel | None, *, step: int) -> LinkModel | None:
    """Take the highest latency and the lowest rate of all ranks' models; every rank calls it.

    Args:
        link: The link between the ranks that must agree; its count of bytes does not change.
        model: This rank's model; None if it has none.
        step: The step that errors name.

    Returns:
        The model, equal on all ranks; None if no rank has one.
    """
    mine = (0, 0)
    if model is not None:
        mine = (round(model.latency_s * 1e9), max(1, round(model.rate_bit_per_s)))
    with uncounted(link):
        rows = gather_integers(link, mine, step=step)
    known = [row for row in rows if row[1]]
    if not known:
        return None
    latencies_ns, rates = zip(*known, strict=True)
    return LinkModel(
        max(latencies_ns) / 1e9, float(min(rates)), ring_above_bytes=link.ring_above_bytes
    )


def gather_integers(
    link: Transport, values: tuple[int, ...], *, step: int
) -> list[tuple[int, ...]]:
    """Gather a few integers below 2**63 from every rank, in rank order."""
    row = torch.tensor(values, dtype=torch.int64, device="cpu")
    rows = torch.empty(link.n_members, len(values), dtype=torch.int64, device="cpu")
    link.all_gather(rows, row, step=step).wait()
    return [tuple(each) for each in rows.tolist()]


@contextmanager
def uncounted(link: Transport) -> Iterator[None]:
    """Leave what is sent in the context out of the link's count of bytes."""
    before = link.counted
    try:
        yield
    finally:
        link.counted = before


def first_chunk_bytes(world_size: int) -> int:
    """Size the first chunk for each peer."""
    return max(1024, _FIRST_BYTES // (world_size - 1))


def _choose_chunk_bytes(chunk_bytes: int, taken_ns: int, latency_ns: int) -> int:
    """Size a chunk for the target time; integers only, so that all ranks agree."""
    transfer_ns = max(1, taken_ns - latency_ns)
    wanted = chunk_bytes * max(_TARGET_NS, TARGET_ROUNDS * latency_ns) // transfer_ns
    return min(MAX_CHUNK_BYTES, max(chunk_bytes, wanted))


def _time_exchange(link: Transport, chunk_bytes: int, step: int) -> int:
    """Time one all-to-all of ``chunk_bytes`` to each peer, in nanoseconds.

    All begin together, as with large votes: otherwise a worker that finds the other one ready sends
    at once, and its own announcement waits behind its bytes (see ``Gloo``).
    """
    chunks = torch.zeros(link.n_members, chunk_bytes, dtype=torch.uint8, device="cpu")
    received = torch.zeros_like(chunks)
    link.all_to_all(received[:, :1].contiguous(), chunks[:, :1].contiguous(), step=step).wait()
    return time_ns(lambda: link.all_to_all(received, chunks, step=step).wait())


def time_ns(exchange: Callable[[], None]) -> int:
    """Time an exchange, in nanoseconds."""
    start_ns = time.perf_counter_ns()
    exchange()
    return time.perf_counter_ns() - start_ns


def _measure(link: Transport, chunk_bytes: int, tries: int, step: int) -> list[int]:
    """Time some all-to-alls, each by its slowest rank, in nanoseconds; equal on all ranks."""
    times_ns = tuple(_time_exchange(link, chunk_bytes, step) for _ in range(tries))
    rows = gather_integers(link, times_ns, step=step)
    return [max(column) for column in zip(*rows, strict=True)]


def make_model(link: Transport, latency_ns: int, n_bytes: int, taken_ns: int) -> LinkModel:
    """Turn nanoseconds into a model; the bytes get at least half of the time, despite noise."""
    transfer_ns = max(taken_ns - latency_ns, taken_ns // 2, 1)
    rate = 8e9 * n_bytes / transfer_ns
    return LinkModel(latency_ns / 1e9, rate, ring_above_bytes=link.ring_above_bytes)
