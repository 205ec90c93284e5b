"""Lion with workers that vote: a step is encode, exchange, commit, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from distlion import faults, signals
from distlion.failures import Status
from distlion.kernels.coin import Coins
from distlion.optim.arguments import list_group, list_params, name_tensors
from distlion.optim.base import VotingBase
from distlion.optim.saved_state import parse_or_note, restoring, warn_of_one_state
from distlion.peers.fingerprint import Fingerprint
from distlion.peers.ownership import MomentumOwnership, find_ownership, name_worker
from distlion.peers.session import Session, open_session
from distlion.step.agreement import Agreement
from distlion.step.arguments import refusing_former
from distlion.step.bucket import Bucket, cast_votes, check_unchanged, judge
from distlion.step.clipping import ClipNorm
from distlion.step.diagnostics import Diagnosis
from distlion.step.hyperparameters import (
    GroupNumbers,
    describe_hyperparameters,
    describe_steps,
    read_step,
)
from distlion.step.inputs import StepInputs
from distlion.step.momentum import MomentumSync
from distlion.step.nodes import Nodes
from distlion.step.param import VotingParam
from distlion.step.precision import Precision
from distlion.step.replicas import Replicas
from distlion.step.settings import Settings
from distlion.step.stage import run_exchanges
from distlion.step.timeouts import Timeouts
from distlion.step.traffic import Traffic
from distlion.votes.aggregation import Aggregation
from distlion.wire.frame import ChunkKind, Header
from distlion.wire.pattern import Exchange
from distlion.wire.transport import ByteCount
from distlion.wire.verdict import worst_of


class DistributedLion(VotingBase):
    """Train with Lion on many workers that vote on every element, one bit each.

    Equation:
        worker i   c_i = beta1 * m_i + (1 - beta1) * g_i, and sends a vote on c_i
                   m_i = beta2 * m_i + (1 - beta2) * g_i
        all        x = x - lr * (S / n + weight_decay * x)
                   S is the result of ``aggregation`` over the votes, each counted w_i times;
                   w_i = ``weight``; n = 1 except for ``Average``, the sum of all w_i

        (Distributed Lion, arXiv:2404.00438, Algorithm 1; weights: signSGD-FV, arXiv:2403.16372.)
        No DistributedDataParallel: gradients stay local, as ``exp_avg``; parameters stay identical.

    Args:
        params: Parameters, (name, parameter) pairs, or groups, in the same order on all workers;
            float32, bfloat16 or float16. Groups may have lr, betas, weight_decay, cautious and
            aggregation of their own, and ``orthogonalize=True``, see ``group_params``. The first
            rank's overwrite all. Frozen ones: as for ``Lion``.
        lr: Learning rate, 0 or more.
        betas: (beta1, beta2), each in [0, 1); the papers' are (0.9, 0.99), see ``paper_settings``.
        weight_decay: Decoupled weight decay, 0 or more.
        cautious: Set the direction to 0 where the gradient has another sign (arXiv:2411.16085).
        aggregation: ``MajorityVote()``, ``TernaryVote()``, ``MaskedVote()``, ``Average()``,
            ``QuantizedVote(4)``, ``FullPrecision()``, or ``FeedbackVote()`` where workers see
            different data.
        exchange: ``AllReduce()``, ``AllGather()``, ``ParameterServer()``, ``RecursiveDoubling()``,
            or "auto": for each bucket the fastest by the cost model, on the link as measured.
        nodes: ``Nodes(ranks_per_node=8)``: a node's ranks act as one worker; None: each for itself.
        momentum_sync: ``MomentumSync(every=100)`` averages momenta over workers; None: never.
        weight: Number of times that this worker's vote counts, 1 to 255, such as by batch size.
        process_group: The workers that vote; None: the default group, or for DTensors the only mesh
            dim that replicates all. With no group, and WORLD_SIZE unset or 1, this is ``Lion``.
        overlap: Send votes during backward, each bucket as soon as its last gradient has arrived;
            "auto" tries both for 64 steps and keeps the faster way. Do not change gradients or
            hyperparameters between backward and ``step()``. See ``no_sync()``.
        nonfinite: Response to a gradient, direction or new momentum that is not finite: "raise" or
            "skip" the step on all workers, or "abstain": leave out that worker for that parameter.
            All workers skip a step in which a GradScaler saw an overflow, also under "raise".
        clip_norm: ``ClipNorm(1.0, scope="worker")`` or "global"; not with ``overlap``.
        bucket_elements: Most elements of parameters in a bucket; None: 64 Mi, overlap: less.
        replicas: ``Replicas(check_every=1000, on_mismatch="raise")``: comparisons of parameters.
        agreement: ``Agreement(every=10)`` measures how far workers agree, see ``diagnostics()``.
        precision: ``Precision(rounding="stochastic")`` for bfloat16; ``Precision(exp_avg=...)``.
        timeouts: ``Timeouts(step_s=60, busy_s=1800)``: limits of waits for other workers.
        seed: Seed of the coins for ties, zeros and stochastic rounding, 0 to 2^64 - 1.

    Raises:
        InvalidArgumentError: A value is out of range, or a parameter is given twice.
        UnsupportedTypeError: A parameter or argument is of a kind without support.
        ProcessGroupError: No group, or one that cannot carry these parameters.
        ConfigMismatchError: Workers differ in parameters, settings or version.

    Notes:
        ``step()`` is committed, or changes nothing and raises the same on every rank. After
        NonFiniteError, SparseGradientError, StepInputError and GradientChangedError training can go
        on; after any other StepError this optimizer is dead. Ctrl-C waits for the end of a step. A
        crash can leave workers one step apart, never inside a step. Buffers such as BatchNorm's are
        not synchronized; see ``average_buffers``.

    Example:
        >>> optimizer = distlion.DistributedLion(model.parameters(), lr=1e-4, weight_decay=0.1)
        >>> for batch in loader:
        ...     model(batch).loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    _open = staticmethod(open_session)

    @refusing_former
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        *,
        weight_decay: float = 0.0,
        cautious: bool = False,
        aggregation: Aggregation | None = None,
        exchange: Exchange | Literal["auto"] = "auto",
        nodes: Nodes | None = None,
        momentum_sync: MomentumSync | None = None,
        weight: int = 1,
        process_group: dist.ProcessGroup | None = None,
        overlap: bool | Literal["auto"] = False,
        nonfinite: Literal["raise", "skip", "abstain"] = "raise",
        clip_norm: ClipNorm | None = None,
        bucket_elements: int | None = None,
        replicas: Replicas = Replicas(),
        agreement: Agreement = Agreement(),
        precision: Precision = Precision(),
        timeouts: Timeouts = Timeouts(),
        seed: int = 0,
    ) -> None:
        self._settings = Settings(
            exchange=exchange,
            nodes=nodes,
            momentum_sync=momentum_sync,
            overlap=overlap,
            nonfinite=nonfinite,
            clip_norm=clip_norm,
            bucket_elements=bucket_elements,
            replicas=replicas,
            agreement=agreement,
            precision=precision,
            timeouts=timeouts,
            seed=seed,
            weight=weight,
        )
        params = list_params(params)
        super().__init__(
            params,
            lr,
            betas,
            weight_decay=weight_decay,
            cautious=cautious,
            aggregation=aggregation,
            **self._begin(params, process_group),
        )
        self._meet_all()

    def _begin(self, params: list[Any], process_group: dist.ProcessGroup | None) -> dict[str, Any]:
        """Open the session; return what the momenta need to know of it."""
        self._session, pieces = self._open(name_tensors(params), process_group, self._settings)
        return {"pieces": pieces, "worker": name_worker(self._session)}

    def _meet_all(self) -> None:
        with self._session.lifecycle.collective("construction"):
            trained = self._list_trainable()
            self._fixed.note(self.param_groups, self.state)
            lines = self._take_fingerprint(trained).list_lines(self.param_groups)
            self._session.join(lines, trained, self._param_names(), step=self.committed_step)
            self._lay_out()

    def _take_fingerprint(self, params: list[VotingParam]) -> Fingerprint:
        more = [line for stage in self._own_stages for line in stage.list_lines()]
        return self._session.take_fingerprint(
            self.param_groups, params, self._param_names(), self._fixed, more
        )

    def _lay_out(self) -> None:
        """Place parameters into buckets and choose the exchange of each."""
        params, step = self._list_trainable(), self._find_step()
        taken, begin = self._take_fingerprint(params), self._gather_inputs
        self._session.lay_out(
            self.param_groups, params, taken, step=step, begin=begin, own=self._own_stages
        )
        self._fixed.note(self.param_groups, self.state)

    def _do_step(self) -> None:
        session = self._session
        for stage in self._own_stages:
            stage.begin()
        try:
            if session.ranks.is_alone:
                self._step_alone()
            else:
                self._step_together()
        finally:
            for stage in self._own_stages:
                stage.end()
            session.fingerprint.passing = ()

    def _step_together(self) -> None:
        session = self._session
        if self._settings.overlap:
            session.check_scaler(self.param_groups, getattr(self, "grad_scale", None))
        if faults.armed:
            self._fire("before_step", self._known_step)
        with session.lifecycle.collective(f"step {self._known_step}", votes=True):
            try:
                is_committed = self._vote_and_commit()
            finally:  # not before: with overlap, buckets of a step that is refused have left
                for bucket in session.routing.buckets:
                    bucket.clear()
                for stage in session.stages:
                    stage.end()
            if is_committed and self._known_step >= session.replicas.due_step:
                session.compare_replicas(step=self._known_step)
            if self._settings.overlap:
                session.try_overlap(step=self._known_step)

    def _vote_and_commit(self) -> bool:
        """Encode and exchange every bucket; then commit all of them, or none."""
        session, (inputs, buckets) = self._session, self._cast_votes()
        step, verdict = inputs.header.step, judge(buckets)
        if session.sharding is not None or session.ranks.come_and_go:
            verdict = session.meetings.share_verdict(verdict, inputs.header)
        if session.stages and verdict.status is Status.OK:
            verdict = worst_of([verdict, run_exchanges(session.stages, buckets, inputs.header)])
        session.meter.count_step(session.n_elements)
        if verdict.status is not Status.OK:
            return session.abandon(verdict, self.param_groups, inputs)
        if self._settings.replicas.check_every is not None and not session.replicas.are_compared:
            session.compare_replicas(step=step)  # weights may have been loaded after construction
            if session.ranks.come_and_go:  # of a member's processes all commit, or none
                session.meetings.share_verdict(verdict, inputs.header)
        if faults.armed:
            self._fire("before_commit", step)
        check_unchanged(buckets, rank=inputs.rank, step=step)
        session.lifecycle.is_torn = True
        has_votes = False
        for bucket in buckets:
            bucket.commit(inputs.coefficients, inputs.rounding)
            has_votes = has_votes or bool(bucket.reply.present.any())
        for stage in session.stages:
            stage.commit(buckets)
        self._advance()
        session.lifecycle.is_torn, session.has_ended_epoch = False, verdict.ends_epoch
        looks = inputs.wants_digest or session.stages or not session.use.is_over
        if looks or not has_votes:
            session.observe(buckets, wants_digest=inputs.wants_digest)
        if faults.armed:
            self._fire("after_commit", step)
        return True

    def _cast_votes(self) -> tuple[StepInputs, Sequence[Bucket]]:
        session, inputs = self._session, self._gather_inputs()
        if session.overlap is not None:
            return session.overlap.finish(inputs)
        buckets = session.routing.buckets
        cast_votes(buckets, inputs, session.stages)
        return inputs, buckets

    def _gather_inputs(self) -> StepInputs:
        """Gather the inputs that buckets share; other workers hear of errors too."""
        session, groups, problem = self._session, self.param_groups, None
        ranks, settings = session.ranks, self._settings
        if self._own_stages:
            lines = [line for stage in self._own_stages for line in stage.list_passing()]
            session.fingerprint.passing = lines
        toggled = session.fingerprint.list_toggled(groups)
        try:
            if toggled:
                session.fingerprint.check_groups(groups)
            self._known_step = read_step(groups)
            numbers = self._reader.read(self)
        except Exception as error:  # noqa: BLE001
            lines = describe_hyperparameters(groups) + describe_steps(groups)
            numbers, problem = GroupNumbers(lines, (), found_inf=False), error
        if self.state is not self._fixed.state:
            problem = problem or self._fixed.refuse_replaced()
        digest = session.fingerprint.digest(numbers.lines, toggled)
        coins = Coins(settings.seed, self._known_step, ranks.voter)
        inputs = StepInputs(
            rank=ranks.rank,
            header=Header(ChunkKind.VOTE, coins.step, 0, 0, digest, epoch=ranks.roster.epoch),
            coins=coins,
            rounding=coins.rounding if settings.precision.rounding == "stochastic" else None,
            coefficients=numbers.coefficients,
            nonfinite=settings.nonfinite,
            found_inf=numbers.found_inf,
            wants_digest=session.gradients.steps_left > 0,
            note_norm=session.note_norm,
            after_encode=partial(self._fire, "after_encode", coins.step),
        )
        if problem is not None:
            inputs = inputs.refused(problem)
        for stage in session.stages:
            try:
                inputs = stage.amend(inputs)
            except Exception as error:  # noqa: BLE001
                inputs = inputs.refused(error)
        return inputs

    @signals.deferred_signals("a step")
    def _step_alone(self) -> None:
        session = self._session
        session.lifecycle.check_usable()
        if session.step_alone(self.param_groups, self._gather_inputs()):
            for stage in session.stages:
                stage.commit(())
            self._advance()
            if not session.stages:
                session.observe_alone()

    def _fire(self, point: faults.Point, step: int) -> None:
        if faults.armed:
            faults.fire(rank=self._session.ranks.rank, step=step, point=point, subject=self)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients; with overlap, put all but a step's last backward pass inside.

        Example:
            >>> with optimizer.no_sync():
            ...     model(first).loss.backward()
            >>> model(second).loss.backward()
        """
        return nullcontext() if self._session.overlap is None else self._session.overlap.pause()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients; with overlap, give up a step if votes of this worker are already sent.

        Raises:
            StepMismatchError: Some workers gave it up and others did not; nothing was committed.
            PeerLostError, StepTimeoutError, ConfigMismatchError, CorruptFrameError: As ``step()``.
        """
        self._session.give_up("zero_grad()", self.param_groups)
        super().zero_grad(set_to_none)

    @property
    def session(self) -> Session:
        """The parts that all ranks use alike, for the library's own classes around this one."""
        return self._session

    @property
    def traffic(self) -> Traffic:
        """Bytes and messages of this rank, in the last step and in total."""
        return self._session.meter.traffic

    @property
    def plan(self) -> ByteCount:
        """Bytes that this rank sends to the network in one step; with nodes, to other nodes."""
        return self._session.plan(self._find_step())

    @property
    def grad_norm(self) -> float | None:
        """Norm found by ``clip_norm`` in the last committed step, own or "global"; or None."""
        return self._session.grad_norm

    @property
    def momentum_ownership(self) -> MomentumOwnership:
        """The momenta that this process keeps, for checkpoints."""
        return find_ownership(self._session, self._find_step)

    def diagnostics(self) -> list[Diagnosis]:
        """Return the last 1,000 measurements of the workers' agreement, oldest first."""
        return self._session.diagnoses

    def verify_replicas(self) -> None:
        """Compare the parameters of all workers, bit by bit; every worker must call it.

        Raises:
            ReplicaMismatchError: Replicas differ; names the parameters and the minority's ranks.
            ConfigMismatchError: Another worker is at a different call; on every rank.
            CorruptFrameError, ProcessGroupError: Digests were damaged, or the group is gone.
        """
        session, call, step = self._session, "verify_replicas()", self._find_step()
        session.check_idle(call)
        if not session.ranks.is_alone:
            lines = session.fingerprint.list_lines(self.param_groups)
            with session.lifecycle.collective(call):
                session.meetings.meet(call, lines, step=step)
                session.compare_replicas(step=step)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; after construction, every worker must call it with the same group.

        Raises:
            InvalidArgumentError, UnsupportedTypeError, ConfigMismatchError: Nothing changed.
        """
        if not self._session.lifecycle.is_ready:
            super().add_param_group(param_group)
            return
        session, step = self._session, self._find_step()
        group, before = list_group(param_group), list(self.param_groups)
        makes = dict(self._makes)
        entries = {param: dict(entry) for param, entry in self.state.items()}
        session.check_idle("add_param_group()", name_tensors([group]))
        super().add_param_group(group)
        with session.lifecycle.collective("add_param_group()"):
            try:
                lines = self._take_fingerprint(self._list_trainable()).list_lines(self.param_groups)
                lines += session.fingerprint.list_toggled(before)
                session.meetings.meet("add_param_group()", lines, step=step)
                session.fingerprint.check_unchanged(before)
            except BaseException:
                self._remove_last_group(makes, entries)
                raise
            self._lay_out()
            added = self.param_groups[-1]["params"]
            session.replicas.take_over(session.params, added, step=step)

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's state: tensors, numbers and strings only; rules as their ``repr``.

        Its momentum loads into any ``Lion``. ``save_checkpoint`` keeps all workers' momenta, as the
        state of DTensors does: (workers, *shape), of which a ``Lion`` takes ``full_tensor()[i]``.
        Among several workers, OneWorkersStateWarning says so once.

        Raises:
            CheckpointError: An exception cut a commit short.
        """
        session = self._session
        session.lifecycle.check_whole()
        is_of_one = not session.ranks.is_alone and session.sharding is None
        if is_of_one and not self._has_told_of_state:
            self._has_told_of_state = True
            warn_of_one_state(session.ranks.roster.n_voters)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this worker or of another Lion; every worker must call it.

        Keys that it lacks keep their values. For other numbers of workers: ``load_checkpoint``.

        Raises:
            CheckpointError: It belongs to another worker, or does not fit; on every rank.
            InvalidArgumentError: A parameter was frozen and no longer is.
            StepMismatchError, ConfigMismatchError: Workers load other steps, settings or cuts.
        """
        session, step = self._session, self._find_step()
        session.check_idle("load_state_dict()")
        with session.lifecycle.collective("load_state_dict()"):
            filled, problem = parse_or_note(lambda: self._parse_state(state_dict))
            session.meetings.agree("load_state_dict()", problem, step=step)
            session.meet_to_load(filled["param_groups"], self._describe_cuts(filled), step=step)
            session.fingerprint.check_unchanged(self.param_groups)
            with restoring(self):
                self._load_state(self._localize(filled))
                self._lay_out()
        session.replicas.are_compared = False
