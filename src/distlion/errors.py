"""Every exception and warning of distlion.

A caller can catch all of them by ``DistlionError``; each also derives from the built-in exception
that PyTorch would raise in its place, so that existing handlers keep working.
"""

from __future__ import annotations


class DistlionError(Exception):
    """Base class of every exception that distlion raises.

    Attributes:
        is_recoverable: Whether all workers raise it alike and are known to be at the same step, so
            that the same optimizer may be called again.
    """

    is_recoverable = False


class InvalidArgumentError(DistlionError, ValueError):
    """An argument has the right type and a wrong value."""


class UnsupportedTypeError(DistlionError, TypeError):
    """An argument, parameter or tensor is of a kind that cannot be used here."""


class KernelBackendError(DistlionError, RuntimeError):
    """No kernels exist for the device, or the ones asked for, or own sockets, are not built."""


class DeviceError(DistlionError, RuntimeError):
    """A GPU failed in a step; torch's own error, with the details, is the cause of this one."""


class MissingDependencyError(DistlionError, ImportError):
    """An optional package is not installed; the message names the extra that installs it."""


class CheckpointError(DistlionError, ValueError):
    """A saved state does not fit this optimizer."""


class ProcessGroupError(DistlionError, RuntimeError):
    """The process group is missing, was destroyed or replaced, or is dead since a failed step."""


class CrewError(DistlionError, RuntimeError):
    """A crew cannot be joined, or has too few workers to go on."""


class ConcurrentCallError(DistlionError, RuntimeError):
    """A call of an optimizer was made while another one was under way; that one goes on."""


class StepError(DistlionError, RuntimeError):
    """A step was abandoned; parameters, momenta and step counter are as before it.

    Errors of construction and of comparisons carry the number of the step that comes next.

    Attributes:
        rank: Rank of this worker in the voting group.
        step: The step that was abandoned, counted from 0; None for an optimizer that does not
            count.
        culprits: Ranks that caused it, as far as they are known.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = 0,
        step: int | None = None,
        culprits: tuple[int, ...] = (),
        is_recoverable: bool = False,
    ) -> None:
        super().__init__(message if step is None else f"[rank {rank}, step {step}] {message}")
        self.rank = rank
        self.step = step
        self.culprits = culprits
        self.is_recoverable = is_recoverable

    @property
    def committed_step(self) -> int | None:
        """Number of steps that this worker has committed, equal to ``step``."""
        return self.step


class PeerLostError(StepError):
    """A peer closed its connection (crashed, was killed, left the group), or was interrupted."""


class StepTimeoutError(StepError):
    """A peer did not answer within ``Timeouts.step_s``, or not come within its ``busy_s``."""


class EpochOverError(StepError):
    """Members of a crew change, and all leave the epoch without this step.

    Only where votes overlap with backward, steps are local, a GradScaler scales, or this worker was
    left behind: other steps are committed first.
    """


class StepMismatchError(StepError):
    """Workers are at different steps, because one skipped, repeated or swapped a call."""


class ConfigMismatchError(StepError):
    """Workers disagree on parameters, settings or library version."""


class CorruptFrameError(StepError):
    """Received bytes differ from the bytes sent."""


class NonFiniteError(StepError):
    """A gradient, a direction or a new momentum is not finite."""


class StepInputError(StepError, InvalidArgumentError):
    """A parameter, momentum, gradient or hyperparameter is unusable for a step."""


class SparseGradientError(StepError):
    """A parameter has a sparse gradient, which cannot be voted on element by element."""


class GradientChangedError(StepError):
    """A gradient, or a hyperparameter, changed between encoding and committing a step."""


class ReplicaMismatchError(StepError):
    """Parameters that must be bitwise identical differ between workers."""


class IdenticalGradientsWarning(UserWarning):
    """All workers have the same raw gradients, so that their votes carry the information of one."""


class AbsentGradientsWarning(UserWarning):
    """No worker has a gradient for any parameter, so that steps are committed and move nothing."""


class UnusedParametersWarning(UserWarning):
    """Some parameters had no gradient on any worker in the first steps, so nothing trains them."""


class OneWorkersStateWarning(UserWarning):
    """``state_dict()`` holds one worker's momentum, and other workers have others."""


class DifferingModelsWarning(UserWarning):
    """Buffers or frozen parameters differ between workers, so that their models evaluate apart."""


class LostUpdatesWarning(UserWarning):
    """A learning rate is too small to move most parameters of 16 bits."""


class InnerStateResetWarning(UserWarning):
    """Inner state of ``LocalSteps`` was not finite on this worker, and begins anew."""


class CopiedParametersWarning(UserWarning):
    """An inner optimizer of ``LocalSteps`` has copies of parameters, which votes do not move."""


class DisagreeingWorkersWarning(UserWarning):
    """Workers agree with the majority of the others clearly less than the median worker does.

    Attributes:
        workers: Their ranks in the voting group; with nodes, the numbers of their nodes.
    """

    def __init__(self, message: str, *, workers: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.workers = workers
