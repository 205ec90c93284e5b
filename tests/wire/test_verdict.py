"""What headers say together, and how a verdict travels."""

from dataclasses import replace

import pytest
import torch

from distlion.failures import Status
from distlion.kernels import choose_kernels
from distlion.layout import ChunkShape
from distlion.wire.frame import ChunkKind, Header, read_chunks, write_chunk
from distlion.wire.verdict import (
    Verdict,
    decode_verdict,
    encode_verdict,
    find_errors,
    judge,
    with_error,
    with_verdict,
    worst_of,
)

KERNELS = choose_kernels(torch.device("cpu"))
OWN = Header(ChunkKind.REPLY, step=3, bucket=0, sender=0, settings=11)
SHAPE = ChunkShape(n_params=1, payload_bytes=64)


def headers(n: int) -> list[Header]:
    return [replace(OWN, sender=rank) for rank in range(n)]


def find(found: list[Header]) -> Header:
    """What the first rank makes of everybody's chunks."""
    rows = torch.empty(len(found), SHAPE.n_bytes, dtype=torch.uint8)
    for row, header in zip(rows, found, strict=True):
        payload = torch.zeros(SHAPE.payload_bytes, dtype=torch.uint8)
        write_chunk(KERNELS, row, SHAPE, header, torch.ones(1, dtype=torch.bool), payload)
    chunks = read_chunks(KERNELS, rows, SHAPE, OWN)
    return find_errors(chunks, OWN, range(len(found)))


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
        replace(header, status=Status.NON_FINITE, culprit=culprit, position=4 + culprit)
        for header, culprit in zip(headers(3), (2, 1, 2), strict=True)
    ]
    verdict = judge(found, range(len(found)))
    assert (verdict.culprits, verdict.position) == ((1, 2), 5)


def test_of_equally_grave_errors_the_first_stays() -> None:
    first = with_error(OWN, Status.NON_FINITE, culprit=2, position=5)
    assert with_error(first, Status.NON_FINITE, culprit=1, position=4) == first


def test_of_equally_grave_headers_the_first_is_passed_on() -> None:
    found = headers(3)
    found[1] = with_error(found[1], Status.NON_FINITE, culprit=1, position=5)
    found[2] = with_error(found[2], Status.NON_FINITE, culprit=2, position=4)
    header = find(found)
    assert (header.culprit, header.position) == (1, 5)


def test_a_graver_error_replaces_all_that_was_said_of_another() -> None:
    cancelled = with_error(OWN, Status.CANCELLED, culprit=2, cancelled_by_all=True)
    graver = with_error(cancelled, Status.STEP, culprit=1)
    assert (graver.status, graver.culprit, graver.cancelled_by_all) == (Status.STEP, 1, False)


@pytest.mark.parametrize("n_cancelled", [1, 2, 3])
def test_a_step_is_cancelled_by_all_only_if_every_header_says_so(n_cancelled: int) -> None:
    found = headers(3)
    for rank in range(n_cancelled):
        found[rank] = with_error(found[rank], Status.CANCELLED, culprit=rank, cancelled_by_all=True)
    verdict, header = judge(found, range(3)), find(found)
    assert verdict.status is header.status is Status.CANCELLED
    assert verdict.cancelled_by_all is header.cancelled_by_all is (n_cancelled == 3)
    some = replace(found[0], cancelled_by_all=False)
    assert not judge([some, *found[1:]], range(3)).cancelled_by_all


VERDICTS = [
    Verdict(Status.OK),
    Verdict(Status.CORRUPT, (3,)),
    Verdict(Status.NON_FINITE, (1, 3), position=7, steps=((1, 2), (3, 2))),
    Verdict(Status.CANCELLED, (3,), cancelled_by_all=True, steps=((1, 2), (3, 2))),
    Verdict(Status.STEP, steps=((1, 1 << 40), (3, 0))),
    Verdict(Status.CONFIG, (9,)),  # of a rank that is no member of the link itself
]


@pytest.mark.parametrize("verdict", VERDICTS, ids=lambda verdict: verdict.status.name)
def test_a_verdict_is_read_as_it_was_written(verdict: Verdict) -> None:
    header = with_verdict(replace(OWN, status=Status.CORRUPT, culprit=8), verdict)
    payload = encode_verdict(verdict, 128)
    assert (payload.shape, payload.dtype) == ((128,), torch.uint8)
    assert decode_verdict(header, payload) == verdict


@pytest.mark.parametrize("verdict", VERDICTS, ids=lambda verdict: verdict.status.name)
def test_where_a_bucket_is_empty_the_header_tells_what_it_can(verdict: Verdict) -> None:
    header = with_verdict(replace(OWN, status=Status.CORRUPT, culprit=8), verdict)
    payload = encode_verdict(verdict, 0)
    assert payload.numel() == 0
    assert decode_verdict(header, payload) == Verdict.of(header)
    assert decode_verdict(header, payload).status is verdict.status


def test_the_verdict_of_every_member_fits_its_64_bytes() -> None:
    n = 65_535
    everybody = tuple((rank, (1 << 63) - 1) for rank in range(n))
    verdict = Verdict(Status.NON_FINITE, tuple(range(n)), steps=everybody)
    assert encode_verdict(verdict, 64 * n).numel() == 64 * n


def test_one_header_is_a_verdict_of_its_own() -> None:
    header = with_error(OWN, Status.NON_FINITE, culprit=2, position=5)
    assert Verdict.of(header) == Verdict(Status.NON_FINITE, (2,), position=5)
    assert Verdict.of(replace(header, culprit=-1)).culprits == ()
    assert Verdict.of(OWN) == Verdict(Status.OK)


def test_the_gravest_verdict_names_all_culprits_and_steps_of_its_kind() -> None:
    joined = worst_of(
        [
            Verdict(Status.OK),
            Verdict(Status.NON_FINITE, (1,), position=7, steps=((1, 2),)),
            Verdict(Status.NON_FINITE, (0,), position=3, steps=((0, 2), (1, 2))),
        ]
    )
    assert joined == Verdict(Status.NON_FINITE, (0, 1), position=7, steps=((0, 2), (1, 2)))
    by_all = Verdict(Status.CANCELLED, (1,), cancelled_by_all=True)
    assert worst_of([by_all, by_all]).cancelled_by_all
    assert not worst_of([by_all, replace(by_all, cancelled_by_all=False)]).cancelled_by_all
    assert worst_of([by_all, Verdict(Status.STEP, (2,))]) == Verdict(Status.STEP, (2,))
    assert worst_of([Verdict(Status.OK)] * 2) == Verdict(Status.OK)
