"""N workers of ``DistributedLion`` in one process: the same kernels, layout and coins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from distlion.aggregation import Aggregation
from distlion.errors import InvalidArgumentError, NonFiniteError
from distlion.exchange import AllReduce, Exchange, Status, Verdict
from distlion.kernels import Coin, Coins, Segment
from distlion.virtual.assembly import AssembledCluster, Grads, check_pattern
from distlion.voting import (
    ClipNorm,
    MomentumStage,
    MomentumSync,
    ParameterReply,
    Settings,
    check_finite,
    clip_alone,
    clip_together,
    log_abstention,
    log_skip,
    move_alone,
)


class VirtualCluster(AssembledCluster):
    """Train as N workers of ``DistributedLion`` would, in one process, bitwise identically.

    Workers take turns with one set of parameters: each computes its gradient and is collected; then
    all of them vote. Kept are the parameters, one momentum for each worker, and the votes of a
    step; a gradient is encoded when it is collected and then let go (with ``nonfinite="skip"`` and
    with ``ClipNorm(scope="global")`` not before ``step()``, since all of them decide).

    Args:
        params, lr, betas, weight_decay, aggregation, momentum_sync, clip_norm, rounding,
            exp_avg_dtype, bucket_elements, diagnose_every, seed: As for ``DistributedLion``.
        workers: N, 1 or more.
        exchange: The pattern whose bytes ``traffic`` counts; nothing depends on it but these.
        nonfinite: As for ``DistributedLion``, but "raise" raises in ``collect``, unless gradients
            wait for ``step()``.

    Raises:
        InvalidArgumentError: A value is out of range, or a parameter is given twice.
        UnsupportedTypeError: A parameter or argument is of a kind without support.

    Notes:
        Bitwise identical to N processes with overlap off; with ``nodes``, workers are nodes, and
        their gradients the nodes' means. ``state[param]["exp_avg"]`` has shape (N, *param.shape).
        A worker that is not collected before ``step()`` abstains, as one without any gradient.

    Example:
        >>> cluster = distlion.VirtualCluster(model.parameters(), workers=32, lr=1e-4)
        >>> for batches in loader:
        ...     for worker, batch in enumerate(batches):
        ...         model(batch).loss.backward()
        ...         cluster.collect(worker)
        ...     cluster.step()
    """

    # Gradients leave ``p.grad`` in ``collect``, so that a GradScaler finds none to unscale.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        *,
        workers: int,
        weight_decay: float = 0.0,
        aggregation: Aggregation | None = None,
        exchange: Exchange | None = None,
        momentum_sync: MomentumSync | None = None,
        nonfinite: Literal["raise", "skip", "abstain"] = "raise",
        clip_norm: ClipNorm | None = None,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        exp_avg_dtype: torch.dtype | None = None,
        bucket_elements: int | None = None,
        diagnose_every: int | None = None,
        seed: int = 0,
    ) -> None:
        settings = Settings(
            exchange=AllReduce() if exchange is None else check_pattern(exchange),
            nodes=None,
            momentum_sync=momentum_sync,
            overlap=False,
            nonfinite=nonfinite,
            clip_norm=clip_norm,
            rounding=rounding,
            bucket_elements=bucket_elements,
            check_every=None,
            diagnose_every=diagnose_every,
            init_timeout_s=1,
            step_timeout_s=1,
            seed=seed,
        )
        super().__init__(
            params,
            lr,
            betas,
            workers=workers,
            weight_decay=weight_decay,
            aggregation=aggregation,
            settings=settings,
            exp_avg_dtype=exp_avg_dtype,
        )

    @torch.no_grad()
    def collect(self, worker: int) -> None:
        """Take every ``p.grad`` as the gradient of a worker, and clear it.

        Args:
            worker: 0 to N - 1; each at most once before ``step()``.

        Raises:
            InvalidArgumentError: There is no such worker, or it was collected already.
            NonFiniteError: With ``nonfinite="raise"``: gradient, direction or new momentum is not
                finite. If other workers were collected before, the cluster is of no more use.
            SparseGradientError: A gradient is sparse.
        """
        self._check_whole()
        self._check_worker(worker)
        if worker in self._collected:
            raise InvalidArgumentError(
                f"worker {worker} was collected already in step {self.committed_step}; call step() "
                "once all have been"
            )
        self._check_grads(worker)
        grads = [param.grad() for param in self._params]
        for param in self._params:
            param.param.grad = None
        if not self._holds:
            self._absorb(worker, self._segments_of(worker, grads))
        else:
            self._held[worker] = grads
        self._collected.add(worker)

    def _do_step(self) -> None:
        self._check_whole()
        account = self._draw_account()
        try:
            committed = self._step_alone() if self._workers == 1 else self._vote()
        except NonFiniteError:
            self._begin_step()
            raise
        self._count_traffic(account, committed=committed)
        if committed:
            self._advance()
        self._begin_step()

    def _vote(self) -> bool:
        """Count the votes and apply the replies; False where all workers skip the step."""
        if not self._release_held():
            return False
        self._apply_replies()
        if self._momenta is not None:
            self._average_momenta(self._momenta)
        return True

    def _absorb(self, worker: int, segments: Sequence[Segment]) -> None:
        """Encode a worker's votes, then move its momenta; NonFiniteError stops it in between."""
        clip = self._settings.clip_norm
        if clip is not None and clip.scope == "worker":
            segments = clip_alone(segments, clip)
        coins = Coins(self._settings.seed, self.committed_step, worker)
        segments = list(segments)
        for poll in self._polls:
            placed = [segments[param.position]._replace(slot=param.slot) for param in poll.params]
            finite = poll.rule.encode(poll.kernels, placed, coins, out=poll.votes[worker])
            for index, is_finite in enumerate(finite.tolist()):
                if not is_finite:
                    position = poll.params[index].position
                    segments[position] = self._refuse(segments[position], worker)
        for poll in self._polls:  # not before all are encoded, since _refuse may raise
            present = [segments[param.position].grad is not None for param in poll.params]
            poll.present[worker] = torch.tensor(present, dtype=torch.bool)
        self._note_sample(worker, segments)
        for poll in self._polls:
            mine = [segments[param.position] for param in poll.params]
            poll.kernels.update_momentum(mine, [1] * len(mine))
        self._absorbed = True

    def _refuse(self, segment: Segment, worker: int) -> Segment:
        """Abstain for a parameter that is not finite, or raise."""
        name, step = segment.slot.name, self.committed_step
        if self._settings.nonfinite == "abstain":
            log_abstention([name], rank=worker, step=step)
            return segment._replace(grad=None)
        self._is_torn = self._absorbed
        raise NonFiniteError(
            f"gradient, direction or new momentum of {name} is not finite on worker {worker}; "
            "nonfinite='skip' drops such a step, 'abstain' only that worker's votes",
            rank=worker,
            step=step,
            culprits=(worker,),
        )

    def _note_sample(self, worker: int, segments: Sequence[Segment]) -> None:
        if self._examiner is not None and self._examiner.is_due(self.committed_step):
            kept = {
                place: segment for place, segment in enumerate(segments) if segment.param.numel()
            }
            self._samples[worker] = self._examiner.list_numbers(kept)

    def _conclude_diagnosis(self, replies: Sequence[ParameterReply]) -> None:
        step = self.committed_step
        if self._examiner is None or not self._examiner.is_due(step):
            return
        nothing: Grads = [None] * len(self._params)
        for worker in set(range(self._workers)) - set(self._samples):
            self._note_sample(worker, self._segments_of(worker, nothing))
        rows = [self._samples[worker] for worker in range(self._workers)]
        self._examiner.conclude(step, rows, replies)

    def _release_held(self) -> bool:
        """Absorb the gradients that waited for each other; False where the step is skipped."""
        held: dict[int, Sequence[Segment]] = {
            worker: self._segments_of(worker, grads) for worker, grads in sorted(self._held.items())
        }
        if self._settings.nonfinite == "skip" and not self._are_finite(held):
            return False
        if self._settings.nonfinite == "raise":
            self._check_finite(held)
        clip = self._settings.clip_norm
        if clip is not None and clip.scope == "global":
            absent = self._workers - len(held)
            held = dict(zip(held, clip_together([*held.values()], absent, clip), strict=True))
        for worker, segments in held.items():
            self._absorb(worker, segments)
        return True

    def _are_finite(self, held: Mapping[int, Sequence[Segment]]) -> bool:
        for worker, segments in held.items():
            finite = check_finite(segments)
            if not all(finite):
                verdict = Verdict(Status.NON_FINITE, (worker,), finite.index(False))
                log_skip(self._params, verdict, rank=worker, step=self.committed_step)
                return False
        return True

    def _check_finite(self, held: Mapping[int, Sequence[Segment]]) -> None:
        """Raise before any worker's momentum moves."""
        for worker, segments in held.items():
            for index, is_finite in enumerate(check_finite(segments)):
                if not is_finite:
                    self._refuse(segments[index], worker)

    def _apply_replies(self) -> None:
        coins = Coins(self._settings.seed, self.committed_step, 0)
        coefficients = self._coefficients()
        replies: list[ParameterReply] = []
        for poll in self._polls:
            # Momenta have moved when workers were collected.
            segments = [
                param.segment(coefficients[param.group], None, param.exp_avg[0])
                for param in poll.params
            ]
            reply, present = poll.count(coins), poll.present.sum(0).tolist()
            replies += poll.list_replies(reply, present)
            poll.kernels.apply_reply(
                segments,
                present,
                reply,
                reply_format=poll.rule.reply_format,
                rounding=self._rounding(coins),
            )
            for index, param in enumerate(poll.params):
                param.write_back(segments[index].param)
        self._conclude_diagnosis(replies)

    def _average_momenta(self, stage: MomentumStage) -> None:
        """Average what ``momentum_sync`` wants after this step."""
        step, workers = self.committed_step, range(self._workers)
        momenta = [self.exp_avg(worker) for worker in workers]
        selected = None
        if stage.sync.is_measured(step):
            samples = [stage.take_sample(partial(_pick, momenta[worker])) for worker in workers]
            selected = stage.select_dispersed(samples)
        for rows in stage.list_rows(step):
            joined = [
                rows.join([part.of(momenta[worker][part.position]) for part in rows.slices])
                for worker in workers
            ]
            votes = torch.stack([rows.encode(row).view(-1) for row in joined])
            reply = rows.reduce(votes, torch.ones(self._workers, 1, dtype=torch.bool), 0)
            for worker, row in enumerate(joined):
                for part, mean in rows.settle(row, reply.view(self._workers, -1)):
                    part.of(momenta[worker][part.position]).copy_(mean)
        if selected is not None:
            stage.remember(selected, self.param_groups)

    def _step_alone(self) -> bool:
        """Do a step of ``Lion``, under the same policy for values that are not finite."""
        grads = self._held.get(0, [None] * len(self._params))
        segments: Sequence[Segment] = self._segments_of(0, grads)
        if self._settings.clip_norm is not None:
            segments = clip_alone(segments, self._settings.clip_norm)
        if self._settings.nonfinite == "skip" and not self._are_finite({0: segments}):
            return False
        segments = [
            segments[index] if is_finite else self._refuse(segments[index], 0)
            for index, is_finite in enumerate(check_finite(segments))
        ]
        coins = Coins(self._settings.seed, self.committed_step, 0)
        move_alone(self._params, segments, self._rounding(coins))
        return True

    def _segments_of(self, worker: int, grads: Grads) -> list[Segment]:
        coefficients = self._coefficients()
        return [
            param.segment(coefficients[param.group], grads[index], param.exp_avg[worker])
            for index, param in enumerate(self._params)
        ]

    def _rounding(self, coins: Coins) -> Coin | None:
        return coins.rounding if self._settings.rounding == "stochastic" else None

    @property
    def _holds(self) -> bool:
        """Whether gradients wait for each other, because all of them decide."""
        clip = self._settings.clip_norm
        is_global = clip is not None and clip.scope == "global"
        return self._workers == 1 or self._settings.nonfinite == "skip" or is_global


def _pick(momenta: Sequence[Tensor], position: int, index: Tensor) -> Tensor:
    return momenta[position].view(-1)[index]
