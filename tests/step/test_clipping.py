"""By what gradients are clipped: never scaled up, and norms that are not finite left out."""

from __future__ import annotations

import math

import pytest
import torch

from distlion import ClipNorm
from distlion.kernels import Coefficients, Segment
from distlion.step.clipping import clip_alone, clip_together
from records import make_records

COEFFICIENTS = Coefficients(0.9, 0.99, 1e-3, 0.0, 2.0)


def ignore(norm: float) -> None:
    """Let a norm go."""


def make_segments(*grads: list[float]) -> list[Segment]:
    """Make the segments of one worker; its gradients count twice, by their scale."""
    records = make_records([len(grad) for grad in grads])
    return [
        record.segment(COEFFICIENTS, torch.tensor(grads[index]))
        for index, record in enumerate(records)
    ]


def scales(segments: list[Segment]) -> list[float]:
    return [segment.coefficients.grad_scale for segment in segments]


@pytest.mark.parametrize("max_norm", [10.0, 11.0, 1e30])
def test_gradients_within_the_norm_are_left_alone(max_norm: float) -> None:
    segments, norms = make_segments([3.0], [4.0]), []  # norm 10, once scaled
    clipped = clip_alone(segments, ClipNorm(max_norm), norms.append)
    assert scales(list(clipped)) == pytest.approx([2.0, 2.0], abs=1e-6)
    assert max(scales(list(clipped))) <= 2.0
    assert norms == [10.0]


def test_gradients_beyond_the_norm_are_scaled_down_to_it() -> None:
    clipped = clip_alone(make_segments([3.0], [4.0]), ClipNorm(5.0), ignore)
    assert scales(list(clipped)) == pytest.approx([1.0, 1.0], rel=1e-6)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_the_norm_of_all_leaves_out_workers_that_are_not_finite(broken: float) -> None:
    workers = [make_segments([3.0], [4.0]), make_segments([broken], [4.0])]
    clipped = clip_together(workers, 0, ClipNorm(5.0), ignore)
    # The root mean square over the one worker that has a norm, 10; counted as 0 it would be 7.07.
    assert scales(list(clipped[0])) == pytest.approx([1.0, 1.0], rel=1e-6)


def test_the_norm_of_all_counts_workers_without_gradient_as_zero() -> None:
    (clipped,) = clip_together([make_segments([3.0], [4.0])], 3, ClipNorm(2.5), ignore)
    assert scales(list(clipped)) == pytest.approx([1.0, 1.0], rel=1e-6)
