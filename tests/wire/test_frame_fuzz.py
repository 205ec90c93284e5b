"""Random and damaged frames, as other ranks might send them."""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distlion.failures import Status
from distlion.kernels import Kernels
from distlion.kernels.cpu import INSTRUCTION_SETS, CpuKernels
from distlion.layout import ChunkShape
from distlion.wire.frame import (
    CHECKSUM_BYTES,
    FIELDS,
    HEADER_BYTES,
    Chunk,
    ChunkKind,
    Header,
    read_chunk,
    read_chunks,
    write_chunk,
)
from distlion.wire.verdict import Verdict, judge
from fuzz_settings import FUZZ, keep_on

REFERENCE = Kernels()
BACKENDS = [CpuKernels(name) for name in INSTRUCTION_SETS]

SHAPES = st.builds(
    ChunkShape, st.integers(1, 700), st.integers(0, 4).map(lambda n: 64 * n), st.booleans()
)
FIELDS_OF_ANY_KIND = {
    "step": st.integers(-(2**63), 2**63 - 1),
    "bucket": st.integers(0, 2**32 - 1),
    "sender": st.integers(0, 2**16 - 1),
    "settings": st.integers(0, 2**64 - 1),
    "status": st.sampled_from(Status),
    "culprit": st.integers(-(2**31), 2**31 - 1),
    "position": st.integers(-(2**31), 2**31 - 1),
    "cancelled_by_all": st.booleans(),
    "epoch": st.integers(0, 2**32 - 1),
}
# The gradients' scale and their digest share a place.
HEADERS = st.builds(
    Header,
    kind=st.just(ChunkKind.GRADIENT),
    grad_scale=st.floats(allow_nan=False),
    **FIELDS_OF_ANY_KIND,
) | st.builds(
    Header,
    kind=st.sampled_from([kind for kind in ChunkKind if kind is not ChunkKind.GRADIENT]),
    gradient_digest=st.integers(-(2**63), 2**63 - 1),
    **FIELDS_OF_ANY_KIND,
)


def write(shape: ChunkShape, header: Header, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    chunk = torch.empty(shape.n_bytes, dtype=torch.uint8)
    present = torch.randint(1 << 16, (shape.n_params,), generator=generator)
    payload = torch.randint(256, (shape.payload_bytes,), generator=generator, dtype=torch.uint8)
    write_chunk(BACKENDS[0], chunk, shape, header, present, payload)
    return chunk


def read(chunk: Tensor, shape: ChunkShape, header: Header) -> Chunk | None:
    return read_chunk(BACKENDS[0], chunk, shape, header)


def check_chunk(chunk: Chunk, shape: ChunkShape) -> None:
    """Whatever it says, its parts have the types and sizes that were agreed on."""
    assert chunk.present.shape == (shape.n_params,)
    assert chunk.present.dtype == torch.int64
    assert chunk.payload.shape == (shape.payload_bytes,)
    assert isinstance(chunk.header.kind, ChunkKind)
    assert isinstance(chunk.header.status, Status)
    assert isinstance(judge([chunk.header], [0]), Verdict)


def seal(chunk: Tensor) -> None:
    """Write the checksum that fits."""
    whole = chunk.numpy().tobytes()
    checksum = zlib.crc32(whole[HEADER_BYTES:], zlib.crc32(whole[: FIELDS.size]))
    packed = bytearray(checksum.to_bytes(CHECKSUM_BYTES, "little"))
    chunk[FIELDS.size : HEADER_BYTES] = torch.frombuffer(packed, dtype=torch.uint8)


def test_damaged_frames_are_refused() -> None:
    @given(
        shape=SHAPES,
        header=HEADERS,
        damage=st.dictionaries(st.integers(0, 10_000), st.integers(1, 255), min_size=1, max_size=3),
        lost=st.none() | st.integers(0, 10_000),
        seed=st.integers(0, 2**32),
    )
    @FUZZ
    def fuzz(
        shape: ChunkShape, header: Header, damage: dict[int, int], lost: int | None, seed: int
    ) -> None:
        whole = write(shape, header, seed)
        intact = read(whole, shape, header)
        assert intact is not None
        assert intact.header == header
        check_chunk(intact, shape)
        damaged = whole.clone()
        for place, bits in damage.items():
            damaged[place % shape.n_bytes] ^= bits
        if not torch.equal(damaged, whole):
            assert read(damaged, shape, header) is None
        if lost is not None:  # the rest is an older chunk's
            stale = write(shape, replace(header, step=header.step ^ 1), seed + 1)
            mixed = torch.cat([whole[: lost % shape.n_bytes], stale[lost % shape.n_bytes :]])
            is_whole = torch.equal(mixed, whole) or torch.equal(mixed, stale)
            assert (read(mixed, shape, header) is not None) == is_whole

    keep_on(fuzz)


def test_frames_of_random_bytes_or_of_another_shape_are_refused() -> None:
    @given(shape=SHAPES, other=SHAPES, header=HEADERS, junk=st.binary(max_size=600))
    @FUZZ
    def fuzz(shape: ChunkShape, other: ChunkShape, header: Header, junk: bytes) -> None:
        repeated = (junk or b"\0") * (shape.n_bytes // max(1, len(junk)) + 1)
        chunk = torch.frombuffer(bytearray(repeated[: shape.n_bytes]), dtype=torch.uint8)
        assert read(chunk, shape, header) is None
        chunk = write(other, header, 0)
        if other.n_bytes != shape.n_bytes:
            assert read(chunk, shape, header) is None
        cut = chunk[: max(HEADER_BYTES, len(junk))]
        if len(cut) < len(chunk):
            assert read(cut, other, header) is None
        rows = torch.stack([write(shape, replace(header, sender=rank), rank) for rank in range(3)])
        rows[1] = torch.frombuffer(bytearray(repeated[: shape.n_bytes]), dtype=torch.uint8)
        found = read_chunks(BACKENDS[0], rows, shape, header)
        assert [chunk is not None for chunk in found] == [True, False, True]

    keep_on(fuzz)


def test_frames_with_forged_fields_are_refused_or_read() -> None:
    @given(
        shape=SHAPES,
        header=HEADERS,
        fields=st.binary(min_size=FIELDS.size, max_size=FIELDS.size),
        forged=st.sets(st.integers(0, FIELDS.size - 1), min_size=1),
        body=st.binary(max_size=64),
    )
    @FUZZ
    def fuzz(
        shape: ChunkShape, header: Header, fields: bytes, forged: set[int], body: bytes
    ) -> None:
        chunk = write(shape, header, 1)
        for place in forged:
            chunk[place] = fields[place]
        room = chunk[HEADER_BYTES:][: len(body)]
        room[:] = torch.tensor(list(body), dtype=torch.uint8)[: len(room)]
        seal(chunk)
        found = read(chunk, shape, header)
        if found is not None:
            check_chunk(found, shape)
            verdict = judge([header, found.header, header], range(3))
            assert verdict.status in Status
            assert len(verdict.steps) == 3

    keep_on(fuzz)


def test_a_frame_shorter_than_its_header_is_refused() -> None:
    shape = ChunkShape(3, 64)
    header = Header(ChunkKind.VOTE, step=1, bucket=0, sender=0, settings=7)
    chunk = write(shape, header, 0)
    for n in range(HEADER_BYTES):
        assert read(chunk[:n], shape, header) is None
