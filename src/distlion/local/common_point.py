"""The common point of workers that take local steps; votes on their deltas move it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Event
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from distlion import signals
from distlion.errors import (
    CheckpointError,
    DistlionError,
    InvalidArgumentError,
    UnsupportedTypeError,
)
from distlion.failures import Status
from distlion.local.arguments import check_common_device
from distlion.local.outer_step import OuterMomentum, OuterStep
from distlion.local.parts import take_turns
from distlion.optim.distributed_lion import DistributedLion
from distlion.peers.fingerprint import Fingerprint
from distlion.step.alone import check_finite, gather_alone
from distlion.step.bucket import Bucket, abstain
from distlion.step.inputs import StepInputs
from distlion.step.outcome import describe_problem
from distlion.step.param import VotingParam, is_dtensor
from distlion.step.shard_pieces import ShardPieces
from distlion.votes.aggregation import Aggregation
from distlion.wire.verdict import Verdict


class CommonPoint(DistributedLion):
    """Vote on deltas as gradients of the common point; then do the outer step.

    A step is one of ``DistributedLion``: it is committed on all workers, or x does not change and
    all raise the same error. The outer momentum and ``on_commit`` are part of the commit.

    Args:
        params: The common point as (name, parameter) pairs, float32.
        outer: The outer step.
        rule: The aggregation rule for deltas.
        more: Further lines that must be equal on all workers.
        parts: Parts of the parameters, which take turns to vote: part s % ``parts`` in step s.
        on_commit: Function called at the end of a commit.
        **options: As for ``DistributedLion``.

    Attributes:
        has_entered: Event that is set once a vote has begun its exchange.

    Raises:
        InvalidArgumentError: All ranks act as one worker, so that there is nobody to vote with.
        DistlionError: As for ``DistributedLion``.
    """

    _takes_scales = True

    def __init__(
        self,
        params: ParamsT,
        outer: OuterStep,
        rule: Aggregation | None,
        *,
        more: Sequence[str],
        parts: int,
        on_commit: Callable[[], None],
        **options: Any,
    ) -> None:
        self._outer, self._lines, self._on_commit = outer, [*outer.describe(), *more], on_commit
        self._n_parts, self._calls = parts, 0
        self._cast: Sequence[Bucket] = ()
        self._voted_alone: Sequence[int] = ()
        self.has_entered = Event()
        self._problem: InvalidArgumentError | None = None
        super().__init__(
            params,
            outer.vote_lr,
            outer.vote_betas,
            aggregation=outer.choose_rule(rule),
            # Without betas nothing reads it, so it takes the smallest dtype.
            exp_avg_dtype=None if outer.kind == "lion" else torch.bfloat16,
            **options,
        )
        ranks = self._session.ranks
        if ranks.roster.n_voters == 1 and not ranks.is_alone:
            raise InvalidArgumentError(
                f"all {ranks.n_ranks} ranks act as one worker, without another voter. Expected "
                "several workers. Use the inner optimizer alone, or smaller nodes"
            )
        self.outer_momentum = OuterMomentum(outer, self.list_moving())

    def list_moving(self) -> list[Tensor]:
        """List the parameters that votes move, in order."""
        return [param.param for param in self._session.params]

    def list_turns(self) -> list[int]:
        """List the part of each parameter that votes move, in order."""
        return [param.turn for param in self._session.params]

    @property
    def outer_step(self) -> OuterStep:
        """The outer step."""
        return self._outer

    @property
    def shard_pieces(self) -> ShardPieces | None:
        """The form of sharded tensors in states; None where parameters are whole."""
        return self._pieces if isinstance(self._pieces, ShardPieces) else None

    @property
    def turn(self) -> int:
        """The part that votes next."""
        return self._find_step() % self._n_parts

    @property
    def rank(self) -> int:
        """This rank among all workers."""
        return self._session.ranks.rank

    @property
    def is_alone(self) -> bool:
        """True if there is no other worker."""
        return self._session.ranks.is_alone

    def take_repair(self) -> bool:
        """Return whether replicas were repaired since the last call."""
        replicas = self._session.replicas
        were_repaired, replicas.were_repaired = replicas.were_repaired, False
        return were_repaired

    def _list_trainable(self) -> list[VotingParam]:
        return take_turns(super()._list_trainable(), self._n_parts)

    def agree(self, call: str, problem: CheckpointError | None, said: str = "") -> None:
        """Raise on all ranks if one of them cannot make a call that all of them make.

        Args:
            call: Name of the call.
            problem: Reason why this rank cannot make it; None for no reason.
            said: A line that must be equal on all ranks; "" on all of them for none.

        Raises:
            CheckpointError: Some rank has a problem, or a different line.
        """
        session = self._session
        session.check_idle(call)
        with session.lifecycle.exchange(call):
            session.meetings.agree(call, problem, step=self._find_step(), said=said)

    def agree_on(self, call: str, problem: Exception | None, said: str = "") -> None:
        """Do the same as ``agree`` in a call that loads nothing.

        Raises:
            InvalidArgumentError: Another rank has a problem, or a different line.
            Exception: ``problem``.
        """
        found = None if problem is None else CheckpointError(describe_problem(problem))
        try:
            self.agree(call, found, said)
        except CheckpointError as error:
            refused = problem or InvalidArgumentError(str(error))
            if isinstance(refused, DistlionError):
                refused.is_recoverable = True
            raise refused from error

    def prepare_vote(self, calls: int, problem: InvalidArgumentError | None) -> None:
        """Set what this worker tells the others in the next vote.

        Args:
            calls: Number of calls of ``step()``, which must be equal on all workers.
            problem: Reason why this worker cannot vote, which all workers then raise; or None.
        """
        self._calls, self._problem = calls, problem

    def _gather_inputs(self) -> StepInputs:
        self.has_entered.set()
        self._session.fingerprint.passing = [f"calls of step() so far: {self._calls}"]
        inputs = super()._gather_inputs()
        # Numbered by the votes on this part, so that coins that cancel out come in succession.
        number = inputs.header.step // self._n_parts
        inputs = replace(inputs, coins=replace(inputs.coins, step=number))
        if self._problem is None or inputs.header.status is not Status.OK:
            return inputs
        return inputs.refused(self._problem)

    def _take_fingerprint(self, params: list[VotingParam]) -> Fingerprint:
        names, dtype = self._param_names(), self._exp_avg_dtype
        return self._session.take_fingerprint(
            self.param_groups, params, names, dtype, self._fixed, more=self._lines
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._session.lifecycle.is_ready:
            self.outer_momentum.cover(self.list_moving())

    def _do_step(self) -> None:
        are_voting = [turn == self.turn for turn in self.list_turns()]
        self.outer_momentum.begin(self.list_moving(), are_voting)
        try:
            super()._do_step()
        finally:
            self.outer_momentum.forget()
            self._cast, self._voted_alone, self._session.fingerprint.passing = (), (), ()

    def _cast_votes(self) -> tuple[StepInputs, Sequence[Bucket]]:
        inputs, self._cast = super()._cast_votes()
        return inputs, self._cast

    def _advance(self) -> None:
        voted = set(self._voted_alone)
        for bucket in self._cast:
            voted.update(bucket.list_voted())
        self.outer_momentum.finish(self.list_moving(), voted)
        super()._advance()
        self._on_commit()

    @signals.deferred_signals("a step")
    def _step_alone(self) -> None:
        """Move by this worker's delta; without other workers nothing is rounded to bits.

        Equation:
            u = d, in place of s * S
        """
        if self._outer.kind == "lion":
            super()._step_alone()
            return
        session = self._session
        session.lifecycle.check_usable()
        inputs = self._gather_inputs()
        verdict = self._move_alone(inputs)
        session.meter.count_step(session.n_elements)
        if verdict.status is Status.OK or session.abandon(verdict, self.param_groups, inputs):
            self._advance()

    def _move_alone(self, inputs: StepInputs) -> Verdict:
        header, params = inputs.header, self._session.params
        if header.status is not Status.OK:
            return Verdict.of(header)
        try:
            segments = gather_alone(params, inputs.coefficients, step=header.step)
        except Exception as error:  # noqa: BLE001
            inputs.problems.append(describe_problem(error))
            return Verdict(Status.INPUT, (inputs.rank,))
        finite = check_finite(segments)
        if inputs.nonfinite == "abstain":
            segments = list(abstain(segments, finite, rank=inputs.rank, step=header.step))
        elif not all(finite):
            return Verdict(Status.NON_FINITE, (inputs.rank,), finite.index(False))
        self._voted_alone = [n for n, each in enumerate(segments) if each.grad is not None]
        for param, segment in zip(params, segments, strict=True):
            if segment.grad is not None:
                segment.param.sub_(segment.grad * segment.coefficients.lr)
                param.write_back(segment.param)
        return Verdict(Status.OK)


@torch.no_grad()
def copy_to_common(param: Tensor, device: torch.device | None) -> Tensor:
    """Copy a parameter into a contiguous float32 tensor, perhaps on another device.

    Raises:
        UnsupportedTypeError: It is a DTensor, whose mesh sets its device.
        InvalidArgumentError: This machine has no such device.
    """
    if is_dtensor(param):
        if device is not None and device.type != param.device.type:
            raise UnsupportedTypeError(
                f"common_device={str(device)!r}: the parameters are DTensors on "
                f"{param.device.type}, and the common point has their mesh. Leave it out"
            )
        return param.detach().to(torch.float32, copy=True)
    if device is not None:
        check_common_device(device)
    common = torch.empty(param.shape, dtype=torch.float32, device=device or param.device)
    return common.copy_(param)


@torch.no_grad()
def find_delta(param: Tensor, common: Tensor) -> Tensor:
    """Return a parameter's distance from where its period began, float32 as the common point."""
    begun = common.to(param.dtype).to(torch.float32)
    return begun - param.detach().to(common.device, torch.float32)
