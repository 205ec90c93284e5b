"""Measure the cost of a step's arithmetic here, with the kernels that steps use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from distlion.kernels import (
    BlockVotes,
    Coefficients,
    Coins,
    Kernels,
    ReplyFormat,
    Segment,
    choose_kernels,
)
from distlion.kernels.contract import CHECKSUM_BYTES
from distlion.layout import BLOCK_WORDS, HEADER_BYTES, BucketLayout, Slot
from distlion_lab.planning.machine import CPU, Machine

_N_ELEMENTS = 1 << 22
_N_WORKERS = 4
_TRIES = 7
_COEFFICIENTS = Coefficients(beta1=0.9, beta2=0.99, lr=1e-4, weight_decay=0.1)


@dataclass(frozen=True)
class KernelRates:
    """Memory throughput of a plain read and of the kernels.

    Attributes:
        kernels: Instruction set of the C++ core, or "reference".
        read_bytes_per_s: Rate of a plain sum of float32 numbers.
        machine: The kernels' rates. Frame headers are not measured; their times are taken from
            ``CPU``.
        core_share: Share of the time in which this thread had a core; less than 1 where other
            processes took it.
    """

    kernels: str
    read_bytes_per_s: float
    machine: Machine
    core_share: float = 1.0

    @property
    def encode_ratio(self) -> float:
        """Rate of encoding as a share of the plain read."""
        return self.machine.encode_bytes_per_s / self.read_bytes_per_s


def measure_kernels() -> KernelRates:
    """Time encode, count, commit and framing on 4 Mi elements, as many threads as torch uses.

    Takes about a tenth of a second with the C++ core and 100 MB of memory.

    Raises:
        KernelBackendError: There are no kernels, or not the ones asked for.
    """
    kernels, clock = choose_kernels(torch.device("cpu")), _CoreClock()
    bucket = BucketLayout(0, (0,), (Slot("measured", _N_ELEMENTS, 0, 0),), _N_WORKERS)
    generator = torch.Generator().manual_seed(0)
    param, grad, exp_avg = torch.randn(
        3, _N_ELEMENTS, generator=generator, dtype=torch.float32, device="cpu"
    )
    segments = kernels.gather([Segment(bucket.slots[0], param, grad, exp_avg, _COEFFICIENTS)])
    coins = Coins(seed=0, step=0, voter=0)
    vote = torch.zeros(bucket.n_blocks, 1, BLOCK_WORDS, dtype=torch.int64, device="cpu")
    votes = torch.zeros(_N_WORKERS, *vote.shape, dtype=torch.int64, device="cpu")
    cast = BlockVotes(votes, torch.ones(_N_WORKERS, 1, dtype=torch.bool, device="cpu"), bucket, 0)

    def commit() -> None:
        kernels.commit(segments, [_N_WORKERS], vote, reply_format=ReplyFormat.SIGN, rounding=None)

    def count() -> None:
        kernels.count_signs(cast, coins.tie, out=torch.empty_like(vote))

    vote_bytes = vote.nbytes
    machine = replace(
        CPU,
        encode_bytes_per_s=_rate(
            lambda: kernels.encode_signs(segments, coins.zero, out=vote),
            grad.nbytes + exp_avg.nbytes + vote_bytes,
        ),
        commit_bytes_per_s=_rate(commit, 5 * grad.nbytes + vote_bytes),
        count_bytes_per_s=_rate(count, votes.nbytes),
        frame_bytes_per_s=_rate(lambda: _frame(votes, kernels), votes.nbytes),
    )
    name = getattr(kernels, "instruction_set", "reference")
    read_bytes_per_s = _rate(grad.sum, grad.nbytes)
    return KernelRates(name, read_bytes_per_s, machine, clock.read_share())


class _CoreClock:
    """A clock for the share of time in which this thread had a core."""

    def __init__(self) -> None:
        self._start_s, self._start_cpu_s = time.perf_counter(), time.thread_time()

    def read_share(self) -> float:
        """Return the share, 0 to 1."""
        elapsed_s = max(1e-9, time.perf_counter() - self._start_s)
        return min(1.0, (time.thread_time() - self._start_cpu_s) / elapsed_s)


def _frame(votes: Tensor, kernels: Kernels) -> None:
    """Frame votes as chunks are framed: copy them, and compute the checksum."""
    payloads = votes.view(_N_WORKERS, -1).view(torch.uint8)
    shape = len(payloads), HEADER_BYTES + payloads.shape[1]
    frames = torch.empty(shape, dtype=torch.uint8, device="cpu")
    kernels.write_frames(
        frames, bytes(HEADER_BYTES), payloads, checksum_at=HEADER_BYTES - CHECKSUM_BYTES
    )


def _rate(run: Callable[[], object], n_bytes: int) -> float:
    """Return bytes a second, by the best of some tries: other processes can only slow one down."""
    run()  # touches the memory for the first time
    times_s = []
    for _ in range(_TRIES):
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    return n_bytes / max(1e-9, min(times_s))
