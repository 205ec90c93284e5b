"""Lion whose workers vote: a step is encode, exchange, commit, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from distlion import faults
from distlion.aggregation import Aggregation, MajorityVote
from distlion.errors import InvalidArgumentError
from distlion.exchange import (
    ChunkKind,
    Exchange,
    Exchanging,
    Header,
    Status,
    Verdict,
    run_all,
    worst_of,
)
from distlion.kernels import Coin, Coins, Segment
from distlion.optim.arguments import check_exp_avg_dtype
from distlion.optim.assembly import AssembledLion
from distlion.optim.lion import check_finite, step_alone
from distlion.voting.clipping import ClipNorm, clip_alone
from distlion.voting.diagnostics import Diagnosis
from distlion.voting.gradients import IdenticalGradientsWatch
from distlion.voting.momentum_sync import MomentumSync
from distlion.voting.node_stage import Nodes
from distlion.voting.overlap import Overlap
from distlion.voting.replicas import digest_settings
from distlion.voting.route import Route
from distlion.voting.settings import Settings
from distlion.voting.vote import (
    BucketVote,
    Draft,
    StepInputs,
    abstain,
    cast_vote,
    check_unchanged,
    draft_vote,
    find_nonfinite,
    keep_header,
)


class DistributedLion(AssembledLion):
    """Train with Lion on many workers that vote on every coordinate, one bit each.

    Equation:
        worker i   c_i = beta1 * m_i + (1 - beta1) * g_i, and sends a vote on c_i
                   m_i = beta2 * m_i + (1 - beta2) * g_i
        all        x = x - lr * (S / n + weight_decay * x)
                   S is what ``aggregation`` makes of the votes; n = 1, but for ``Average``

        (Distributed Lion, arXiv:2404.00438, Algorithm 1.) Gradients stay local: no all-reduce, no
        DistributedDataParallel. Every worker keeps its own momentum ``exp_avg``; parameters stay
        equal to the bit.

    Args:
        params: Parameters, (name, parameter) pairs, or groups, in the same order on all workers;
            float32, bfloat16 or float16. Groups may carry their own lr, betas, weight_decay and
            aggregation. Those that do not require a gradient are skipped. All are overwritten by
            those of the group's first rank.
        lr: Learning rate, 0 or more.
        betas: (beta1, beta2), each in [0, 1).
        weight_decay: Decoupled weight decay, 0 or more.
        aggregation: ``MajorityVote()``, ``TernaryVote()``, ``Average()``, ``QuantizedVote(bits=4)``
            or ``FullPrecision()``.
        exchange: ``AllReduce()``, ``AllGather()``, ``ParameterServer()``, or "auto": for each
            bucket what is fastest by the cost model, on the link as measured at construction.
        nodes: ``Nodes(size=8)`` lets the ranks of a node act as one worker; None is every rank for
            itself.
        momentum_sync: ``MomentumSync(every=100)`` averages momenta over workers now and then; None
            is never.
        process_group: The workers that vote; None is the default group. Without any group, and
            WORLD_SIZE unset or 1, this is ``Lion``.
        overlap: Send votes during backward, each bucket as soon as its last gradient has arrived.
            Nothing may then change gradients or hyperparameters between backward and ``step()``,
            and all backward passes of a step but the last one belong inside ``no_sync()``.
        nonfinite: What follows a gradient, direction or new momentum that is not finite: "raise" on
            all workers, "skip" the step on all workers, or that worker's "abstain" for that
            parameter.
        clip_norm: ``ClipNorm(1.0, scope="worker")`` or "global"; not with ``overlap``.
        rounding: "nearest", or "stochastic" for bfloat16 parameters, whose small updates are lost
            otherwise.
        exp_avg_dtype: torch.float32 or torch.bfloat16; None is the parameter's dtype, float32 for
            float16.
        bucket_elements: Coordinates up to which parameters share a bucket; None is 64 Mi, with
            ``overlap`` a size chosen from the measured latency.
        check_every: Steps between comparisons of the replicas' digests, the first step included;
            None is never.
        diagnose_every: Steps from one look at how far workers agree to the next, for
            ``diagnostics()``; None is never.
        init_timeout_s: Seconds for the handshake and the broadcast of the initial parameters.
        step_timeout_s: Seconds for each collective of a step.
        seed: Of the coins for ties, zeros and stochastic rounding, 0 to 2^64 - 1.

    Raises:
        InvalidArgumentError: A value is out of range, or a parameter is given twice.
        UnsupportedTypeError: A parameter or argument is of a kind without support.
        ProcessGroupError: No group, or one that cannot carry these parameters.
        ConfigMismatchError: Workers differ in parameters, settings or version.

    Notes:
        ``step()`` either is committed or leaves parameters, momenta and ``committed_step`` as they
        were, and raises the same on every rank: NonFiniteError, SparseGradientError or
        GradientChangedError, after which training may go on; StepMismatchError,
        ConfigMismatchError or CorruptFrameError, after which this optimizer is dead, as after
        PeerLostError and StepTimeoutError, which name the rank that failed; ReplicaMismatchError
        from a comparison. A crash can leave workers one step apart, never inside a step.
        Buffers such as BatchNorm's statistics are not replicated.

    Example:
        >>> optimizer = distlion.DistributedLion(model.parameters(), lr=1e-4, weight_decay=0.1)
        >>> for batch in loader:
        ...     model(batch).loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        *,
        weight_decay: float = 0.0,
        aggregation: Aggregation | None = None,
        exchange: Exchange | Literal["auto"] = "auto",
        nodes: Nodes | None = None,
        momentum_sync: MomentumSync | None = None,
        process_group: dist.ProcessGroup | None = None,
        overlap: bool = False,
        nonfinite: Literal["raise", "skip", "abstain"] = "raise",
        clip_norm: ClipNorm | None = None,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        exp_avg_dtype: torch.dtype | None = None,
        bucket_elements: int | None = None,
        check_every: int | None = 1000,
        diagnose_every: int | None = None,
        init_timeout_s: float = 300,
        step_timeout_s: float = 60,
        seed: int = 0,
    ) -> None:
        check_exp_avg_dtype(exp_avg_dtype)
        self._watch = IdenticalGradientsWatch()
        settings = Settings(
            exchange=exchange,
            nodes=nodes,
            momentum_sync=momentum_sync,
            overlap=overlap,
            nonfinite=nonfinite,
            clip_norm=clip_norm,
            rounding=rounding,
            bucket_elements=bucket_elements,
            check_every=check_every,
            diagnose_every=diagnose_every,
            init_timeout_s=init_timeout_s,
            step_timeout_s=step_timeout_s,
            seed=seed,
        )
        rule = MajorityVote() if aggregation is None else aggregation
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "aggregation": rule,
            "step": 0,
        }
        super().__init__(
            params,
            defaults,
            settings=settings,
            process_group=process_group,
            exp_avg_dtype=exp_avg_dtype,
        )

    def _make_overlap(self) -> Overlap:
        return Overlap(
            self._network.routes,
            self._params,
            begin=self._gather_inputs,
            cast=self._cast,
            abstain=self._abstain,
        )

    def _do_step(self) -> None:
        self._check_usable()
        if self._group.world_size == 1:
            self._step_alone()
            return
        self._check_scaler()
        self._fire("before_step")
        with self._fatal(f"step {self.committed_step}"):
            committed = self._vote_and_commit()
            every = self._settings.check_every
            if committed and every is not None and self.committed_step % every == 0:
                self._compare_replicas()

    def _vote_and_commit(self) -> bool:
        """Encode and exchange every bucket; then commit all of them, or none."""
        inputs, votes = self._cast_votes()
        followed = self._follow_up.exchange(votes, inputs.header)
        self._count_traffic()
        verdict = worst_of([*(vote.verdict for vote in votes), followed.verdict])
        if verdict.status is not Status.OK:
            return self._abandon(verdict, self._describe())
        self._check_frozen()
        if self._settings.check_every is not None and not self._verified:
            self._compare_replicas()
        self._fire("before_commit")
        names = [slot.name for slot in self._slots]
        check_unchanged(votes, names, rank=self._group.rank, step=self.committed_step)
        self._is_torn = True  # an exception from here on leaves parameters between two steps
        for vote in votes:
            vote.commit(inputs, self._rounding(inputs.coins))
        self._follow_up.commit(followed, votes, self.state, self.committed_step)
        self._advance()
        self._is_torn = False
        self._watch.observe([vote.reply.gradient_digests for vote in votes])
        faults.fire(
            rank=self._group.rank, step=self.committed_step - 1, point="after_commit", subject=self
        )
        return True

    def _cast_votes(self) -> tuple[StepInputs, list[BucketVote]]:
        inputs, routes = self._gather_inputs(), self._network.routes
        if self._overlap is not None:
            return self._overlap.finish(inputs)
        if self._clipper is None:
            return inputs, run_all(self._cast(route, inputs) for route in routes)
        drafts = [draft_vote(route, self._params, inputs) for route in routes]
        drafts = self._clipper.apply(drafts, inputs.header)
        return inputs, run_all(self._cast_draft(draft, inputs) for draft in drafts)

    def _cast(
        self, route: Route, inputs: StepInputs, complete: Callable[[Header], Header] = keep_header
    ) -> Exchanging[BucketVote]:
        return self._cast_draft(draft_vote(route, self._params, inputs), inputs, complete)

    def _cast_draft(
        self, draft: Draft, inputs: StepInputs, complete: Callable[[Header], Header] = keep_header
    ) -> Exchanging[BucketVote]:
        return cast_vote(
            draft, inputs, after_encode=lambda: self._fire("after_encode"), complete=complete
        )

    def _gather_inputs(self) -> StepInputs:
        step = self.committed_step
        lines = self._description.tell_briefly(self.param_groups)
        return StepInputs(
            rank=self._group.rank,
            header=Header(ChunkKind.VOTE, step, 0, 0, digest_settings(lines)),
            coins=Coins(self._settings.seed, step, self._network.voter),
            coefficients=self._coefficients(),
            state=self.state,
            nonfinite=self._settings.nonfinite,
            found_inf=self._found_inf(),
            wants_digest=self._watch.is_watching,
        )

    def _step_alone(self) -> None:
        """Do a step of ``Lion``, under the same policy for values that are not finite."""
        self._check_frozen()
        inputs = self._gather_inputs()
        self._count_traffic()
        segments: Sequence[Segment] = self._make_segments(
            self._params, self._slots, self.committed_step
        )
        if self._settings.clip_norm is not None:
            segments = clip_alone(segments, self._settings.clip_norm)
        finite = check_finite(segments)
        if inputs.nonfinite == "abstain":
            finite = [is_finite and not inputs.found_inf for is_finite in finite]
            segments = abstain(segments, finite, rank=0, step=self.committed_step)
        elif (position := find_nonfinite(finite, range(len(finite)), inputs)) is not None:
            self._abandon(Verdict(Status.NON_FINITE, (0,), position), [])
            return
        step_alone(self._params, segments, self._rounding(inputs.coins))
        self._advance()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: with ``overlap=True``, no vote leaves during backward in here.

        All backward passes of a step but the last one belong inside. Without overlap nothing leaves
        before ``step()`` anyway.

        Example:
            >>> with optimizer.no_sync():
            ...     model(first).loss.backward()
            >>> model(second).loss.backward()
            >>> optimizer.step()
        """
        if self._overlap is None:
            yield
            return
        with self._overlap.pause():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients; with ``overlap=True``, give up a step whose first votes have left.

        A worker that has no gradient at all in such a step has nothing to give up, and takes part
        in the others' next one instead.

        Raises:
            StepMismatchError: Some workers gave it up and others did not; nothing was committed.
            PeerLostError, StepTimeoutError, ConfigMismatchError, CorruptFrameError: As ``step()``.
        """
        if self._overlap is not None and self._overlap.has_begun:
            if self._dead is None:
                with self._fatal("zero_grad()"):
                    self._give_up()
            else:
                self._overlap.forget()
        super().zero_grad(set_to_none)

    def _give_up(self) -> None:
        """Complete the exchanges of this step without committing it."""
        assert self._overlap is not None
        votes = self._overlap.cancel()
        self._count_traffic()
        verdict = worst_of([vote.verdict for vote in votes])
        # On earlier buckets a worker may have voted before it gave up.
        by_all = votes[-1].verdict.cancelled_by_all
        if verdict.status is not Status.CANCELLED or not by_all:
            self._abandon(verdict, self._describe())

    def _check_scaler(self) -> None:
        """Refuse a GradScaler with overlap: votes leave before it tells the scale of gradients."""
        if self._overlap is None or getattr(self, "grad_scale", None) is None:
            return
        if self._overlap.has_begun:
            with self._fatal("step() of a GradScaler"):
                self._give_up()
        raise InvalidArgumentError(
            "overlap=True cannot be used with a GradScaler; use overlap=False, or bfloat16, which "
            "needs no scaler"
        )

    def diagnostics(self) -> list[Diagnosis]:
        """Return how far workers agreed, the oldest first: one for each parameter and measure.

        Empty without ``diagnose_every``, and for a single worker. At most the last 1,000 measures
        are kept. With ``nodes``, of this rank's pieces.
        """
        return self._follow_up.diagnoses

    def _advance(self) -> None:
        for group in self.param_groups:
            group["step"] = int(group["step"]) + 1

    def _rounding(self, coins: Coins) -> Coin | None:
        return coins.rounding if self._settings.rounding == "stochastic" else None
