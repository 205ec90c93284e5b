"""Clipping by norm inside the optimizer, before the vote and without changing gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from distlion.errors import UnsupportedTypeError
from distlion.kernels.contract import SCALE_BLOCK_ELEMENTS, Segment
from distlion.kernels.dispatch import choose_kernels
from distlion.numpy_numbers import keep_as_python
from distlion.step.arguments import check_choice, check_positive
from distlion.step.bucket import Bucket
from distlion.step.inputs import NoteNorm, StepInputs
from distlion.step.stage import Stage, Surroundings
from distlion.step.staging import read_together
from distlion.wire.ask import ask_texts
from distlion.wire.frame import ChunkKind, Header
from distlion.wire.numbers import gather_numbers, plan_numbers
from distlion.wire.transport import ByteCount, Transport
from distlion.wire.verdict import with_error_of

NORM_EPSILON = 1e-6
"""The epsilon of torch.nn.utils.clip_grad_norm_."""


@dataclass(frozen=True)
class ClipNorm:
    """Scale gradients down to a norm before the direction is computed.

    Equation:
        g <- g * min(1, max_norm / (norm + 1e-6))
        "worker": norm = ||g_i||, each worker its own. "global": norm = sqrt(mean over workers of
        ||g_i||^2), one factor for all. It is at least the norm of the mean gradient, which DDP
        clips: equal where all gradients are equal, about sqrt(N) times it where they are
        independent noise.

    Args:
        max_norm: Largest norm, above 0.
        scope: "worker" or "global".

    Raises:
        InvalidArgumentError: A value is out of range.
        UnsupportedTypeError: ``max_norm`` is not a number.

    Notes:
        A sign ignores a common factor, so clipping does not shorten Lion's step. It limits the
        share of one outlying batch in the direction and the momentum. With "worker", an outlier has
        less influence on that worker's momentum; with "global", it scales down the gradients of all
        workers, even those without an outlier. ``p.grad`` is not changed. The norm is added in
        double, by blocks and then exactly, so it depends neither on buckets nor on threads. Norms
        that are not finite are ignored, and ``nonfinite=`` applies. ``optimizer.grad_norm`` is the
        last step's norm.
    """

    max_norm: float
    scope: Literal["worker", "global"] = "worker"

    def __post_init__(self) -> None:
        keep_as_python(self, "max_norm")
        if isinstance(self.max_norm, bool) or not isinstance(self.max_norm, int | float):
            raise UnsupportedTypeError(f"ClipNorm(max_norm={self.max_norm!r}): expected a number")
        check_positive("ClipNorm.max_norm", self.max_norm)
        check_choice("ClipNorm.scope", self.scope, ("worker", "global"))


def plan_norms(n_workers: int) -> ByteCount:
    """Declare the bytes that a worker sends to clip by the global norm."""
    return plan_numbers(1, n_workers)


def clip_together(
    workers: Sequence[Sequence[Segment]], absent: int, clip: ClipNorm, note: NoteNorm
) -> list[Sequence[Segment]]:
    """Clip the gradients of several workers of one process by the global norm.

    Args:
        workers: The segments of each worker.
        absent: Number of further workers, which have no gradient.
        clip: The clipping settings.
        note: Function that receives the norm.
    """
    squares = [_add_exactly(_list_square_sums(segments)) for segments in workers]
    norm = math.sqrt(_mean_square(squares + [0.0] * absent))
    note(norm)
    return [scale_segments(segments, find_factor(norm, clip)) for segments in workers]


def clip_alone(segments: Sequence[Segment], clip: ClipNorm, note: NoteNorm) -> Sequence[Segment]:
    """Clip the gradients of a single worker."""
    norm = math.sqrt(_add_exactly(_list_square_sums(segments)))
    note(norm)
    return scale_segments(segments, find_factor(norm, clip))


class Clipping(Stage):
    """Clip the gradients of a worker among others, by its own or the global norm.

    Args:
        clip: The clipping settings.
        between: The link between voters, for "global"; None where it is not needed.
        inside: The link between the ranks of this node; None without nodes.
        most_blocks: Blocks of gradient on the rank of the node that has most.
    """

    def __init__(
        self,
        clip: ClipNorm,
        *,
        between: Transport | None,
        inside: Transport | None,
        most_blocks: int,
    ) -> None:
        self._clip, self._between, self._inside = clip, between, inside
        self._most_blocks, self._norm = most_blocks, math.nan
        self._note: NoteNorm | None = None

    def before(self, buckets: Sequence[Bucket], inputs: StepInputs) -> None:
        """Scale the gradients of all buckets by the factor of their joint norm."""
        counted = [segment for bucket in buckets for segment in bucket.list_counted()]
        self._note = inputs.note_norm
        header, self._norm = self.measure(counted, inputs.header)
        factor = find_factor(self._norm, self._clip)
        for bucket in buckets:
            bucket.segments = bucket.kernels.gather(scale_segments(bucket.segments, factor))
            bucket.header = with_error_of(bucket.header, header)

    def measure(self, segments: Sequence[Segment], header: Header) -> tuple[Header, float]:
        """Measure the norm; return the header, with errors found on the way, and the norm."""
        square_sums = _list_square_sums(segments)
        if self._inside is not None:
            padded = square_sums + [0.0] * (self._most_blocks - len(square_sums))
            header, rows = gather_numbers(self._inside, padded, header, kind=ChunkKind.NORM)
            square_sums = [number for row in rows for number in row]
        square = _add_exactly(square_sums)
        if self._between is not None:
            header, rows = gather_numbers(self._between, [square], header, kind=ChunkKind.NORM)
            square = _mean_square([row[0] for row in rows])
        return header, math.sqrt(square)

    def commit(self, buckets: Sequence[Bucket]) -> None:
        """Note the norm."""
        if self._note is not None:
            self._note(self._norm)

    def end(self) -> None:
        """Let go of the function that notes norms, whose owner owns this stage."""
        self._note = None

    def plan(self, step: int) -> ByteCount:
        return ByteCount() if self._between is None else plan_norms(self._between.n_members)


def build_clipping(clip: ClipNorm | None, among: Surroundings) -> Clipping | None:
    """Build the stage; None without clipping. Every rank must call it."""
    inside, params = among.inside, among.params
    if clip is None or among.between is None:
        return None
    blocks = [0] * len(params[0].pieces)
    for param in params:
        for part, (start, stop) in enumerate(param.pieces):
            blocks[part] += -(-(stop - start) // SCALE_BLOCK_ELEMENTS)
    if among.ranks.is_sharded and inside is not None:  # other ranks' shards may be larger
        blocks = list(map(int, ask_texts(inside, str(blocks[0]), step=among.step)))
    return Clipping(
        clip,
        between=among.between if clip.scope == "global" else None,
        inside=inside,
        most_blocks=max(blocks),
    )


def _list_square_sums(segments: Sequence[Segment]) -> list[float]:
    """List the square sums of the gradients, block by block."""
    squares = []
    for segment in segments:
        if segment.grad is not None:
            scale = segment.coefficients.grad_scale
            kernels = choose_kernels(segment.grad.device)
            squares.append(kernels.square_sums(segment.grad) * (scale * scale))
    return read_together(squares)


def _mean_square(squares: Sequence[float]) -> float:
    """Average the finite numbers, in rank order."""
    finite = [square for square in squares if math.isfinite(square)]
    return sum(finite) / len(finite) if finite else math.nan


def find_factor(norm: float, clip: ClipNorm) -> float:
    """Return the factor for gradients of this norm; 1 where the norm is not finite."""
    return min(1.0, clip.max_norm / (norm + NORM_EPSILON)) if math.isfinite(norm) else 1.0


def _add_exactly(numbers: Sequence[float]) -> float:
    """Add with a single rounding, so that neither order nor grouping matters."""
    if not all(map(math.isfinite, numbers)):
        return math.nan
    try:
        return math.fsum(numbers)
    except OverflowError:
        return math.nan


def scale_segments(segments: Sequence[Segment], factor: float) -> Sequence[Segment]:
    """Multiply gradients by a factor, through the coefficient that the ops apply."""
    if factor == 1.0:
        return segments
    return [
        segment._replace(
            coefficients=segment.coefficients._replace(
                grad_scale=segment.coefficients.grad_scale * factor
            )
        )
        for segment in segments
    ]
