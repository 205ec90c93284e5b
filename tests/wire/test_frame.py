"""Frames: what is written is read back, and what was damaged is not."""

import dataclasses
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distlion.failures import Status
from distlion.kernels import choose_kernels
from distlion.layout import HEADER_BYTES, ChunkShape
from distlion.wire.frame import (
    CHECKSUM_BYTES,
    FIELDS,
    HEADER_TYPE,
    ChunkKind,
    Header,
    read_chunk,
    read_chunks,
    write_chunk,
    write_chunks,
)

KERNELS = choose_kernels(torch.device("cpu"))

HEADER = Header(
    ChunkKind.VOTE,
    step=7,
    bucket=2,
    sender=1,
    settings=(1 << 64) - 5,
    status=Status.NON_FINITE,
    culprit=5,
    position=6,
    cancelled_by_all=True,
    gradient_digest=-9,
)


def make_chunk(shape: ChunkShape, header: Header, present: torch.Tensor) -> torch.Tensor:
    chunk = torch.full((shape.n_bytes,), 255, dtype=torch.uint8)
    payload = torch.arange(shape.payload_bytes, dtype=torch.int64).to(torch.uint8)
    write_chunk(KERNELS, chunk, shape, header, present, payload)
    return chunk


def test_an_amended_header_differs_in_what_was_given_alone() -> None:
    before = Header(ChunkKind.VOTE, 1, 2, 3, 4)
    for field in dataclasses.fields(Header):
        changes = {field.name: 77}
        assert before.amended(**changes) == dataclasses.replace(before, **changes)  # type: ignore[arg-type]
    assert before == Header(ChunkKind.VOTE, 1, 2, 3, 4)


def test_a_header_takes_64_bytes() -> None:
    assert FIELDS.size + CHECKSUM_BYTES == HEADER_TYPE.itemsize == HEADER_BYTES == 64


@given(st.integers(1, 700), st.integers(0, 4), st.booleans())
@settings(max_examples=60)
def test_a_chunk_is_read_as_it_was_written(n_params: int, blocks: int, has_counts: bool) -> None:
    shape = ChunkShape(n_params, 64 * blocks, has_counts)
    highest = 65536 if has_counts else 2
    present = torch.randint(highest, (n_params,), generator=torch.Generator().manual_seed(n_params))
    chunk = make_chunk(shape, HEADER, present)
    read = read_chunk(KERNELS, chunk, shape, HEADER)
    assert read is not None
    assert read.header == HEADER
    assert torch.equal(read.present, present)
    assert torch.equal(read.payload, torch.arange(64 * blocks, dtype=torch.int64).to(torch.uint8))


def test_gradients_travel_with_their_scale_instead_of_their_digest() -> None:
    shape = ChunkShape(n_params=3, payload_bytes=64)
    header = replace(HEADER, kind=ChunkKind.GRADIENT, grad_scale=1 / 3)
    chunk = make_chunk(shape, header, torch.tensor([1, 0, 1]))
    read = read_chunk(KERNELS, chunk, shape, header)
    assert read is not None
    assert read.header == replace(header, gradient_digest=0)


@given(st.integers(0, 64 * 8 + 64 * 8 + 128 * 8 - 1))
@settings(max_examples=300)
def test_any_flipped_bit_is_found(bit: int) -> None:
    shape = ChunkShape(n_params=3, payload_bytes=128)
    chunk = make_chunk(shape, HEADER, torch.tensor([1, 0, 1]))
    chunk[bit // 8] ^= 1 << (bit % 8)
    assert read_chunk(KERNELS, chunk, shape, HEADER) is None


def write_three(senders: list[int]) -> tuple[torch.Tensor, ChunkShape, torch.Tensor]:
    """Write chunks that differ in their payloads, and then in their senders."""
    shape = ChunkShape(n_params=3, payload_bytes=128)
    payloads = torch.arange(3 * 128, dtype=torch.int64).to(torch.uint8).view(3, 128)
    rows = torch.zeros(3, shape.n_bytes, dtype=torch.uint8)
    write_chunks(KERNELS, rows, shape, HEADER, torch.ones(3), payloads)
    for row, sender in enumerate(senders):
        header = replace(HEADER, sender=sender)
        write_chunk(KERNELS, rows[row], shape, header, torch.ones(3), payloads[row])
    return rows, shape, payloads


def test_chunks_written_together_have_payloads_and_checksums_of_their_own() -> None:
    rows, shape, payloads = write_three(senders=[])
    for row, payload in zip(rows, payloads, strict=True):
        chunk = read_chunk(KERNELS, row, shape, HEADER)
        assert chunk is not None
        assert torch.equal(chunk.payload, payload)


def test_one_damaged_chunk_does_not_stain_the_others() -> None:
    rows, shape, payloads = write_three(senders=[0, 1, 2])
    rows[1, -1] ^= 1
    chunks = read_chunks(KERNELS, rows, shape, HEADER)
    assert chunks.whole.tolist() == [True, False, True]
    assert torch.equal(chunks.payloads[::2], payloads[::2])


@given(st.binary(min_size=256, max_size=256))
@settings(max_examples=200)
def test_junk_is_no_chunk(junk: bytes) -> None:
    shape = ChunkShape(n_params=3, payload_bytes=128)
    chunk = torch.frombuffer(bytearray(junk), dtype=torch.uint8)
    assert read_chunk(KERNELS, chunk, shape, HEADER) is None


def test_a_chunk_of_another_epoch_is_refused() -> None:
    shape = ChunkShape(n_params=3, payload_bytes=128)
    late = replace(HEADER, epoch=(1 << 32) - 1)
    chunk = make_chunk(shape, late, torch.tensor([1, 0, 1]))
    assert read_chunk(KERNELS, chunk, shape, HEADER) is None
    read = read_chunk(KERNELS, chunk, shape, late)
    assert read is not None
    assert read.header == late
    rows = torch.stack([make_chunk(shape, replace(late, sender=n), torch.ones(3)) for n in (0, 1)])
    assert not read_chunks(KERNELS, rows, shape, replace(late, epoch=late.epoch - 1)).whole.any()
    assert read_chunks(KERNELS, rows, shape, late).whole.all()


def test_a_chunk_of_another_sender_bucket_or_kind_is_refused() -> None:
    shape = ChunkShape(n_params=3, payload_bytes=128)
    chunk = make_chunk(shape, HEADER, torch.tensor([1, 0, 1]))
    for kind, bucket, sender in [
        (ChunkKind.REPLY, 2, 1),
        (ChunkKind.VOTE, 1, 1),
        (ChunkKind.VOTE, 2, 0),
    ]:
        like = replace(HEADER, kind=kind, bucket=bucket, sender=sender)
        assert read_chunk(KERNELS, chunk, shape, like) is None
