"""What the C++ core refuses, and how it says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core_calls import (
    BUCKET,
    COIN,
    KERNELS,
    SLOTS,
    N,
    apart,
    commit,
    count,
    encode,
    make_segments,
    words,
)
from distlion.errors import InvalidArgumentError
from distlion.kernels import BlockVotes, ReplyFormat
from distlion.kernels.contract import FrameFormat
from distlion.kernels.cpu import Core, CpuKernels
from distlion.layout import Slot

API = "__dlpack_c_exchange_api__"
core = KERNELS._core
many = words(1, 1, 8).expand(4097, 1, 1, 8)


def octets(*shape: int) -> Tensor:
    return words(*shape, dtype=torch.uint8)


def flags(n: int) -> Tensor:
    return words(n, dtype=torch.bool)


def write_frames(
    *,
    out: Tensor | None = None,
    payloads: Tensor | None = None,
    checksum_at: int = 60,
) -> None:
    out = octets(2, 70) if out is None else out
    payloads = octets(2, 6) if payloads is None else payloads
    KERNELS.write_frames(out, bytes(64), payloads, checksum_at=checksum_at)


def read_frames(
    *,
    rows: Tensor | None = None,
    heads: bytes = bytes(128),
    checksum_at: int = 60,
    n_params: int = 5,
    has_counts: bool = False,
) -> None:
    rows = octets(2, 70) if rows is None else rows
    KERNELS.read_frames(rows, heads, bytes(64), FrameFormat(checksum_at, 64, n_params, has_counts))


def check_into(finite: Tensor) -> None:
    segments = make_segments()
    core.check_finite(core.read_segments(segments), finite, 1)


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    # Tensors of segments.
    "gradient, size": (
        lambda: encode(grad=torch.ones(N - 1)),
        "gradient of second: given 99 elements, expected 100",
    ),
    "gradient, dtype": (lambda: encode(grad=torch.ones(N).double()), "gradient of second.*dtype"),
    "gradient, strides": (lambda: encode(grad=apart(N)), "gradient of second.*not contiguous"),
    "exp_avg, size": (lambda: encode(exp_avg=torch.ones(2 * N)), "exp_avg of second: given 200"),
    "exp_avg, dtype": (lambda: encode(exp_avg=torch.ones(N).half()), "exp_avg of second.*float32"),
    "exp_avg, strides": (lambda: encode(exp_avg=apart(N)), "exp_avg of second.*not contiguous"),
    "parameter, size": (lambda: commit(param=torch.ones(0)), "parameter of second: given 0"),
    "parameter, dtype": (
        lambda: commit(param=torch.ones(N).long(), grad=None),
        "parameter of second.*dtype",
    ),
    "parameter, strides": (lambda: commit(param=apart(N)), "parameter of second.*not contiguous"),
    "parameter, memory format": (
        lambda: commit(
            param=torch.zeros(1, 2, 5, 10).contiguous(memory_format=torch.channels_last)
        ),
        "parameter of second.*not contiguous",
    ),
    "gradient of another dtype": (
        lambda: commit(grad=torch.ones(N).bfloat16()),
        "gradient of second.*parameter's",
    ),
    "momentum alone, dtype": (
        lambda: KERNELS.update_momentum(make_segments(exp_avg=torch.ones(N).half()), [1, 1]),
        "exp_avg of second",
    ),
    "step alone, size": (
        lambda: KERNELS.step_alone(make_segments(param=torch.ones(1)), rounding=None),
        "parameter of second",
    ),
    "check, dtype": (
        lambda: KERNELS.check_finite(make_segments(grad=torch.ones(N).int())),
        "gradient of second",
    ),
    # Places of segments.
    "segments that overlap": (lambda: encode(slot=Slot("second", N, 2, 1)), "segments overlap"),
    "segments out of order": (
        lambda: KERNELS.encode_signs(make_segments()[::-1], COIN, out=words(1, 1, 8)),
        "segments overlap, or are not in the order",
    ),
    "replies that overlap": (lambda: commit(slot=Slot("second", N, 2, 0)), "segments overlap"),
    "out of too few blocks": (
        lambda: encode(slot=Slot("second", N, 2, 7)),
        "1 blocks.*need 9 words",
    ),
    "reply of too few blocks": (lambda: commit(reply=words(0, 1, 8)), "0 blocks.*need 4 words"),
    # What encoders write.
    "out, dtype": (lambda: encode(words(1, 1, 8, dtype=torch.int32)), "out: expected int64"),
    "out, dims": (lambda: encode(words(1, 8)), r"out: .*\(blocks, planes, 8\)"),
    "out, block": (lambda: encode(words(1, 1, 9)), r"out: .*\(blocks, planes, 8\)"),
    "out, strides": (lambda: encode(words(1, 2, 8)[:, ::2].expand(3, 1, 8)), "out.*not contiguous"),
    "out, planes of signs": (lambda: encode(words(1, 2, 8)), "out: 2 planes given, expected 1"),
    "out, planes of ternary": (
        lambda: KERNELS.encode_ternary(make_segments(), out=words(1, 1, 8)),
        "out: 1 planes given, expected 2",
    ),
    "out, planes of pairs": (
        lambda: KERNELS.encode_pairs(make_segments(), COIN, out=words(1, 1, 8)),
        "out: 1 planes given, expected 2",
    ),
    "out, no planes of levels": (
        lambda: KERNELS.encode_levels(make_segments(), COIN, norm="l1", step=1, out=words(1, 0, 8)),
        "out: 0 planes given, expected 1 to 8",
    ),
    "out, planes of levels": (
        lambda: KERNELS.encode_levels(make_segments(), COIN, norm="l1", step=1, out=words(1, 9, 8)),
        "out: 9 planes given, expected 1 to 8",
    ),
    "out, planes of directions": (
        lambda: KERNELS.encode_directions(
            make_segments(), dtype=torch.bfloat16, out=words(1, 32, 8)
        ),
        "out: 32 planes given, expected 16",
    ),
    "directions of another dtype": (
        lambda: KERNELS.encode_directions(
            make_segments(), dtype=torch.float16, out=words(1, 16, 8)
        ),
        "dtype is torch.float16",
    ),
    # Flags.
    "finite, dtype": (lambda: check_into(words(2)), "finite: expected bool, 2 elements"),
    "finite, too long": (lambda: check_into(flags(3)), "finite: expected bool, 2 elements"),
    "finite, too short": (lambda: check_into(flags(1)), "finite: expected bool, 2 elements"),
    "finite, strides": (lambda: check_into(flags(4)[::2]), "finite.*not contiguous"),
    # Replies.
    "reply, dtype": (lambda: commit(reply=words(1, 1, 8).double()), "reply: expected int64"),
    "reply, dims": (lambda: commit(reply=words(1, 1, 1, 8)), "reply: expected int64 of shape"),
    "reply, planes of signs": (lambda: commit(reply=words(1, 2, 8)), "reply: 2 planes.*sign"),
    "reply, planes of ternary": (
        lambda: commit(reply_format=ReplyFormat.TERNARY),
        "reply: 1 planes.*ternary",
    ),
    "reply, no planes of a count": (
        lambda: commit(reply=words(1, 0, 8), reply_format=ReplyFormat.COUNT),
        "reply: 0 planes.*count",
    ),
    "reply, planes of a count": (
        lambda: commit(reply=words(1, 21, 8), reply_format=ReplyFormat.COUNT),
        "reply: 21 planes.*count",
    ),
    "reply format": (
        lambda: core.commit(
            core.read_segments(make_segments()), [1, 1], words(1, 1, 8), "own", None, 1
        ),
        "reply_format is 'own', expected 'sign', 'ternary' or 'count'",
    ),
    "too few present": (lambda: commit(present=(1,)), "present: fewer numbers than segments"),
    "too many present": (lambda: commit(present=(1, 1, 1)), "present: more numbers than segments"),
    # Counting.
    "votes, dtype": (lambda: count(words(3, 1, 1, 8, dtype=torch.int32)), "votes: expected int64"),
    "votes, dims": (lambda: count(words(3, 1, 8)), r"votes: .*\(workers, blocks, planes, 8\)"),
    "votes, strides": (
        lambda: core.count_signs(
            words(3, 1, 2, 8)[:, :, ::2], words(3, 2).bool(), SLOTS, 0, 1, False, words(1, 1, 8), 1
        ),
        "votes.*not contiguous",
    ),
    "votes, planes of signs": (lambda: count(words(3, 1, 2, 8)), "votes: they have 2 planes"),
    "votes, planes of ternary": (
        lambda: count(words(3, 1, 1, 8), words(1, 2, 8), op="count_ternary"),
        "votes: they have 1 planes",
    ),
    "votes, planes of pairs": (
        lambda: count(words(3, 1, 1, 8), op="count_pairs"),
        "votes: they have 1 planes",
    ),
    "votes, planes of levels": (
        lambda: count(words(3, 1, 9, 8), op="count_levels"),
        "votes: they have 9 planes",
    ),
    "votes, planes of directions": (
        lambda: KERNELS.sum_directions(
            BlockVotes(words(1, 1, 16, 8), words(1, 2).bool(), BUCKET, 0),
            dtype=torch.float32,
            out=words(1, 2, 8),
        ),
        "votes: they have 16 planes",
    ),
    "sum of another dtype": (
        lambda: KERNELS.sum_directions(
            BlockVotes(words(1, 1, 16, 8), words(1, 2).bool(), BUCKET, 0),
            dtype=torch.float16,
            out=words(1, 2, 8),
        ),
        "dtype is torch.float16",
    ),
    "no workers": (lambda: count(words(0, 1, 1, 8)), "those of 0 workers, expected 1 to 4096"),
    "too many workers": (lambda: count(many), "those of 4097 workers, expected 1 to 4096"),
    "counts, blocks": (lambda: count(out=words(2, 1, 8)), "out: given 2 blocks.*expected 1 of 1"),
    "counts, planes": (
        lambda: count(out=words(1, 3, 8), op="count_ones"),
        "out: given 1 blocks of 3 planes, expected 1 of 2",
    ),
    "counts, strides": (
        lambda: count(words(3, 2, 1, 8), words(2, 2, 8)[:, :1]),
        "out.*not contiguous",
    ),
    "present, dtype": (lambda: count(present=words(3, 2)), r"present: .* uint8 of shape \(3, 2\)"),
    "too many votes": (
        lambda: count(words(17, 1, 1, 8), present=torch.full((17, 2), 255, dtype=torch.uint8)),
        "a parameter gets 4335 votes, expected at most 4096",
    ),
    "counts, too few planes for votes": (
        lambda: count(
            present=torch.full((3, 2), 5, dtype=torch.uint8), out=words(1, 3, 8), op="count_ones"
        ),
        "out: given 1 blocks of 3 planes, expected 1 of 4",
    ),
    "present, size": (lambda: count(present=words(3, 1).bool()), r"present: .*shape \(3, 2\)"),
    "present, dims": (lambda: count(present=words(6).bool()), r"present: .*shape \(3, 2\)"),
    # The rest.
    "instruction set": (lambda: CpuKernels("sse9"), "instruction_set is 'sse9'"),
    "digests, dtype": (
        lambda: KERNELS.digests([torch.ones(3), words(3)]),
        "tensor: expected elements of 1, 2 or 4",
    ),
    "digests, size of out": (
        lambda: core.digests([torch.ones(3)], words(2), 1),
        "out: expected int64, 1 elements",
    ),
    "digests, dtype of out": (
        lambda: core.digests([torch.ones(3)], torch.ones(1), 1),
        "out: expected int64, 1 elements",
    ),
    "square sums, dtype": (
        lambda: KERNELS.square_sums(torch.ones(3).double()),
        "tensor: .*dtype.*float32, bfloat16 or float16",
    ),
    "square sums, strides": (
        lambda: core.square_sums(apart(N), torch.zeros(1).double(), 1),
        "tensor: .*not contiguous",
    ),
    "square sums, size of out": (
        lambda: core.square_sums(torch.ones(4097), torch.zeros(1).double(), 1),
        "out: expected float64, one element for 4096",
    ),
    "square sums, dtype of out": (
        lambda: core.square_sums(torch.ones(N), torch.zeros(1), 1),
        "out: expected float64, one element for 4096",
    ),
    "square sums, strides of out": (
        lambda: core.square_sums(torch.ones(4097), torch.zeros(4).double()[::2], 1),
        "out: .*not contiguous",
    ),
    "frames, dtype": (lambda: write_frames(out=words(2, 70)), "out: expected uint8"),
    "frames, dims": (lambda: write_frames(out=octets(70)), "out: .* of 1 dimensions"),
    "frames, strides": (lambda: write_frames(out=octets(2, 140)[:, ::2]), "out: .*not contiguous"),
    "frames, dtype of payloads": (
        lambda: write_frames(payloads=words(2, 6)),
        "payloads: expected uint8",
    ),
    "frames, sizes": (
        lambda: write_frames(payloads=octets(2, 5)),
        "out: given 2 rows of 70 bytes, expected the front's 64 bytes and payloads: 2 rows of 5",
    ),
    "frames, rows": (lambda: write_frames(payloads=octets(3, 6)), "payloads: 3 rows of 6 bytes"),
    "frames, checksum": (
        lambda: write_frames(checksum_at=61),
        "checksum_at: given 61, expected 4 bytes within the 64",
    ),
    "read, dtype": (lambda: read_frames(rows=words(2, 70)), "rows: expected uint8"),
    "read, strides": (lambda: read_frames(rows=octets(2, 140)[:, ::2]), "rows: .*not contiguous"),
    "read, heads": (lambda: read_frames(heads=bytes(127)), "127 bytes of heads, expected 64 each"),
    "read, presence": (lambda: read_frames(n_params=49), "2 rows of 70 bytes, too few for"),
    "read, counts": (lambda: read_frames(n_params=4, has_counts=True), "rows of 70 bytes, too few"),
    "read, checksum": (lambda: read_frames(checksum_at=61), "checksum_at: given 61, expected"),
    "read, size of intact": (
        lambda: core.read_frames(
            octets(2, 70), bytes(128), bytes(64), 60, 64, False, flags(3), words(2, 1), 1
        ),
        "finite: expected bool, 2 elements",
    ),
    "read, dtype of present": (
        lambda: core.read_frames(
            octets(2, 70), bytes(128), bytes(64), 60, 64, False, flags(2), torch.ones(2), 1
        ),
        "present: expected int64",
    ),
    "stream, dtype": (
        lambda: core.stream_encode(torch.ones(64).int(), torch.ones(64), words(1), 1),
        "expected float32, 64 elements for a word",
    ),
    "stream, size": (
        lambda: core.stream_encode(torch.ones(65), torch.ones(64), words(1), 1),
        "expected float32, 64 elements for a word",
    ),
    "stream, momentum": (
        lambda: core.stream_commit(torch.ones(64), torch.ones(63), torch.ones(64), None, 1),
        "expected float32, 64 elements for a word",
    ),
    "stream, reply": (
        lambda: core.stream_commit(torch.ones(64), torch.ones(64), torch.ones(64), words(2), 1),
        "reply: expected int64, one word for 64 elements",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_and_named(case: str) -> None:
    call, message = REFUSALS[case]
    with pytest.raises(InvalidArgumentError, match=message):
        call()


def test_the_transpose_of_present_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="present"):
        count(present=torch.ones(2, 3, dtype=torch.bool))


def test_places_whose_sum_would_overflow_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="at most 2\\^56"):
        encode(slot=Slot("second", N, 2, 2**64 - 1))
    with pytest.raises(InvalidArgumentError, match="at most 2\\^56"):
        encode(slot=Slot("second", 2**64 - 1, 2, 2))


def test_a_slot_that_starts_beyond_its_first_word_is_refused() -> None:
    slots = (SLOTS[0], SLOTS[1]._replace(first_bit=64))
    with pytest.raises(InvalidArgumentError, match="bit 64 of a word: expected 0 to 63"):
        encode(slot=slots[1])
    with pytest.raises(InvalidArgumentError, match="bit 64 of a word: expected 0 to 63"):
        count(bucket=replace(BUCKET, slots=slots))


@pytest.mark.parametrize("by_table", [True, False])
def test_tensors_without_memory_of_their_own_are_refused(by_table: bool) -> None:
    emptied = torch.ones(N)
    emptied.untyped_storage().resize_(0)
    api = Tensor.__dlpack_c_exchange_api__ if by_table and hasattr(Tensor, API) else None
    with pytest.raises(InvalidArgumentError, match="memory of its own"):
        Core(KERNELS.instruction_set, api).digests([emptied], words(1), 1)


def test_fewer_than_no_voters_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="-1"):
        commit(present=(1, -1))


def test_tensors_of_another_device_are_refused() -> None:
    """Torch has a say of its own where tensors are read by its exchange table."""
    elsewhere = torch.ones(N, device="meta")
    with pytest.raises((InvalidArgumentError, RuntimeError)):
        encode(grad=elsewhere)
    by_attributes = Core(KERNELS.instruction_set, None)
    with pytest.raises(InvalidArgumentError, match=r"tensor: .* not on the CPU"):
        by_attributes.digests([elsewhere], words(1), 1)
    with pytest.raises(InvalidArgumentError, match=r"tensor: .* not contiguous"):
        by_attributes.digests([apart(N)], words(1), 1)
    with pytest.raises(InvalidArgumentError, match=r"out: .* not contiguous"):
        by_attributes.write_frames(octets(2, 140)[:, ::2], bytes(64), octets(2, 6), 60, 1)
    with pytest.raises(InvalidArgumentError, match=r"payloads: .* of 1 dimensions"):
        by_attributes.write_frames(octets(2, 70), bytes(64), octets(6), 60, 1)


def test_tensors_that_are_read_by_their_attributes_are_named_too() -> None:
    by_attributes = Core(KERNELS.instruction_set, None)
    for wrong, message in (
        (torch.ones(N, device="meta"), "gradient of second: .* not on the CPU"),
        (apart(N), "gradient of second: .* not contiguous"),
        (torch.ones(N).double(), "gradient of second: .*dtype"),
        (torch.ones(N - 1), "gradient of second: given 99 elements, expected 100"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            by_attributes.read_segments(make_segments(grad=wrong))


def test_what_is_no_tensor_is_refused() -> None:
    for junk in ("junk", 3, [1.0] * N, object()):
        with pytest.raises((AttributeError, RuntimeError, TypeError)):
            encode(grad=junk)


def test_what_is_no_exchange_table_is_refused() -> None:
    for junk in ("junk", 3, object()):
        with pytest.raises(ValueError, match="PyCapsule"):
            Core(KERNELS.instruction_set, junk)


def test_a_segment_of_too_few_fields_is_refused() -> None:
    with pytest.raises(IndexError):
        KERNELS.encode_signs([make_segments()[0][:2]], COIN, out=words(1, 1, 8))  # type: ignore[list-item]


def test_coefficients_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(TypeError):
        encode(coefficients=("fast", 0.9, 0.1, 0.0, 1.0))


def test_what_does_not_fit_is_refused_when_it_is_gathered() -> None:
    with pytest.raises(InvalidArgumentError, match="exp_avg of second: given 1"):
        KERNELS.gather(make_segments(exp_avg=torch.ones(1)))


def test_an_error_leaves_everything_as_it_was() -> None:
    segments = make_segments(param=torch.ones(N - 1))
    with pytest.raises(InvalidArgumentError):
        KERNELS.step_alone(segments, rounding=None)
    assert not segments[0].param.any()
    out = torch.full((1, 1, 8), -1)
    with pytest.raises(InvalidArgumentError):
        encode(out, grad=torch.ones(N - 1))
    assert bool((out == -1).all())
