"""What the C++ core refuses of votes with error feedback, and how it says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from core_calls import BUCKET, COIN, KERNELS, SLOTS, N, apart, make_segments, words
from distlion.errors import InvalidArgumentError
from distlion.kernels import BlockVotes
from distlion.kernels.cpu import Core
from distlion.layout import BucketLayout, Slot


def estimates_with(second: Tensor) -> list[Tensor]:
    return [torch.zeros(N), second]


def encode(
    estimates: Sequence[Tensor] | None = None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    **changes: object,
) -> None:
    KERNELS.encode_rests(
        make_segments(**changes),
        estimates_with(torch.zeros(N)) if estimates is None else estimates,
        COIN,
        out=words(1, 2, 8) if out is None else out,
        scales=torch.zeros(2, 2) if scales is None else scales,
    )


def add(
    estimates: Sequence[Tensor] | None = None,
    votes: Tensor | None = None,
    scales: Tensor | None = None,
    slots: Sequence[Slot] = SLOTS,
) -> None:
    KERNELS.add_steps(
        estimates_with(torch.zeros(N)) if estimates is None else estimates,
        slots,
        [True, True],
        words(1, 2, 8) if votes is None else votes,
        torch.zeros(2, 2) if scales is None else scales,
    )


def add_all(
    estimates: Tensor | None = None,
    votes: Tensor | None = None,
    scales: Tensor | None = None,
    present: Tensor | None = None,
    slots: tuple[Slot, ...] = SLOTS,
) -> None:
    KERNELS.add_steps_of_all(
        torch.zeros(3, 512) if estimates is None else estimates,
        BlockVotes(
            words(3, 1, 2, 8) if votes is None else votes,
            torch.ones(3, 2, dtype=torch.bool) if present is None else present,
            BucketLayout(0, BUCKET.members, slots, 1),
            0,
        ),
        torch.zeros(3, 2, 2) if scales is None else scales,
    )


def draw(scales: Tensor | None = None, out: Tensor | None = None, **options: object) -> None:
    KERNELS.encode_lots(
        make_segments(),
        COIN,
        out=words(1, 1, 8) if out is None else out,
        scales=torch.zeros(2, 1) if scales is None else scales,
        **options,  # type: ignore[arg-type]
    )


def move(
    residuals: Sequence[Tensor] | None = None,
    votes: Tensor | None = None,
    scales: Tensor | None = None,
    finite: Tensor | None = None,
) -> None:
    KERNELS.move_residuals(
        make_segments(),
        estimates_with(torch.zeros(N)) if residuals is None else residuals,
        words(1, 2, 8) if votes is None else votes,
        torch.zeros(2, 2) if scales is None else scales,
        torch.ones(2, dtype=torch.bool) if finite is None else finite,
    )


def count(
    scales: Tensor | None = None,
    present: Tensor | None = None,
    slots: tuple[Slot, ...] = SLOTS,
    weights: Sequence[int] = (1, 1, 1),
    estimates: Tensor | None = None,
    out: Tensor | None = None,
    sums: Tensor | None = None,
    votes: Tensor | None = None,
) -> None:
    KERNELS.count_steps(
        BlockVotes(
            words(3, 1, 2, 8) if votes is None else votes,
            torch.ones(3, 2, dtype=torch.bool) if present is None else present,
            BucketLayout(0, BUCKET.members, slots, 1),
            0,
        ),
        torch.zeros(3, 2, 2) if scales is None else scales,
        COIN,
        weights=weights,
        estimates=estimates,
        out=words(1, 1, 8) if out is None else out,
        sums=torch.zeros(1, 2, dtype=torch.float64) if sums is None else sums,
    )


OVERLAP = (SLOTS[0], Slot("second", N, 2, 1))

REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "estimate, size": (
        lambda: encode(estimates_with(torch.zeros(N - 1))),
        "estimate of second: expected float32, 100 elements",
    ),
    "estimate, dtype": (
        lambda: encode(estimates_with(torch.zeros(N).double())),
        "estimate of second: expected float32, 100 elements",
    ),
    "estimate, strides": (
        lambda: encode(estimates_with(apart(N))),
        "estimate of second.*not contiguous",
    ),
    "too few estimates": (lambda: encode([torch.zeros(N)]), "estimates: given 1, .* of 2 segments"),
    "too many estimates": (lambda: encode([torch.zeros(N)] * 3), "estimates: given 3"),
    "gradient, size": (lambda: encode(grad=torch.ones(N - 1)), "gradient of second: given 99"),
    "out, no planes": (lambda: encode(out=words(1, 0, 8)), "out: 0 planes given, expected 1 to 2"),
    "out, planes": (lambda: encode(out=words(1, 3, 8)), "out: 3 planes given, expected 1 to 2"),
    "out, blocks": (lambda: encode(out=words(0, 2, 8)), "0 blocks.*need 4 words"),
    "segments that overlap": (lambda: encode(slot=OVERLAP[1]), "segments overlap"),
    "scales, size": (
        lambda: encode(scales=torch.zeros(3, 2)),
        r"scales: expected float32 of shape \(2, 2\)",
    ),
    "scales, planes": (lambda: encode(scales=torch.zeros(2, 1)), r"scales: .* shape \(2, 2\)"),
    "scales, dims": (lambda: encode(scales=torch.zeros(4)), r"scales: .* shape \(2, 2\)"),
    "scales, dtype": (lambda: encode(scales=torch.zeros(2, 2).double()), "scales: .*float32"),
    "scales, strides": (lambda: encode(scales=torch.zeros(2, 4)[:, ::2]), "scales.*not contiguous"),
    # A worker's steps.
    "step, size": (
        lambda: add(estimates_with(torch.zeros(N + 1))),
        "estimate of second: expected float32, 100 elements",
    ),
    "step, dtype": (lambda: add(estimates_with(torch.zeros(N).half())), "estimate of second"),
    "step, strides": (lambda: add(estimates_with(apart(N))), "estimate of second.*not contiguous"),
    "step, votes": (lambda: add(votes=words(1, 3, 8)), "votes: they have 3 planes"),
    "step, dtype of votes": (lambda: add(votes=words(1, 2, 8).int()), "votes: expected int64"),
    "step, blocks": (lambda: add(votes=words(0, 2, 8)), "votes: 0 blocks, in which first"),
    "step, place": (
        lambda: add(slots=(SLOTS[0], Slot("second", N, 2, 7))),
        "votes: 1 blocks, in which second has no place",
    ),
    "step, scales": (lambda: add(scales=torch.zeros(1, 2)), r"scales: .* shape \(2, 2\)"),
    "step, planes of scales": (lambda: add(scales=torch.zeros(2, 1)), r"scales: .*\(2, 2\)"),
    "step, dims of scales": (lambda: add(scales=torch.zeros(4)), r"scales: .*\(2, 2\)"),
    "step, dtype of scales": (lambda: add(scales=torch.zeros(2, 2).half()), "scales: .*float32"),
    # Those of all workers.
    "steps, estimates": (
        lambda: add_all(torch.zeros(3, 1024)),
        r"estimates: expected float32 of shape \(3, 512\)",
    ),
    "steps, workers": (lambda: add_all(torch.zeros(2, 512)), r"estimates: .* \(3, 512\)"),
    "steps, dtype": (lambda: add_all(torch.zeros(3, 512).double()), "estimates: .*float32"),
    "steps, votes": (lambda: add_all(votes=words(3, 1, 0, 8)), "votes: they have 0 planes"),
    "steps, dims of votes": (lambda: add_all(votes=words(3, 2, 8)), "votes: expected int64"),
    "steps, scales": (lambda: add_all(scales=torch.zeros(3, 2)), r"scales: .* \(3, 2, 2\)"),
    "steps, params of scales": (
        lambda: add_all(scales=torch.zeros(3, 1, 2)),
        r"scales: .* \(3, 2, 2\)",
    ),
    "steps, present": (lambda: add_all(present=words(2, 3).bool()), r"present: .*\(3, 2\)"),
    "steps, dtype of present": (lambda: add_all(present=words(3, 2)), r"present: .*bool"),
    "steps that overlap": (lambda: add_all(slots=OVERLAP), "slots overlap"),
    # Stochastic signs.
    "lots, reach": (lambda: draw(reach=[1.0]), "reach: given 1, .* of 2 segments"),
    "lots, planes": (lambda: draw(out=words(1, 2, 8)), "out: 2 planes given, expected 1"),
    "lots, scales": (lambda: draw(torch.zeros(2, 2)), r"scales: .* shape \(2, 1\)"),
    # Residuals.
    "residual, size": (
        lambda: move(estimates_with(torch.zeros(N - 1))),
        "estimate of second: expected float32, 100 elements",
    ),
    "residual, votes": (lambda: move(votes=words(1, 3, 8)), "votes: they have 3 planes"),
    "residual, blocks": (lambda: move(votes=words(0, 2, 8)), "0 blocks.*need 4 words"),
    "residual, scales": (lambda: move(scales=torch.zeros(2, 1)), r"scales: .*\(2, 2\)"),
    "residual, flags": (lambda: move(finite=torch.ones(1, dtype=torch.bool)), "finite: .* 2 elem"),
    # Counts.
    "count, votes": (lambda: count(votes=words(3, 1, 3, 8)), "votes: they have 3 planes"),
    "count, scales": (lambda: count(torch.zeros(3, 2)), r"scales: .* \(3, 2, 2\)"),
    "count, present": (lambda: count(present=words(2, 3).bool()), r"present: .*\(3, 2\)"),
    "count, overlap": (lambda: count(slots=OVERLAP), "slots overlap"),
    "count, weights": (lambda: count(weights=(1, 1)), "weights: given 2, .* of 3 workers"),
    "count, estimates": (lambda: count(estimates=torch.zeros(3, 100)), r"estimates: .*\(3, 512\)"),
    "count, out": (
        lambda: count(out=words(2, 1, 8)),
        "out: given 2 blocks of 1 planes, expected 1",
    ),
    "count, planes": (lambda: count(out=words(1, 2, 8)), "out: given 1 blocks of 2 planes"),
    "count, sums": (lambda: count(sums=torch.zeros(1, 2)), r"sums: .*float64 .*\(shards, 2\)"),
    "count, shards": (
        lambda: count(sums=torch.zeros(2, 2, dtype=torch.float64)),
        "sums: 2 shards, into which 1 blocks cannot be cut",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_and_named(case: str) -> None:
    call, message = REFUSALS[case]
    with pytest.raises(InvalidArgumentError, match=message):
        call()


def test_what_fits_is_not_refused() -> None:
    encode()
    add()
    add_all()
    draw()
    draw(reach=[1.0, 2.0])
    move()
    count()
    count(estimates=torch.zeros(3, 512))


def test_an_estimate_elsewhere_is_refused() -> None:
    by_attributes = Core(KERNELS.instruction_set, None)
    segments, elsewhere = make_segments(), estimates_with(torch.zeros(N, device="meta"))
    finite, scales = words(2).bool(), torch.zeros(2, 1)
    with pytest.raises(InvalidArgumentError, match=r"estimate of second: .* not on the CPU"):
        by_attributes.encode_rests(
            by_attributes.read_segments(segments),
            *(segments, elsewhere, False, 1, False, words(1, 1, 8), scales, finite, 1),
        )


def test_an_error_leaves_everything_as_it_was() -> None:
    out, scales = torch.full((1, 2, 8), -1), torch.full((2, 2), -1.0)
    with pytest.raises(InvalidArgumentError):
        encode(estimates_with(torch.zeros(1)), out, scales)
    assert bool((out == -1).all())
    assert bool((scales == -1).all())
