"""What holds for all ops of every backend, and for a step put together from them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from backends import CPU, Backend, over_cores, over_others
from conformance import DTYPES, MANY, Memory, conform, draw_words, make_bucket, make_segments
from distlion.kernels import BlockVotes, Coin, Kernels, ReplyFormat
from distlion.kernels.cpu import Core, CpuKernels
from kernel_cases import ROUNDING, TIE, ZERO, all_ops, committing, counting, encoding

# Threads get 262,144 coordinates at least: this is enough for three, with cuts inside parameters.
THREADED = (600_001, 5, 64, 200_003, 82_000)


@over_cores
@pytest.mark.parametrize("encoder", ["signs", "ternary", "pairs", "levels, 4 planes, l1"])
def test_votes_do_not_depend_on_threads(encoder: str, n_threads: int, backend: Backend) -> None:
    conform(backend, *encoding(encoder, THREADED, (torch.float32, torch.bfloat16), wild=True))


@over_cores
@pytest.mark.parametrize("counter", ["signs", "pairs", "ones", "levels of 3 planes"])
def test_counts_do_not_depend_on_threads(counter: str, n_threads: int, backend: Backend) -> None:
    conform(backend, *counting(counter, 17, THREADED, share=0.8))


@over_cores
@pytest.mark.parametrize("op", ["commit", "step_alone"])
def test_moves_do_not_depend_on_threads(op: str, n_threads: int, backend: Backend) -> None:
    dtypes = (torch.bfloat16, torch.float32)
    case = committing(op, THREADED, dtypes, ReplyFormat.COUNT, 3, rounding=ROUNDING)
    conform(backend, *case)


@over_others
def test_votes_and_replies_need_not_be_contiguous(backend: Backend) -> None:
    def run(k: Kernels, g: Generator, m: Memory) -> None:
        bucket = make_bucket(MANY, n_shards=2)
        n_blocks = bucket.n_blocks
        votes = m.place(draw_words(g, n_blocks, 6, 2)).permute(1, 0, 2, 3)
        present = (torch.rand(len(MANY), 6, generator=g) < 0.7).T
        assert not votes.is_contiguous()
        assert not present.is_contiguous()
        k.count_ternary(BlockVotes(votes, present, bucket, 0), out=m.packed(n_blocks, 2))
        k.count_pairs(BlockVotes(votes, present, bucket, 0), None, out=m.packed(n_blocks, 2))
        strided = votes[:, :, ::2]
        k.count_signs(BlockVotes(strided, present, bucket, 0), TIE, out=m.packed(n_blocks, 1))
        k.count_ones(BlockVotes(strided, present, bucket, 0), out=m.packed(n_blocks, 3))
        k.count_levels(BlockVotes(votes, present, bucket, 0), TIE, out=m.packed(n_blocks, 1))
        reply = m.place(draw_words(g, 2, n_blocks)).transpose(0, 1)
        segments = make_segments(bucket, g, m)
        k.commit(segments, [1] * 12, reply, reply_format=ReplyFormat.TERNARY, rounding=None)
        reply = m.place(draw_words(g, n_blocks, 2))[:, :1]
        k.commit(segments, [1] * 12, reply, reply_format=ReplyFormat.SIGN, rounding=None)

    conform(backend, "not contiguous", run)


@over_others
def test_segments_gathered_once_serve_several_steps(backend: Backend) -> None:
    def run(k: Kernels, g: Generator, m: Memory) -> list[Tensor]:
        bucket = make_bucket(MANY)
        segments = k.gather(make_segments(bucket, g, m, dtypes=(torch.bfloat16, torch.bfloat16)))
        flags = []
        for n_present in (1, 3, 2):  # which also changes a = lr / n
            present = [n_present * (index % 4 != 2) for index in range(len(MANY))]
            flags.append(k.encode_signs(segments, ZERO, out=m.packed(bucket.n_blocks, 1)))
            reply = m.place(draw_words(g, bucket.n_blocks, 2))
            k.commit(segments, present, reply, reply_format=ReplyFormat.COUNT, rounding=ROUNDING)
            k.commit(segments, present, reply, reply_format=ReplyFormat.TERNARY, rounding=None)
            k.update_momentum(segments, present)
            k.step_alone(segments, rounding=None)
            flags.append(k.check_finite(segments))
        return flags

    conform(backend, "gathered", run)


@over_cores
def test_tensors_read_by_their_attributes_give_the_same(backend: Backend) -> None:
    """Which is how they are read where torch has no exchange table."""
    assert isinstance(backend.kernels, CpuKernels)
    kernels = CpuKernels(backend.kernels.instruction_set)
    kernels._core = Core(kernels.instruction_set, None)
    by_attributes = Backend(f"{backend.name} by attributes", CPU, kernels)
    for name, run in all_ops(sizes=(65, 0, 1000)):
        conform(by_attributes, name, run)
        conform(backend, name, run)


@over_others
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    dtypes=st.sampled_from(DTYPES),
    n_workers=st.integers(1, 20),
    reply_format=st.sampled_from(ReplyFormat),
    n_shards=st.integers(1, 3),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=10, derandomize=True)
def test_a_step_is_equal_from_the_votes_to_the_commit(
    sizes: list[int],
    dtypes: tuple[torch.dtype, torch.dtype],
    n_workers: int,
    reply_format: ReplyFormat,
    n_shards: int,
    share: float,
    seed: int,
    backend: Backend,
) -> None:
    bucket = make_bucket(sizes, n_shards)
    planes = {
        ReplyFormat.SIGN: 1,
        ReplyFormat.TERNARY: 2,
        ReplyFormat.COUNT: n_workers.bit_length(),
    }

    def run(k: Kernels, g: Generator, m: Memory) -> list[Tensor]:
        present = torch.rand(n_workers, len(sizes), generator=g) < share
        workers = [
            [
                segment if present[rank, index] else segment._replace(grad=None)
                for index, segment in enumerate(make_segments(bucket, g, m, dtypes=dtypes))
            ]
            for rank in range(n_workers)
        ]
        votes = m.packed(n_workers, bucket.n_blocks, 1)
        flags = [
            k.encode_signs(segments, Coin(ZERO.key + rank), out=votes[rank])
            for rank, segments in enumerate(workers)
        ]
        reply = m.packed(bucket.n_blocks, planes[reply_format])
        for first in range(0, bucket.n_blocks, bucket.shard_blocks or 1):
            blocks = slice(first, first + bucket.shard_blocks)
            if reply_format is ReplyFormat.COUNT:
                k.count_ones(
                    BlockVotes(votes[:, blocks], present, bucket, first), out=reply[blocks]
                )
            else:
                tie = TIE if reply_format is ReplyFormat.SIGN else None
                k.count_signs(
                    BlockVotes(votes[:, blocks], present, bucket, first), tie, out=reply[blocks]
                )
        k.commit(
            workers[0],
            present.sum(0).tolist(),
            reply,
            reply_format=reply_format,
            rounding=ROUNDING if seed % 2 else None,
        )
        return flags

    case = f"step {sizes} {dtypes} {n_workers} {reply_format} {n_shards} {share} {seed}"
    conform(backend, case, run)
