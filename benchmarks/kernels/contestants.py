"""What is timed: groups of calls without arguments, all over the same tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from lions import (
    BETA1,
    BETA2,
    LR,
    WEIGHT_DECAY,
    build_lion_pytorch,
    commit_in_torch,
    encode_in_torch,
    lion_as_published,
    lion_by_lerp,
    lion_foreach,
    lion_in_place,
)
from torch import Tensor

from distlion.kernels import BlockVotes, Coefficients, Coin, ReplyFormat, Segment
from distlion.kernels.contract import CHECKSUM_BYTES
from distlion.kernels.cpu import CpuKernels
from distlion.layout import (
    BLOCK_WORDS,
    HEADER_BYTES,
    WORD_ELEMENTS,
    BucketLayout,
    fill_buckets,
    place_parameters,
)

COIN = Coin(1)
WORKERS = (4, 8, 64)
BITS = (2, 4, 8)
LEVEL_STEP = 0.5
SMALL_TENSORS, SMALL_ELEMENTS = 300, 1000
SMALL_BATCH = 100
# Unpacked votes take a byte each, and torch.mode its time.
COUNTING_SHARE = 64
EVICTION_ELEMENTS = 32 << 20
# Every shard is whole blocks.
PARAMS_MULTIPLE = max(WORKERS) * BLOCK_WORDS * WORD_ELEMENTS

Contestants = dict[str, Callable[[], object]]


def build_bucket(sizes: list[int], n_shards: int) -> BucketLayout:
    slots = place_parameters([f"p{i}" for i in range(len(sizes))], sizes)
    kinds = [0] * len(sizes)
    return fill_buckets(slots, kinds, n_shards=n_shards, bucket_elements=1 << 40)[0]


def build_segments(
    tensors: list[tuple[Tensor, Tensor, Tensor]], *, cautious: bool = False
) -> tuple[BucketLayout, list[Segment]]:
    """Make a bucket of (parameter, gradient, momentum)."""
    bucket = build_bucket([len(param) for param, _, _ in tensors], n_shards=1)
    hyper = Coefficients(BETA1, BETA2, LR, WEIGHT_DECAY, cautious=cautious)
    return bucket, [Segment(s, *t, hyper) for s, t in zip(bucket.slots, tensors, strict=True)]


def make_output(bucket: BucketLayout, n_planes: int) -> Tensor:
    return torch.empty((bucket.n_blocks, n_planes, BLOCK_WORDS), dtype=torch.int64)


class Data:
    """The tensors: ``n_params`` normal numbers each, cut into ``n_tensors`` equal parts.

    ``compiles`` says whether torch.compile is asked to join.
    """

    def __init__(
        self, n_params: int, n_tensors: int, kernels: CpuKernels, *, compiles: bool
    ) -> None:
        self.kernels = kernels
        self.compiles = compiles
        self.n_params = n_params
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randn(n_params, generator=generator) for _ in range(3)]
        self.param, self.grad, self.exp_avg = rows
        self.tensors = list(zip(*(row.chunk(n_tensors) for row in rows), strict=True))
        self.bucket, self.segments = build_segments(self.tensors)
        # Streaming writes any bits, NaN and denormal numbers among them: not for arithmetic.
        self.streamed_exp_avg, self.streamed_param = torch.zeros(2, n_params).unbind()
        self.signs = make_output(self.bucket, 1)
        least, most = -(2**63), 2**63 - 1
        size = (n_params // WORD_ELEMENTS * max(BITS),)
        self.random_words = torch.randint(least, most, size, generator=generator)

    def encode_signs(self) -> None:
        if not self.kernels.encode_signs(self.segments, COIN, out=self.signs).all():
            raise SystemExit("the data is not finite any more: what follows would not be a step")

    def encode_levels(self, out: Tensor) -> None:
        self.kernels.encode_levels(self.segments, COIN, norm="l1", step=LEVEL_STEP, out=out)

    def commit(self) -> None:
        present = [1] * len(self.segments)
        self.kernels.commit(
            self.segments, present, self.signs, reply_format=ReplyFormat.SIGN, rounding=None
        )

    def stream_encode(self) -> None:
        self.kernels._core.stream_encode(
            self.grad, self.exp_avg, self.signs.view(-1), torch.get_num_threads()
        )

    def stream_commit(self, reply: Tensor | None) -> None:
        self.kernels._core.stream_commit(
            self.grad, self.streamed_exp_avg, self.streamed_param, reply, torch.get_num_threads()
        )


def build_steps(data: Data) -> Contestants:
    """Build Lions: ours, the floors of their bytes, and others."""
    buffer = torch.empty_like(data.tensors[0][0])

    def each(lion: Callable[..., None]) -> None:
        for tensors in data.tensors:
            lion(*tensors)

    contestants = {
        "stream_encode": data.stream_encode,
        "encode_signs": data.encode_signs,
        "stream_commit": partial(data.stream_commit, data.signs.view(-1)),
        "commit": data.commit,
        "stream_step": partial(data.stream_commit, None),
        "step_alone": lambda: data.kernels.step_alone(data.segments, rounding=None),
        "eager": partial(each, lion_in_place),
        "eager as published": partial(each, lion_as_published),
        "eager by lerp": partial(each, partial(lion_by_lerp, buffer=buffer)),
        "foreach": partial(lion_foreach, *zip(*data.tensors, strict=True)),
        "lion-pytorch": build_lion_pytorch(data.tensors).step,
    }
    if data.compiles:
        # What was compiled before is for another number of threads.
        torch.compiler.reset()
        compiled = torch.compile(lion_in_place, fullgraph=True)
        contestants["compiled"] = partial(each, compiled)
        shifts = torch.arange(8, dtype=torch.uint8)
        encode = torch.compile(partial(encode_in_torch, shifts=shifts), fullgraph=True)
        commit = torch.compile(partial(commit_in_torch, shifts=shifts), fullgraph=True)

        def compiled_in_two_passes() -> None:
            packed = [encode(g, m) for _, g, m in data.tensors]
            for tensors, bits in zip(data.tensors, packed, strict=True):
                commit(*tensors, bits)

        contestants["compiled in two passes"] = compiled_in_two_passes
    return contestants


def build_levels(data: Data) -> Contestants:
    outs = {bits: make_output(data.bucket, bits) for bits in BITS}
    return {
        "encode_signs": data.encode_signs,
        **{f"encode_levels p={p}": partial(data.encode_levels, outs[p]) for p in BITS},
    }


def build_masks(data: Data) -> Contestants:
    """Build encoders with a mask beside those without, and counts of pairs beside ternary ones."""
    kernels, two_planes = data.kernels, make_output(data.bucket, 2)
    _, cautious = build_segments(data.tensors, cautious=True)
    calls: Contestants = {
        "encode_signs": data.encode_signs,
        "encode_signs cautious": lambda: kernels.encode_signs(cautious, COIN, out=data.signs),
        "encode_ternary": lambda: kernels.encode_ternary(data.segments, out=two_planes),
        "encode_ternary cautious": lambda: kernels.encode_ternary(cautious, out=two_planes),
        "encode_pairs": lambda: kernels.encode_pairs(data.segments, COIN, out=two_planes),
    }
    for n in WORKERS:
        for op in ("count_ternary", "count_pairs"):
            calls[f"{op} N={n}"] = count_call(data, op, n, bits=2)
    return calls


def count_call(
    data: Data, op: str, n_workers: int, *, bits: int = 1, whole: bool = False
) -> Callable[[], object]:
    """Build a count of one owner's shard, or of the ``whole`` bucket."""
    sizes = [len(param) for param, _, _ in data.tensors]
    bucket = build_bucket(sizes, n_shards=1 if whole else n_workers)
    shape = (n_workers, bucket.shard_blocks, bits, BLOCK_WORDS)
    votes = data.random_words[: shape[0] * shape[1] * shape[2] * shape[3]].view(shape)
    present = torch.ones((n_workers, len(sizes)), dtype=torch.bool)
    tie = () if op in ("count_ones", "count_ternary") else (COIN,)
    reply_planes = _count_reply_planes(op, n_workers)
    out = torch.empty((bucket.shard_blocks, reply_planes, BLOCK_WORDS), dtype=torch.int64)
    return partial(getattr(data.kernels, op), BlockVotes(votes, present, bucket, 0), *tie, out=out)


