"""Frames of every backend are those of the reference, and of zlib."""

from __future__ import annotations

import zlib

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from backends import TRUTH, Backend, over_all, over_cores, over_others
from distlion.kernels.contract import CHECKSUM_BYTES, FrameFormat

HEAD_BYTES, CHECKSUM_AT, PRESENCE_AT = 64, 60, 64
MASK = bytes(0 if 16 <= byte < 24 or byte >= CHECKSUM_AT else 0xFF for byte in range(HEAD_BYTES))
SIZES = (0, 1, 7, 8, 9, 63, 64, 65, 191, 1023, 1024, 4099, 65_535, 65_536, 65_537, 200_000)


def draw_octets(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def make_front(n_bytes: int = 128) -> bytes:
    return bytes(draw_octets(n_bytes, seed=1).tolist())


def make_heads(front: bytes, n_rows: int) -> bytes:
    return front[:HEAD_BYTES] * n_rows


def write(backend: Backend, payloads: Tensor, front: bytes) -> Tensor:
    out = torch.full((len(payloads), len(front) + payloads.shape[1]), 7, dtype=torch.uint8)
    backend.kernels.write_frames(out, front, payloads, checksum_at=CHECKSUM_AT)
    return out


@over_all
@pytest.mark.parametrize("n_bytes", SIZES)
def test_a_frame_is_front_checksum_and_payload(n_bytes: int, backend: Backend) -> None:
    front, payloads = make_front(), draw_octets(3, n_bytes + 5)[:, 2 : n_bytes + 2]
    for frame, payload in zip(write(backend, payloads, front), payloads, strict=True):
        found, rest = frame.numpy().tobytes(), CHECKSUM_AT + CHECKSUM_BYTES
        expected = zlib.crc32(found[rest:], zlib.crc32(found[:CHECKSUM_AT]))
        assert found[:CHECKSUM_AT] == front[:CHECKSUM_AT]
        assert found[CHECKSUM_AT:rest] == expected.to_bytes(4, "little")
        assert found[rest:] == front[rest:] + payload.numpy().tobytes()


@over_all
@pytest.mark.parametrize("n_bytes", SIZES)
def test_what_was_written_is_read(n_bytes: int, backend: Backend) -> None:
    front = make_front()
    frames = write(backend, draw_octets(2, n_bytes), front)
    for has_counts, n_params in ((False, 1), (False, 8), (False, 511), (True, 1), (True, 32)):
        expected = FrameFormat(CHECKSUM_AT, PRESENCE_AT, n_params, has_counts)
        is_expected, intact, present = backend.kernels.read_frames(
            frames, make_heads(front, 2), MASK, expected
        )
        presence = front[PRESENCE_AT:]
        counts = [
            int.from_bytes(presence[2 * param :][:2], "little")
            if has_counts
            else presence[param // 8] >> (param % 8) & 1
            for param in range(n_params)
        ]
        assert is_expected
        assert intact.tolist() == [True, True]
        assert present.tolist() == [counts, counts]
        assert present.dtype == torch.int64


@over_others
def test_every_flipped_byte_is_found_in_its_frame(backend: Backend) -> None:
    front, expected = make_front(), FrameFormat(CHECKSUM_AT, PRESENCE_AT, 9, has_counts=False)
    frames = write(backend, draw_octets(3, 150), front)
    for byte in range(frames.shape[1]):
        damaged = frames.clone()
        damaged[1, byte] ^= 1 << byte % 8
        arguments = damaged, make_heads(front, 3), MASK, expected
        is_expected, intact, _ = backend.kernels.read_frames(*arguments)
        assert not is_expected
        assert intact.tolist() == [True, False, True]
        truth = TRUTH.kernels.read_frames(*arguments)
        assert truth[0] == is_expected
        assert torch.equal(truth[1], intact)


@over_all
def test_heads_must_be_as_expected_where_the_mask_says_so(backend: Backend) -> None:
    front, expected = make_front(), FrameFormat(CHECKSUM_AT, PRESENCE_AT, 9, has_counts=False)
    frames = write(backend, draw_octets(2, 20), front)
    for byte in range(HEAD_BYTES):
        heads = bytearray(make_heads(front, 2))
        heads[HEAD_BYTES + byte] ^= 0x10
        is_expected, intact, _ = backend.kernels.read_frames(frames, bytes(heads), MASK, expected)
        assert is_expected == (MASK[byte] == 0), byte
        assert intact.all()


@over_all
def test_there_may_be_no_frame(backend: Backend) -> None:
    front = make_front()
    frames = write(backend, draw_octets(0, 9), front)
    is_expected, intact, present = backend.kernels.read_frames(
        frames, b"", MASK, FrameFormat(CHECKSUM_AT, PRESENCE_AT, 3, has_counts=False)
    )
    assert is_expected
    assert intact.shape == (0,)
    assert present.shape == (0, 3)


class Allocations(TorchDispatchMode):
    """Notes the size of the largest tensor that an op of torch returns, and that is no view."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.largest = max(self.largest, result.numel())
        return result


@over_cores
def test_frames_that_lie_apart_are_not_copied(backend: Backend) -> None:
    front, rows = make_front(), draw_octets(3, 1100)[:, 50:]
    out = torch.zeros(3, 1300, dtype=torch.uint8)[:, : 1050 + len(front)]
    with Allocations() as allocations:
        rows.contiguous()
    assert allocations.largest == 3150, "a copy would be seen"
    with Allocations() as allocations:
        backend.kernels.write_frames(out, front, rows, checksum_at=CHECKSUM_AT)
        backend.kernels.read_frames(
            out,
            make_heads(front, 3),
            MASK,
            FrameFormat(CHECKSUM_AT, PRESENCE_AT, 5, has_counts=False),
        )
    assert 0 < allocations.largest <= 15
