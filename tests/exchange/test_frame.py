"""Frames: what is written is read back, and what was damaged is not."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distlion.exchange.frame import (
    HEADER_BYTES,
    ChunkKind,
    ChunkShape,
    Header,
    Status,
    read_chunk,
    write_chunk,
)
from distlion.exchange.verdict import judge

HEADER = Header(ChunkKind.VOTE, step=7, bucket=2, sender=1, settings=(1 << 64) - 5, detail=-9)


def make_chunk(shape: ChunkShape, header: Header, present: torch.Tensor) -> torch.Tensor:
    chunk = torch.full((shape.n_bytes,), 255, dtype=torch.uint8)
    payload = torch.arange(shape.payload_bytes, dtype=torch.int64).to(torch.uint8)
    write_chunk(chunk, shape, header, present, payload)
    return chunk


def test_a_header_takes_64_bytes() -> None:
    assert HEADER_BYTES == 64


@given(st.integers(1, 700), st.integers(0, 4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_chunk_is_read_as_it_was_written(n_params: int, blocks: int, has_counts: bool) -> None:
    shape = ChunkShape(n_params, 64 * blocks, has_counts)
    highest = 65536 if has_counts else 2
    present = torch.randint(highest, (n_params,), generator=torch.Generator().manual_seed(n_params))
    chunk = make_chunk(shape, HEADER, present)
    read = read_chunk(chunk, shape, kind=ChunkKind.VOTE, bucket=2, sender=1)
    assert read is not None
    assert read.header == HEADER
    assert torch.equal(read.present, present)
    assert torch.equal(read.payload, torch.arange(64 * blocks, dtype=torch.int64).to(torch.uint8))


@given(st.integers(0, 64 * 8 + 64 * 8 + 128 * 8 - 1))
@settings(max_examples=300, deadline=None)
def test_any_flipped_bit_is_found(bit: int) -> None:
    shape = ChunkShape(n_params=3, payload_bytes=128)
    chunk = make_chunk(shape, HEADER, torch.tensor([1, 0, 1]))
    chunk[bit // 8] ^= 1 << (bit % 8)
    assert read_chunk(chunk, shape, kind=ChunkKind.VOTE, bucket=2, sender=1) is None


@given(st.binary(min_size=256, max_size=256))
@settings(max_examples=200, deadline=None)
def test_junk_is_no_chunk(junk: bytes) -> None:
    shape = ChunkShape(n_params=3, payload_bytes=128)
    chunk = torch.frombuffer(bytearray(junk), dtype=torch.uint8)
    assert read_chunk(chunk, shape, kind=ChunkKind.VOTE, bucket=2, sender=1) is None


def test_a_chunk_of_another_sender_bucket_or_kind_is_refused() -> None:
    shape = ChunkShape(n_params=3, payload_bytes=128)
    chunk = make_chunk(shape, HEADER, torch.tensor([1, 0, 1]))
    for kind, bucket, sender in [
        (ChunkKind.REPLY, 2, 1),
        (ChunkKind.VOTE, 1, 1),
        (ChunkKind.VOTE, 2, 0),
    ]:
        assert read_chunk(chunk, shape, kind=kind, bucket=bucket, sender=sender) is None


def headers(n: int) -> list[Header]:
    return [
        Header(ChunkKind.REPLY, step=3, bucket=0, sender=rank, settings=11) for rank in range(n)
    ]


def test_equal_headers_are_fine() -> None:
    assert judge(headers(4), range(4)).status is Status.OK


def test_a_rank_at_another_step_is_named_by_the_majority() -> None:
    found = headers(3)
    found[1] = replace(found[1], step=2)
    verdict = judge(found, range(len(found)))
    assert (verdict.status, verdict.culprits, verdict.steps) == (
        Status.STEP,
        (1,),
        ((0, 3), (1, 2), (2, 3)),
    )


def test_without_a_majority_nobody_is_named() -> None:
    found = headers(2)
    found[1] = replace(found[1], step=2)
    assert judge(found, range(len(found))).culprits == ()


def test_another_step_outweighs_the_settings_that_follow_from_it() -> None:
    found = headers(3)
    found[2] = replace(found[2], step=2, settings=12)
    assert judge(found, range(len(found))).status is Status.STEP


def test_all_culprits_of_the_worst_finding_are_named() -> None:
    found = [
        replace(header, status=Status.NON_FINITE, culprit=culprit, detail=4 + culprit)
        for header, culprit in zip(headers(3), (2, 1, 2), strict=True)
    ]
    verdict = judge(found, range(len(found)))
    assert (verdict.culprits, verdict.detail) == ((1, 2), 5)