def _count_reply_planes(op: str, n_workers: int) -> int:
    if op == "count_ones":
        return n_workers.bit_length()
    return 2 if op == "count_ternary" else 1


def build_counts(data: Data) -> Contestants:
    calls: Contestants = {"encode_signs": data.encode_signs, "commit": data.commit}
    for n in WORKERS:
        calls[f"count_signs N={n}"] = count_call(data, "count_signs", n)
        calls[f"count_ones N={n}"] = count_call(data, "count_ones", n)
        for bits in BITS:
            calls[f"count_levels p={bits} N={n}"] = count_call(data, "count_levels", n, bits=bits)
    calls["count_signs N=4 whole"] = count_call(data, "count_signs", 4, whole=True)
    return calls


def build_small(data: Data) -> Contestants:
    """Build batches of calls, since one takes 100 microseconds."""

    def batch(n_tensors: int, n_elements: int) -> tuple[Callable[[], None], Callable[[], None]]:
        bucket, segments = build_segments(
            [tuple(torch.randn(n_elements) for _ in range(3)) for _ in range(n_tensors)]
        )
        out = make_output(bucket, 1)
        gathered = data.kernels.gather(segments)

        def encode() -> None:
            for _ in range(SMALL_BATCH):
                data.kernels.encode_signs(gathered, COIN, out=out)

        def gather() -> None:
            for _ in range(SMALL_BATCH):
                data.kernels.gather(segments)

        return encode, gather

    many, gather_many = batch(SMALL_TENSORS, SMALL_ELEMENTS)
    one, _ = batch(1, SMALL_TENSORS * SMALL_ELEMENTS)
    return {"many small": many, "gather many": gather_many, "one of their size": one}


