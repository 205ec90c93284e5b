"""A step of a single worker: its direction is the reply, as in Lion, under every rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distlion.errors import SparseGradientError, StepError
from distlion.failures import SPARSE_WORDS, Status
from distlion.kernels.coin import Coin
from distlion.kernels.contract import Coefficients, Segment
from distlion.kernels.dispatch import choose_kernels
from distlion.kernels.orthogonal import step_alone_orthogonal
from distlion.kernels.reference import Kernels
from distlion.step.bucket import abstain
from distlion.step.inputs import NoteNorm, StepInputs
from distlion.step.param import VotingParam, make_segments, take_gradients
from distlion.wire.verdict import Verdict

ClipAlone = Callable[[Sequence[Segment], NoteNorm], Sequence[Segment]]
"""Function that clips the gradients of a single worker, and notes their norm."""


def gather_alone(
    params: Sequence[VotingParam], coefficients: Sequence[Coefficients], *, step: int | None = None
) -> list[Segment]:
    """Gather the segments of all parameters for the ops.

    Raises:
        SparseGradientError: A gradient is sparse; the error names ``step``.
        InvalidArgumentError: A parameter, gradient or momentum is of another make.
    """
    grads = take_gradients(params)
    for param, grad in zip(params, grads, strict=True):
        if grad is None and param.has_sparse_grad():
            raise SparseGradientError(SPARSE_WORDS.format(name=param.name), step=step)
    grad_scale = coefficients[0].grad_scale if coefficients else 1.0
    return make_segments(params, grads, coefficients, grad_scale)


def step_alone(
    params: Sequence[VotingParam], inputs: StepInputs, clip: ClipAlone | None
) -> Verdict:
    """Do a step of Lion with the present gradients of parameters; see ``commit_alone``."""
    header, step = inputs.header, inputs.header.step
    if header.status is not Status.OK:
        return Verdict.of(header)
    try:
        segments = gather_alone(params, inputs.coefficients, step=step)
    except StepError:
        raise
    except Exception as error:  # noqa: BLE001
        return Verdict.of(inputs.refuse(header, error))
    return commit_alone(
        params,
        segments,
        clip=clip,
        note_norm=inputs.note_norm,
        nonfinite=inputs.nonfinite,
        rounding=inputs.rounding,
        rank=inputs.rank,
        step=step,
        found_inf=inputs.found_inf,
    )


def commit_alone(
    params: Sequence[VotingParam],
    segments: Sequence[Segment],
    *,
    clip: ClipAlone | None,
    note_norm: NoteNorm,
    nonfinite: str,
    rounding: Coin | None,
    step: int,
    rank: int = 0,
    found_inf: bool = False,
) -> Verdict:
    """Do a step of Lion with one worker's segments, under the policy for non-finite values.

    Returns:
        The verdict; nothing has moved unless it is OK.
    """
    norms: list[float] = []
    if clip is not None:
        segments = clip(segments, norms.append)
    by_kernels = _by_kernels(segments)
    if len(by_kernels) == 1:  # two ops read them
        segments = by_kernels[0][0].gather(segments)
    finite = check_finite(segments)
    if nonfinite == "abstain":
        finite = [is_finite and not found_inf for is_finite in finite]
        segments = abstain(segments, finite, rank=rank, step=step)
    elif found_inf:
        return Verdict(Status.OVERFLOW, (rank,))
    elif not all(finite):
        return Verdict(Status.NON_FINITE, (rank,), finite.index(False))
    move_alone(params, segments, rounding)
    for norm in norms:
        note_norm(norm)
    return Verdict(Status.OK)


def move_alone(
    params: Sequence[VotingParam], segments: Sequence[Segment], rounding: Coin | None
) -> None:
    """Move parameters by their own worker's directions."""
    for kernels, own in _by_kernels(segments):
        matrices = [segment for segment in own if segment.coefficients.orthogonalize]
        plain = own
        if matrices:
            plain = [segment for segment in own if not segment.coefficients.orthogonalize]
        kernels.step_alone(plain, rounding=rounding)
        step_alone_orthogonal(kernels, matrices, rounding=rounding)
    for param, segment in zip(params, segments, strict=True):
        if segment.param is not param.param:
            param.write_back(segment.param)


def check_finite(segments: Sequence[Segment]) -> list[bool]:
    """Return for each segment whether all results of a step would be finite."""
    flags = {
        id(segment): is_finite
        for kernels, own in _by_kernels(segments)
        for segment, is_finite in zip(own, kernels.check_finite(own).tolist(), strict=True)
    }
    return [flags[id(segment)] for segment in segments]


def _by_kernels(segments: Sequence[Segment]) -> list[tuple[Kernels, Sequence[Segment]]]:
    """Sort segments by device, so that each device takes one call."""
    devices = {segment.param.device for segment in segments}
    if len(devices) == 1:
        return [(choose_kernels(*devices), segments)]
    return [
        (choose_kernels(device), [each for each in segments if each.param.device == device])
        for device in sorted(devices, key=str)
    ]
