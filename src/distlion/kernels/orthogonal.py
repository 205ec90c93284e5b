"""Directions of weight matrices, orthogonalized before they are encoded.

Plain torch: a worker's direction decides its own votes alone, and replicas depend on replies. So
replicas stay bitwise identical although two machines may round a matrix product differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from distlion.kernels.coin import Coin
from distlion.kernels.contract import FLOAT_PLANES, Coefficients, ReplyFormat, Segment
from distlion.kernels.reference import Kernels
from distlion.layout import BLOCK_WORDS

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Muon's coefficients a, b, c: steep at 0, so that five iterations lift small singular values."""
ITERATIONS = 5


def matrix_shape(shape: Sequence[int]) -> tuple[int, int] | None:
    """Return a parameter's shape as a matrix, (out, rest); None if it has no two such dims."""
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if rows > 1 and columns > 1 else None


def orthogonalize(matrices: Tensor) -> Tensor:
    """Move all singular values of matrices towards 1, by Newton-Schulz iterations.

    Equation:
        X = C / ||C||_F, transposed if it has more rows than columns
        5 times: A = X X^T;  X = a X + (b A + c A A) X        (a, b, c = 3.4445, -4.7750, 2.0315)
        (Muon, K. Jordan et al., 2024; singular values end between about 0.7 and 1.2,
        but for those below a thousandth of the norm)

    Args:
        matrices: (..., rows, columns), floating. Read only.

    Returns:
        The same shape and dtype; zeros where a matrix is zero, NaN where one is not finite.

    Notes:
        Products are of this dtype, also where the caller's ``torch.autocast`` is on. A matrix is
        first divided by its largest magnitude, so that the norm neither overflows nor underflows.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    tiny = torch.finfo(x.dtype).tiny
    a, b, c = QUINTIC
    with torch.autocast(x.device.type, enabled=False):
        x = x / x.abs().amax((-2, -1), keepdim=True).clamp(min=tiny)
        x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=tiny)
        for _ in range(ITERATIONS):
            gram = x @ x.mT
            x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = x.mT if is_tall else x
    return result


def orthogonalize_directions(kernels: Kernels, segments: Sequence[Segment]) -> Sequence[Segment]:
    """Replace each segment of an orthogonalized parameter by one whose direction is computed.

    Args:
        kernels: The arithmetic where the segments are.
        segments: Segments of one bucket, in order.

    Returns:
        Segments to encode, and only that. One with ``coefficients.orthogonalize`` has the
        orthogonalized direction C, as ``give_direction`` makes it. C is NaN where gradient,
        direction or new momentum is not finite.
    """
    chosen = [
        index
        for index, segment in enumerate(segments)
        if segment.coefficients.orthogonalize and segment.grad is not None
    ]
    if not chosen:
        return segments
    replaced = list(segments)
    shapes = [matrix_shape(segments[index].param.shape) for index in chosen]
    for batch in list_batches(shapes, segments[chosen[0]].param.device):
        indices = [chosen[each] for each in batch]
        directions = [compute_direction(kernels, segments[index]) for index in indices]
        whole = orthogonalize_batch(directions, shapes[batch[0]])
        for index, direction in zip(indices, whole, strict=True):
            replaced[index] = give_direction(segments[index], direction)
    return replaced


def list_batches(shapes: Sequence[tuple[int, int] | None], device: torch.device) -> list[list[int]]:
    """List the matrices that are multiplied together, by their numbers.

    On a CPU each matrix has a product of its own in float32, so that its bits do not depend on the
    bucket; on a GPU matrices of one shape share batched products in bfloat16.
    """
    if device.type == "cpu":
        return [[number] for number in range(len(shapes))]
    batches: dict[object, list[int]] = {}
    for number, shape in enumerate(shapes):
        batches.setdefault(shape, []).append(number)
    return list(batches.values())


def orthogonalize_batch(
    directions: Sequence[Tensor], shape: tuple[int, int] | None
) -> Sequence[Tensor]:
    """Orthogonalize one batch of ``list_batches``.

    Args:
        directions: Directions on one device, as many elements as ``shape`` has.
        shape: (rows, columns) of each; not None, as the optimizer checked its parameters.

    Returns:
        For each C, (rows, columns): float32 on a CPU and bfloat16 on a GPU.
    """
    assert shape is not None
    matrices = [direction.view(shape) for direction in directions]
    if matrices[0].device.type == "cpu":
        return [orthogonalize(matrix) for matrix in matrices]
    return list(orthogonalize(torch.stack(matrices).bfloat16()))


def compute_direction(kernels: Kernels, segment: Segment) -> Tensor:
    """Compute c, (n,) float32; NaN where gradient, c or new momentum is not finite anywhere."""
    out = _make_packed(segment, planes=FLOAT_PLANES)
    alone = segment._replace(slot=segment.slot._replace(bucket_word=0))
    finite = kernels.encode_directions([alone], dtype=torch.float32, out=out)
    c = out.view(-1).view(torch.float32)[: segment.slot.n_elements]
    return c.masked_fill_(~finite, math.nan)


def give_direction(segment: Segment, direction: Tensor) -> Segment:
    """Make a segment to encode in place of another one, whose direction is given.

    Args:
        segment: A parameter, or a piece of one.
        direction: C, as many elements, of any shape and dtype.

    Returns:
        A segment with C in float32 for gradient and momentum, and betas of 0: ops find c = m' = C
        in it, exactly.
    """
    given = direction.float().reshape(segment.param.shape).contiguous()
    plain = Coefficients(beta1=0.0, beta2=0.0, lr=0.0, weight_decay=0.0)
    return Segment(segment.slot, given, given, given, plain)


def encode_alone(kernels: Kernels, segments: Sequence[Segment]) -> list[tuple[Segment, Tensor]]:
    """Encode the step of a single worker: S = sign(C), 0 where C = 0.

    Args:
        kernels: The arithmetic where the segments are.
        segments: Segments of orthogonalized parameters. Read only.

    Returns:
        For each segment with a gradient: the segment, and its S as a ternary reply.
    """
    encoded = []
    for segment, given in zip(segments, orthogonalize_directions(kernels, segments), strict=True):
        if segment.grad is None:
            continue
        here = segment.slot._replace(bucket_word=0)
        signs = _make_packed(segment, planes=2)
        kernels.encode_ternary([given._replace(slot=here)], out=signs)
        encoded.append((segment._replace(slot=here), signs))
    return encoded


def commit_encoded(
    kernels: Kernels, encoded: Sequence[tuple[Segment, Tensor]], *, rounding: Coin | None
) -> None:
    """Commit what ``encode_alone`` returned, as ``Kernels.step_alone`` does with plain parameters.

    Args:
        kernels: The arithmetic where the segments are.
        encoded: Segments, of which ``param`` and ``exp_avg`` are written, and their replies.
        rounding: As for ``Kernels.step_alone``.
    """
    for segment, signs in encoded:
        kernels.commit([segment], [1], signs, reply_format=ReplyFormat.TERNARY, rounding=rounding)


def _make_packed(segment: Segment, *, planes: int) -> Tensor:
    """Make a packed tensor for one segment, which begins with it."""
    n_blocks = -(-segment.slot.n_words // BLOCK_WORDS)
    shape = n_blocks, planes, BLOCK_WORDS
    return torch.empty(shape, dtype=torch.int64, device=segment.param.device)