def build_packing(data: Data) -> Contestants:
    direction = torch.lerp(data.grad, data.exp_avg, BETA1)
    positive = direction > 0

    def pack() -> np.ndarray:
        return np.packbits(positive.numpy(), bitorder="little")

    def pack_directions() -> np.ndarray:
        torch.lerp(data.grad, data.exp_avg, BETA1, out=direction)
        torch.gt(direction, 0, out=positive)
        return pack()

    data.encode_signs()
    differing = np.unpackbits(pack() ^ data.signs.view(-1).numpy().view(np.uint8)).sum()
    # lerp rounds in another order, which turns the sign of a few directions next to 0.
    expect(differing <= 8 + data.n_params // 2**16, "packed signs")
    return {
        "encode_signs": data.encode_signs,
        "packbits": pack,
        "direction and packbits": pack_directions,
    }


def build_counting(data: Data) -> Contestants:
    """Build majorities of 8 workers over a part of the parameters."""
    n_workers, n_params = 8, data.n_params // COUNTING_SHARE
    bucket = build_bucket([n_params], n_shards=1)
    votes = data.random_words[: n_workers * bucket.n_blocks * BLOCK_WORDS]
    packed = votes.view(n_workers, bucket.n_blocks, 1, BLOCK_WORDS)
    present = torch.ones((n_workers, 1), dtype=torch.bool)
    cast = BlockVotes(packed, present, bucket, 0)
    out = make_output(bucket, 1)

    def count() -> None:
        data.kernels.count_signs(cast, COIN, out=out)

    def unpack() -> np.ndarray:
        rows = votes.view(n_workers, -1).numpy().view(np.uint8)
        return np.unpackbits(rows, axis=1, bitorder="little")

    def unpack_and_sum() -> np.ndarray:
        return unpack().sum(axis=0, dtype=np.uint8) > n_workers // 2

    unpacked = torch.from_numpy(unpack()).to(torch.int8)
    count()
    majority = np.unpackbits(out.view(-1).numpy().view(np.uint8), bitorder="little")
    decided = (unpacked.sum(0) != n_workers // 2).numpy()
    expect(bool((majority == unpack_and_sum())[decided].all()), "majorities")
    return {
        "count_signs N=8": count,
        "torch.mode": lambda: torch.mode(unpacked, 0),
        "unpack and sum": unpack_and_sum,
    }


def build_checks(data: Data) -> Contestants:
    payload = data.random_words[: data.n_params // WORD_ELEMENTS].view(torch.uint8)
    content = payload.numpy()
    row, front = payload.unsqueeze(0), bytes(HEADER_BYTES)
    frame = torch.empty(1, HEADER_BYTES + payload.numel(), dtype=torch.uint8)
    checksum_at = HEADER_BYTES - CHECKSUM_BYTES

    def write_frame() -> None:
        data.kernels.write_frames(frame, front, row, checksum_at=checksum_at)

    def copy_and_sum() -> int:
        copy = content.copy()
        return zlib.crc32(copy, zlib.crc32(front[:checksum_at]))

    write_frame()
    written = bytes(frame[0, checksum_at:HEADER_BYTES].tolist())
    expect(written == copy_and_sum().to_bytes(CHECKSUM_BYTES, "little"), "checksums")
    return {
        "frame": write_frame,
        "copy and zlib.crc32": copy_and_sum,
        "digest": lambda: data.kernels.digests([data.grad]),
    }


def expect(equal: bool, what: str) -> None:
    if not equal:
        raise SystemExit(f"the contestants' {what} differ: their times cannot be compared")
