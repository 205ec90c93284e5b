"""The interface of a stage: a part of a step that only some optimizers have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from distlion.failures import Status
from distlion.step.bucket import Bucket
from distlion.step.inputs import StepInputs
from distlion.step.param import VotingParam
from distlion.step.ranks import Ranks
from distlion.wire.frame import Header
from distlion.wire.transport import ByteCount, Transport
from distlion.wire.verdict import Verdict, worst_of


@dataclass(frozen=True)
class Surroundings:
    """The parts of an optimizer that its stages are built for.

    Attributes:
        ranks: Its ranks.
        groups: Its param groups.
        params: Its trainable parameters.
        between: The link between the ranks that vote with each other; None for a single worker.
        inside: The link between the ranks of this worker; None for a worker of one rank.
        step: The step that errors name.
    """

    ranks: Ranks
    groups: Sequence[dict[str, Any]]
    params: Sequence[VotingParam]
    between: Transport | None
    inside: Transport | None
    step: int


class Stage:
    """A part of a step that only some optimizers have; by default each method does nothing.

    A step calls ``amend`` before anything is sent, ``before`` before the first vote is encoded,
    ``exchange`` once the votes have succeeded, ``commit`` with the commit of parameters, ``warn``
    after it, and ``end`` last, also after an error. Every rank has the same stages in the same
    order.

    Only stages that are passed to ``VotingBase.with_stages`` get ``lay_out``, ``begin``,
    ``move_alone``, ``list_lines`` and ``list_passing``. ``VirtualCluster`` runs no other stages,
    and calls these methods, ``commit`` and ``end`` only. A single worker has neither ``before`` nor
    ``exchange``, so an option that changes its step needs a branch in ``step/alone.py`` too.

    Attributes:
        needs_all: Whether it has a ``before``, so that no vote may leave during backward.
        takes_scales: Whether rules may vote on a step length, as on deltas.
        keeps_momenta: Whether workers have momenta; only with betas of 0 they need none.
    """

    needs_all: ClassVar[bool] = False
    takes_scales: ClassVar[bool] = False
    keeps_momenta: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.needs_all = cls.before is not Stage.before

    def list_lines(self) -> list[str]:
        """List settings, one a line, that must be equal on all ranks."""
        return []

    def list_passing(self) -> list[str]:
        """List further lines that must be equal on all ranks in the next step."""
        return []

    def lay_out(self, params: Sequence[VotingParam]) -> None:
        """Take the parameters of the next steps, on which all ranks have agreed."""

    def begin(self) -> None:
        """Begin a step."""

    def end(self) -> None:
        """End a step, whether or not it was committed."""

    def amend(self, inputs: StepInputs) -> StepInputs:
        """Return the inputs of a step with this stage's changes."""
        return inputs

    def before(self, buckets: Sequence[Bucket], inputs: StepInputs) -> None:
        """Change the loaded segments of all buckets before the first vote is encoded."""

    def exchange(self, buckets: Sequence[Bucket], header: Header) -> tuple[Header, Verdict]:
        """Exchange this stage's own data, before the commit, so that a step stays atomic.

        Args:
            buckets: The buckets of the step, with their replies.
            header: This rank's header, with the errors of earlier stages.

        Returns:
            The header, with errors found here; and the verdict of all ranks on it.
        """
        return header, Verdict(Status.OK)

    def move_alone(self, params: Sequence[VotingParam], inputs: StepInputs) -> Verdict | None:
        """Do the step of a worker without others; None leaves it to Lion's."""
        return None

    def commit(self, buckets: Sequence[Bucket]) -> None:
        """Write this stage's results, of a step that is committed; nothing may fail here."""

    def warn(self) -> None:
        """Warn of what the step has shown, which is then committed."""

    def plan(self, step: int) -> ByteCount:
        """Declare the bytes that this rank sends between voters for it in a step."""
        return ByteCount()

    def describe_kept(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """List a line for each thing that it keeps in param groups, equal on all ranks."""
        return []


def run_exchanges(stages: Sequence[Stage], buckets: Sequence[Bucket], header: Header) -> Verdict:
    """Run the exchanges of all stages, also after an error; return the worst verdict."""
    verdicts = []
    for stage in stages:
        header, verdict = stage.exchange(buckets, header)
        verdicts.append(verdict)
    return worst_of(verdicts)
