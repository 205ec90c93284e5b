"""Local steps of any optimizer, then a vote on how far each worker came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer

from distlion.aggregation import Aggregation
from distlion.exchange import Exchange
from distlion.optim.arguments import label_params
from distlion.optim.around import AroundInner, undoing_groups
from distlion.optim.common_point import CommonPoint
from distlion.optim.inner_step import do_inner_step
from distlion.optim.late_vote import LateVote
from distlion.optim.local_arguments import check_delay, check_every_steps, find_common_device
from distlion.optim.local_pairs import LocalPairs
from distlion.optim.local_period import LocalPeriod
from distlion.optim.local_state import LOCAL_KEY, export_local_state, load_local_state
from distlion.optim.outer_step import OuterStep
from distlion.options import Diagnosis, Nodes
from distlion.step import Traffic
from distlion.transport import ByteCount


class LocalSteps(AroundInner):
    """Train each worker with an optimizer of its own, and vote every few steps on how far it came.

    Equation:
        y_i = ``every`` steps of ``inner`` from the common point x, with the gradients of worker i
        d_i = x - y_i
        u = s * S, as ``aggregation`` makes it of the votes on d_1, ..., d_N
        x = x - outer_lr * u, or what ``outer`` makes of u; then y_i = x for all i
        (DiLoCo, arXiv:2311.08105, Algorithm 1, with votes in place of 32 bits)

    It shares ``param_groups`` and ``state`` with ``inner``, so that schedulers, clipping and hooks
    may work on either of them. A step without a vote sends nothing.

    Args:
        inner: Any optimizer of torch, or ``Lion``, over this worker's parameters, in the same order
            on all workers. The first rank's values overwrite all.
        every: H, steps from one vote to the next, 1 or more.
        delay: Steps after which the outcome of a vote is taken, less than ``every``. A vote travels
            on a thread of its own meanwhile, and what the worker has moved since it began stays.
        aggregation: How deltas are voted on: ``ScaledVote()``, ``ResidualVote()``,
            ``EstimateVote()`` or ``StochasticVote()``; None for the first. With ``outer="lion"``
            any rule of ``DistributedLion``; None for ``MajorityVote()``.
        outer_lr: Outer rate, above 0; None for 1, which moves x to where the outcome says. "lion"
            needs a rate.
        outer_momentum: Weight of the momentum of the outcomes, in [0, 1).
        nesterov: Whether that momentum looks ahead.
        outer: "sgd", or "lion": a step of ``DistributedLion`` with the deltas for gradients.
        outer_betas: Betas of "lion"; None for (0.9, 0.99).
        common_on: Device of the common point and of what votes keep, such as "cpu" where a GPU has
            no room for them; None: that of each parameter.
        exchange, nodes, process_group, nonfinite, on_divergence: As for ``DistributedLion``.
        bucket_elements, check_every, diagnose_every, init_timeout_s, step_timeout_s, seed: As for
            ``DistributedLion``; steps are votes there.

    Raises:
        InvalidArgumentError: A value is out of range, or does not go with another.
        UnsupportedTypeError: A parameter or argument is of a kind without support.
        ProcessGroupError: No group, or one that cannot carry these parameters.
        ConfigMismatchError: Workers differ in parameters, settings or version.

    Notes:
        A vote is committed on all workers, or x is as before and all raise the same. After an error
        from which training may go on, y_i is as before too, so that the next delta covers both
        periods. ``nonfinite="skip"`` gives up the period, and begins the next one at x; "abstain"
        leaves that worker's parameter out. A delta is that from x as rounded to the parameter's
        dtype; x is float32. Load weights before this is made: the next vote refuses what is written
        to parameters between a vote and the step after it. Calls are counted, whatever they do:
        with a GradScaler a worker that sees an overflow leaves out the inner step and stays in step
        with the others. With one worker a vote says d_1 itself, and with a plain outer step at rate
        1 this is ``inner``.
        Buffers such as BatchNorm's are not replicated: ``average_buffers``.

    Example:
        >>> inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
        >>> optimizer = distlion.LocalSteps(inner, every=8)
        >>> for batch in loader:
        ...     model(batch).loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        inner: Optimizer,
        *,
        every: int = 8,
        delay: int = 0,
        aggregation: Aggregation | None = None,
        outer_lr: float | None = None,
        outer_momentum: float = 0.0,
        nesterov: bool = False,
        outer: Literal["sgd", "lion"] = "sgd",
        outer_betas: tuple[float, float] | None = None,
        common_on: torch.device | str | None = None,
        exchange: Exchange | Literal["auto"] = "auto",
        nodes: Nodes | None = None,
        process_group: dist.ProcessGroup | None = None,
        nonfinite: Literal["raise", "skip", "abstain"] = "raise",
        on_divergence: Literal["raise", "repair"] = "raise",
        bucket_elements: int | None = None,
        check_every: int | None = 1000,
        diagnose_every: int | None = None,
        init_timeout_s: float = 300,
        step_timeout_s: float = 60,
        seed: int = 0,
    ) -> None:
        super().__init__(inner)
        self._every, self._delay = check_every_steps(every), check_delay(delay, every)
        self._period = LocalPeriod()
        self._late: LateVote | None = None
        self._is_late = False  # whether the vote that is under way is taken later
        step = OuterStep.choose(
            kind=outer, lr=outer_lr, momentum=outer_momentum, nesterov=nesterov, betas=outer_betas
        )
        self._is_plain = step.kind == "sgd" and step.lr == 1 and not step.momentum
        names = label_params(inner.param_groups)
        self._pairs = LocalPairs(find_common_device(common_on))
        self._votes = CommonPoint(
            self._pairs.place(list(names.values()), list(names), known={}),
            step,
            aggregation,
            more=[f"local steps: a vote every {every}, taken {delay} later"],
            on_commit=self._end_period,
            exchange=exchange,
            nodes=nodes,
            process_group=process_group,
            nonfinite=nonfinite,
            on_divergence=on_divergence,
            bucket_elements=bucket_elements,
            check_every=check_every,
            diagnose_every=diagnose_every,
            init_timeout_s=init_timeout_s,
            step_timeout_s=step_timeout_s,
            seed=seed,
        )
        self._period.know(names)
        self._pairs.take_common()
        self._period.take(self._pairs.pairs, is_first=True)

    @property
    def votes(self) -> CommonPoint:
        """The optimizer of the common point, whose steps are the votes; no vote is under way."""
        if self._late is not None:
            self._late.wait()
        return self._votes

    @property
    def every(self) -> int:
        """Steps from one vote to the next."""
        return self._every

    @property
    def local_step(self) -> int:
        """Number of calls of ``step()`` so far, equal on all workers."""
        return self._period.calls

    @property
    def committed_step(self) -> int:
        """Number of votes committed so far; one that is under way does not count yet."""
        return self._votes.committed_step

    @property
    def common_point(self) -> list[Tensor]:
        """The common point x of each parameter that was trainable at construction, in order.

        A vote that is under way is waited for.
        """
        if self._late is not None:
            self._late.wait()
        return self._pairs.common

    def list_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """List this worker's own parameters, each with its common point."""
        return list(self._pairs.pairs)

    def list_begun(self) -> list[Tensor] | None:
        """List where this worker was when the vote began that is to be taken; None for none."""
        return None if self._late is None or self._late.has_failed else self._late.begun

    @property
    def steps_since_vote(self) -> int:
        """Number of calls of ``step()`` since the last vote."""
        late = self._late
        return self._period.since_vote + (late.steps if late and late.has_failed else 0)

    def set_progress(
        self, local_step: int, since_vote: int, begun: Sequence[Tensor] | None
    ) -> None:
        """Set both numbers of calls, and what ``list_begun`` returns; on all workers alike."""
        self._period.set_progress(local_step, since_vote)
        self._late = None
        if begun is not None:
            pairs = zip(self._pairs.own, begun, strict=True)
            self._late = LateVote([each.to(param, copy=True) for param, each in pairs])

    @property
    def traffic(self) -> Traffic:
        """Bytes and messages of this rank; a step there is a vote."""
        return self._votes.traffic

    @property
    def plan(self) -> ByteCount:
        """Bytes that this rank will hand to the network in one vote; with nodes, to other nodes."""
        return self._votes.plan

    def diagnostics(self) -> list[Diagnosis]:
        """Return how far workers agreed on deltas, as ``DistributedLion.diagnostics``."""
        return self.votes.diagnostics()

    def verify_replicas(self) -> None:
        """Compare the common point of all workers, as ``DistributedLion.verify_replicas``."""
        self.votes.verify_replicas()

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do a step of the inner optimizer; after every H-th call vote on how far this worker came.

        Args:
            closure: Handed to the inner optimizer.

        Returns:
            What the inner optimizer's ``step`` returned.

        Raises:
            StepError, ProcessGroupError: As ``DistributedLion.step``, of a vote.
            StepInputError: On some worker parameters were written to between two periods, frozen,
                unfrozen, or added to the inner optimizer alone; on every rank, at the next vote.
            ConfigMismatchError: As it says, or workers vote after different numbers of steps.

        Notes:
            A step that raises before its inner step has ended was not taken, and does not count.
        """
        try:
            self._period.check_begin()
            result = do_inner_step(self, self._inner, closure)
            self._period.count()
            place = self._period.calls % self._every
            if self._late is not None and place == self._delay:
                self._land()
            if place == 0:
                self._begin_vote()
        except BaseException:
            # A GradScaler takes these back only from a step that returns.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise
        return result

    def _begin_vote(self) -> None:
        """Vote; with a delay, only begin to. A worker that is alone waits for nobody."""
        if self._delay and not self._votes.is_alone:
            self._is_late = True
            self._prepare_vote()
            steps, self._period.since_vote = self._period.since_vote, 0
            self._late = LateVote.start(self._votes, self._pairs.pairs, steps=steps)
            self._period.note_begun(self._pairs.own, self._late.begun)
        else:
            self.vote()

    def _prepare_vote(self) -> None:
        problem = self._period.find_problem(self._inner.param_groups)
        self._votes.prepare_vote(self._period.calls, problem)

    def _land(self) -> None:
        """Take the outcome of a late vote, or raise what it has raised."""
        self._period.since_vote = self.steps_since_vote
        late, self._late = self._late, None
        if late is not None:
            self._period.check_begin()
            late.land(self._pairs.pairs)

    @torch.no_grad()
    def vote(self) -> None:
        """Vote now, for example at the end of a run; every worker must call it.

        Votes by ``step()`` come when they would have come without it. A late vote is taken before.
        Without a step since the last vote nothing moves: parameters become those of the common
        point, which workers reach together.

        Raises:
            StepError, ProcessGroupError: As ``DistributedLion.step``.
            InvalidArgumentError: Without a step: parameters were written to, or workers have made
                other calls of ``step()``; on every rank.
        """
        self._land()
        votes, self._is_late = self._votes, False
        if not self._period.since_vote:
            self._period.check_begin()
            problem = self._period.find_problem(self._inner.param_groups)
            votes.agree_on("vote()", problem, f"calls of step() so far: {self._period.calls}")
            self._take_common()
            return
        self._prepare_vote()
        self._pairs.set_deltas()
        before = votes.committed_step
        try:
            votes.step()
        finally:
            self._pairs.forget_deltas()
        self._period.since_vote = 0
        # All workers give the period up, or replicas were repaired after the vote.
        if votes.committed_step == before or votes.settings.on_divergence == "repair":
            self._take_common()

    def _end_period(self) -> None:
        """Begin the next period at the common point: alone and plain, where this worker is."""
        if self._is_late:
            return
        if self._is_plain and self._votes.is_alone:
            self._pairs.give_common()
        else:
            self._pairs.take_common()
        self._period.take(self._pairs.pairs)

    def _take_common(self) -> None:
        self._pairs.take_common()
        self._period.take(self._pairs.pairs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the inner optimizer and to the common point; every worker must call it.

        Raises:
            InvalidArgumentError, UnsupportedTypeError, ConfigMismatchError: Nothing changed. Where
                one worker or its inner optimizer refuses the group, all raise.
            StepError: As ``step()``, of a late vote, which is taken before; nothing was added.
        """
        if not self._is_set_up:
            super().add_param_group(param_group)
            return
        self._land()  # or there would be parameters that the vote knows nothing of
        before, problem = list(self._pairs.pairs), None
        placed: list[tuple[str, Tensor]] = []
        with undoing_groups(self._inner):
            try:
                placed = self._pairs.add_group(self._inner, param_group)
            except Exception as error:  # noqa: BLE001, the others wait for this worker
                problem = error
            try:
                self._votes.agree_on("add_param_group()", problem)
                self._votes.add_param_group({"params": placed})
            except BaseException:
                self._pairs.pairs = before
                raise
        self._period.know(label_params(self.param_groups[-1:]))
        self._pairs.take_common(len(before))
        self._period.note_common(self._pairs.pairs[len(before) :])

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's state: the inner optimizer's, and under "local_steps" all else.

        ``save_checkpoint`` keeps the states of all workers.

        Raises:
            CheckpointError: An exception cut the commit of a vote short.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        own = export_local_state(
            self.votes,
            self.common_point,
            calls=self._period.calls,
            since_vote=self.steps_since_vote,
            every=self._every,
            begun=self.list_begun(),
        )
        return self._run_hooks_of_saving({**self._inner.state_dict(), LOCAL_KEY: own})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this worker; every worker must call it. Parameters are the model's.

        A state of the inner optimizer alone loads too: the rest keeps its present values.

        Raises:
            CheckpointError: It is that of another worker, or does not fit; on every rank.
            StepMismatchError, ConfigMismatchError: Workers load other steps or settings.
        """
        state_dict = self._run_hooks_of_loading(state_dict)
        own = load_local_state(
            self._inner, self.votes, self.common_point, state_dict, every=self._every
        )
        if own is not None:
            self.set_progress(own["local_step"], own["steps_since_vote"], own["begun"])
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)
