"""Local steps of any optimizer, then a vote on how far each worker came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer

from distlion.errors import CheckpointError, UnsupportedTypeError
from distlion.local.arguments import check_agreement
from distlion.local.inner_optimizers import InnerOptimizers
from distlion.local.inner_state import do_inner_step, is_creating_state
from distlion.local.outer_step import OuterStep
from distlion.local.sharded_state import export_sharded_state, has_sharded_form, load_sharded_state
from distlion.local.state import CALL, export_local_state, load_local_state
from distlion.local.votes import LocalVotes, Progress
from distlion.optim.base import VotingBase
from distlion.optim.distributed_lion import DistributedLion
from distlion.optim.saved_state import reading_state
from distlion.optim.state_hooks import run_hooks_of_saving, run_hooks_or_refuse
from distlion.step.agreement import Agreement
from distlion.step.arguments import refusing_former
from distlion.step.diagnostics import Diagnosis
from distlion.step.nodes import Nodes
from distlion.step.replicas import Replicas
from distlion.step.timeouts import Timeouts
from distlion.step.traffic import Traffic
from distlion.votes.aggregation import Aggregation
from distlion.wire.pattern import Exchange
from distlion.wire.transport import ByteCount

Inner = Optimizer | Sequence[Optimizer]
"""An inner optimizer, or several that share no parameter."""


class LocalSteps(Optimizer):
    """Train each worker with an optimizer of its own, and vote every few steps on how far it came.

    Equation:
        y_i = ``every`` steps of ``inner`` from the common point x, with the gradients of worker i
        d_i = x - y_i
        u = s * S, the result of ``aggregation`` over the votes on d_1, ..., d_N
        x = x - outer_lr * u, see ``outer_momentum`` too; then y_i = x for all i
        (DiLoCo, arXiv:2311.08105, Algorithm 1, with votes in place of 32 bits)

    It shares ``param_groups`` and ``state`` with ``inner``, so that schedulers, clipping and hooks
    can use either of them. A step without a vote sends nothing.

    Args:
        inner: Any optimizer of torch, or ``Lion``, over this worker's parameters, in the same order
            on all workers. The first rank's values overwrite all. A list of optimizers, each with
            its own parameters: Muon for matrices beside AdamW for all others.
        every: H, steps from one vote to the next, 1 or more.
        aggregation: Rule for deltas: ``ScaledVote()``, ``ResidualVote()``, ``EstimateVote()`` or
            ``StochasticVote()``; None for the first.
        outer_lr: Outer learning rate, above 0; 1 applies the result in full.
        outer_momentum: Weight of the momentum of the results, in [0, 1).
        nesterov: Whether that momentum looks ahead.
        common_device: Device of the common point and of the rule's state, such as "cpu" where a GPU
            has no memory for them; None: each parameter's own device.
        exchange, nodes, weight, process_group, nonfinite: As for ``DistributedLion``.
        bucket_elements, replicas, timeouts, seed: Likewise; steps are votes there.
        agreement: Likewise, without "exclude".

    Raises:
        InvalidArgumentError: A value is out of range, or does not fit another.
        UnsupportedTypeError: A parameter or argument is of a kind without support.
        ProcessGroupError: No group, or one that cannot carry these parameters.
        ConfigMismatchError: Workers differ in parameters, settings or version.

    Notes:
        A vote is committed on all workers, or x does not change and all raise the same. After a
        recoverable error y_i does not change either, so that the next delta covers both periods.
        ``nonfinite="skip"`` gives up the period and begins the next one at x; "abstain" leaves out
        that worker's parameter. Inner state that is not finite counts as such a delta, and begins
        anew after it. x is float32, and deltas are measured from x as rounded to the
        parameter's dtype. Load weights before this is made: the next vote refuses parameters that
        were written to between a vote and the step after it. A write that torch does not count,
        such as one through ``.data``, is found if it changes an element of a sample. Every call
        counts: with a GradScaler, a worker that sees an overflow skips the inner step and stays in
        step with the others. With one worker the vote carries d_1 itself; with a plain outer step
        at rate 1 this is ``inner``. Buffers such as BatchNorm's are not synchronized; see
        ``average_buffers``.

    Example:
        >>> inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
        >>> optimizer = distlion.LocalSteps(inner, every=8)
        >>> for batch in loader:
        ...     model(batch).loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    _step_supports_amp_scaling = True
    _is_set_up = False

    @refusing_former
    def __init__(
        self,
        inner: Inner,
        *,
        every: int = 8,
        aggregation: Aggregation | None = None,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        nesterov: bool = False,
        common_device: torch.device | str | None = None,
        exchange: Exchange | Literal["auto"] = "auto",
        nodes: Nodes | None = None,
        weight: int = 1,
        process_group: dist.ProcessGroup | None = None,
        nonfinite: Literal["raise", "skip", "abstain"] = "raise",
        bucket_elements: int | None = None,
        replicas: Replicas = Replicas(),
        agreement: Agreement = Agreement(),
        timeouts: Timeouts = Timeouts(),
        seed: int = 0,
    ) -> None:
        self._inner = check_inner(inner)
        # torch sets up the hooks and defaults of this one; groups and state stay the inner's.
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self._is_set_up = True
        step = OuterStep(lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
        self._votes = self._open_votes(
            self._inner,
            every,
            step,
            aggregation,
            common_device=common_device,
            exchange=exchange,
            nodes=nodes,
            weight=weight,
            process_group=process_group,
            nonfinite=nonfinite,
            bucket_elements=bucket_elements,
            replicas=replicas,
            agreement=check_agreement(agreement),
            timeouts=timeouts,
            seed=seed,
        )

    def _open_votes(self, *args: Any, **options: Any) -> LocalVotes:
        """Make the votes on deltas; arguments as for ``LocalVotes``."""
        return LocalVotes(*args, **options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._is_set_up:
            self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's."""
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._is_set_up:
            self._inner.state = state

    @property
    def inner(self) -> Optimizer:
        """The optimizer that takes the local steps; several are one, with ``optimizers``."""
        return self._inner

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the inner optimizer."""
        self._inner.zero_grad(set_to_none)

    @property
    def outer_optimizer(self) -> DistributedLion:
        """The optimizer of the common point; its steps are the votes."""
        return self._votes.common

    @property
    def outer_buffers(self) -> list[Tensor]:
        """The momentum of the outer step for each parameter; none without ``outer_momentum``."""
        return self._votes.stage.momentum.buffers

    @property
    def every(self) -> int:
        """Number of steps between two votes."""
        return self._votes.every

    @property
    def local_step(self) -> int:
        """Number of calls of ``step()`` so far, equal on all workers."""
        return self._votes.period.calls

    @property
    def steps_since_vote(self) -> int:
        """Number of calls of ``step()`` since the last vote."""
        return self._votes.period.since

    @property
    def committed_step(self) -> int:
        """Number of votes committed so far."""
        return self._votes.common.committed_step

    @property
    def common_point(self) -> list[Tensor]:
        """The common point x of each parameter that was trainable at construction, in order."""
        return self._votes.pairs.common

    def list_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """List this worker's own parameters, each with its common point."""
        return list(self._votes.pairs.pairs)

    @property
    def progress(self) -> Progress:
        """This worker's place between two votes; set it on all workers alike."""
        return self._votes.progress

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self._votes.progress = progress

    @property
    def traffic(self) -> Traffic:
        """Bytes and messages of this rank; a step is a vote here."""
        return self._votes.common.traffic

    @property
    def plan(self) -> ByteCount:
        """Bytes this rank sends to the network in the next vote; with nodes, to other nodes."""
        return self._votes.common.plan

    def diagnostics(self) -> list[Diagnosis]:
        """Return how far workers agreed on deltas, as ``DistributedLion.diagnostics``."""
        return self.outer_optimizer.diagnostics()

    def verify_replicas(self) -> None:
        """Compare the common point of all workers, as ``DistributedLion.verify_replicas``.

        After a repair all workers begin their periods anew at the common point. Of sharded
        parameters, the repaired shards do.
        """
        self.outer_optimizer.verify_replicas()
        self._votes.give_up_repaired()

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do a step of the inner optimizer; after every H-th call vote on how far this worker came.

        Args:
            closure: Passed to the inner optimizer.

        Returns:
            The result of the inner optimizer's ``step``.

        Raises:
            StepError, ProcessGroupError: As ``DistributedLion.step``, from a vote.
            StepInputError: On some worker parameters were written to between two periods, frozen,
                unfrozen, or added to the inner optimizer alone; on every rank, at the next vote.
            ConfigMismatchError: As the class, or workers vote after different numbers of steps.

        Notes:
            A step that raises before its inner step has ended does not count. Nor does the one by
            which torch.distributed.checkpoint creates the inner optimizer's state.
        """
        try:
            result = self._take_step(closure)
        except BaseException:
            # A GradScaler removes these only after a step that returns.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise
        return result

    def _take_step(self, closure: Callable[[], Any] | None) -> Any:
        if is_creating_state(self._inner):
            return do_inner_step(self, self._inner, closure)
        self._votes.period.check_begin()
        result = do_inner_step(self, self._inner, closure)
        self._votes.count_step()
        self._votes.watch_use()
        return result

    @torch.no_grad()
    def vote(self) -> None:
        """Vote now, for example at the end of a run; every worker must call it.

        This does not change when ``step()`` votes. Without a step since the last vote nothing is
        voted on: all workers move to the common point.

        Raises:
            StepError, ProcessGroupError: As ``DistributedLion.step``.
            InvalidArgumentError: Without a step since the last vote: parameters were written to, or
                workers made different numbers of calls of ``step()``; on every rank.
        """
        self._votes.vote_on_demand()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the inner optimizer and to the common point; every worker must call it.

        Raises:
            InvalidArgumentError, UnsupportedTypeError, ConfigMismatchError: Nothing changed. Where
                one worker or its inner optimizer refuses the group, all raise. Several inner
                optimizers refuse every group.
        """
        if self._is_set_up:
            self._votes.add_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's state: the inner optimizer's, and under "local_steps" all else.

        ``save_checkpoint`` keeps the states of all workers. With sharded parameters all is in
        "state" and "param_groups", also this worker's parameters: DTensors of the shape (workers,
        *shape) where workers differ, for torch.distributed.checkpoint.

        Raises:
            CheckpointError: An exception cut the commit of a vote short.
            UnsupportedTypeError: Parameters are sharded, and the inner state is not cut like them.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        if self._votes.shard_pieces is not None:
            return run_hooks_of_saving(self, export_sharded_state(self._inner, self._votes))
        saved = export_local_state(self._inner.state_dict(), self._votes)
        return run_hooks_of_saving(self, saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this worker; every worker must call it. Parameters are the model's.

        A state of sharded parameters has them too: load the model's weights before it. A state of
        the inner optimizer alone loads too: the rest keeps its present values.

        Raises:
            CheckpointError: It belongs to another worker, has lost a part, or does not fit; on
                every rank.
            StepMismatchError, ConfigMismatchError: Workers load other steps or settings.
        """
        try:
            with reading_state():
                state_dict = run_hooks_or_refuse(self, state_dict)
                is_sharded = has_sharded_form(self._votes, state_dict)
        except CheckpointError as error:
            self._votes.agree(CALL, error)
            raise
        if is_sharded:
            load_sharded_state(self._inner, self._votes, state_dict)
        elif progress := load_local_state(self._inner, self._votes, state_dict):
            self._votes.progress = progress
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse copies, as ``DistributedLion`` does.

        Raises:
            UnsupportedTypeError: Always.
        """
        raise UnsupportedTypeError(
            f"{type(self).__name__} cannot be copied or pickled: its connections and votes belong "
            "to this process. Save state_dict(), or every worker's state by "
            "distlion.save_checkpoint, and load it into a new optimizer"
        )


def check_inner(inner: object) -> Optimizer:
    """Return the optimizer that takes the local steps, made of all if there are several.

    Raises:
        UnsupportedTypeError: It is not an optimizer, or its workers communicate in each step.
        InvalidArgumentError: A list is empty, or two of its optimizers share a parameter.
    """
    if isinstance(inner, list | tuple):
        return InnerOptimizers([_check_alone(each) for each in inner])
    return _check_alone(inner)


def _check_alone(inner: object) -> Optimizer:
    if isinstance(inner, VotingBase | LocalSteps) or not isinstance(inner, Optimizer):
        raise UnsupportedTypeError(
            f"inner is a {type(inner).__name__}; expected an optimizer of torch.optim, or Lion, "
            "that takes steps without other workers, or a list of such"
        )
    return inner
