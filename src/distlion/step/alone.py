"""A step of a single worker: its direction is the reply, as in Lion, under every rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distlion.errors import SparseGradientError, StepError
from distlion.failures import SPARSE_WORDS, Status
from distlion.kernels.coin import Coin
from distlion.kernels.contract import Coefficients, Segment
from distlion.kernels.dispatch import choose_kernels
from distlion.kernels.orthogonal import commit_encoded, encode_alone
from distlion.kernels.reference import Kernels
from distlion.step.bucket import abstain
from distlion.step.clipping import ClipNorm, clip_alone
from distlion.step.inputs import StepInputs
from distlion.step.param import VotingParam, make_segments, take_gradients
from distlion.wire.verdict import Verdict

MoveAlone = Callable[[Sequence[VotingParam], Sequence[Segment], Coin | None], None]
"""Function that moves parameters by their own worker's segments, see ``move_alone``."""


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


def move_alone(
    params: Sequence[VotingParam], segments: Sequence[Segment], rounding: Coin | None
) -> None:
    """Move parameters by their own worker's directions."""
    moves = []
    for kernels, own in _by_kernels(segments):
        matrices = [segment for segment in own if segment.coefficients.orthogonalize]
        plain = own
        if matrices:
            plain = [segment for segment in own if not segment.coefficients.orthogonalize]
        moves.append((kernels, plain, encode_alone(kernels, matrices)))
    # Matrix products need memory: if they find none, no parameter of any device has moved.
    for kernels, plain, encoded in moves:
        kernels.step_alone(plain, rounding=rounding)
        commit_encoded(kernels, encoded, rounding=rounding)
    for param, segment in zip(params, segments, strict=True):
        if segment.param is not param.param:
            param.write_back(segment.param)


def step_alone(
    params: Sequence[VotingParam],
    inputs: StepInputs,
    clip: ClipNorm | None,
    move: MoveAlone = move_alone,
) -> Verdict:
    """Do a step with the present gradients of parameters; see ``commit_alone``."""
    header = inputs.header
    if header.status is not Status.OK:
        return Verdict.of(header)
    try:
        segments = gather_alone(params, inputs.coefficients, step=header.step)
    except StepError:
        raise
    except Exception as error:  # noqa: BLE001
        return Verdict.of(inputs.refuse(header, error))
    return commit_alone(params, segments, inputs, clip, move)


def commit_alone(
    params: Sequence[VotingParam],
    segments: Sequence[Segment],
    inputs: StepInputs,
    clip: ClipNorm | None,
    move: MoveAlone = move_alone,
) -> Verdict:
    """Do a step with one worker's segments, under the policy for non-finite values.

    Args:
        params: The parameters.
        segments: A segment for each of them.
        inputs: The inputs of the step.
        clip: The clipping settings; None for no clipping.
        move: Function that moves the parameters; by default a step of Lion.

    Returns:
        The verdict; nothing has moved unless it is OK.
    """
    rank = inputs.rank
    norms: list[float] = []
    if clip is not None:
        segments = clip_alone(segments, clip, norms.append)
    by_kernels = _by_kernels(segments)
    if len(by_kernels) == 1:  # two ops read them
        segments = by_kernels[0][0].gather(segments)
    finite = check_finite(segments)
    if inputs.nonfinite == "abstain":
        finite = [is_finite and not inputs.found_inf for is_finite in finite]
        segments = abstain(segments, finite, rank=rank, step=inputs.header.step)
    elif inputs.found_inf:
        return Verdict(Status.OVERFLOW, (rank,))
    elif not all(finite):
        return Verdict(Status.NON_FINITE, (rank,), finite.index(False))
    move(params, segments, inputs.rounding)
    for norm in norms:
        inputs.note_norm(norm)
    return Verdict(Status.OK)


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
