"""One step of the workers of one process: collect, encode and count gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from distlion.errors import CheckpointError, InvalidArgumentError, NonFiniteError
from distlion.failures import Status
from distlion.kernels.coin import Coin, Coins
from distlion.kernels.contract import Coefficients, Segment
from distlion.step.alone import check_finite, commit_alone
from distlion.step.clipping import clip_alone, clip_together, make_clip_alone
from distlion.step.outcome import log_abstention, log_skip
from distlion.virtual.layout import ClusterLayout
from distlion.virtual.route import VirtualRoute
from distlion.votes.reply import ParameterReply
from distlion.wire.verdict import Verdict

Grads = Sequence[Tensor | None]


class Collection:
    """The gradients that were collected from workers for one step.

    A gradient is encoded into a *vote* when it is added, its momentum moves, and it is released.
    Where all workers decide together (a single one, a step to be skipped, a norm of all), gradients
    are *held* until the step ends.

    Args:
        layout: The workers, and the places of their parameters.
        step: The number of this step.

    Attributes:
        grad_norms: Norms measured for clipping, by worker; empty without clipping.
    """

    def __init__(self, layout: ClusterLayout, *, step: int) -> None:
        self._layout = layout
        self._step = step
        self._workers: set[int] = set()
        self._held: dict[int, Grads] = {}
        self._samples: dict[int, list[float]] = {}
        self._excluded = frozenset() if layout.examiner is None else layout.examiner.excluded
        self._has_moved = False
        self.is_torn = False
        self.grad_norms: dict[int, float] = {}
        self.routes: Sequence[VirtualRoute] = layout.take_turn(step)

    def check_whole(self) -> None:
        """Raise CheckpointError if momenta have moved for a step that cannot be completed."""
        if self.is_torn:
            raise CheckpointError(
                "a worker's gradient was not finite after others had been collected, so that "
                f"momenta are past step {self._step} and parameters are not; start again, with "
                "nonfinite='skip' or 'abstain' to survive such steps"
            )

    def check_idle(self, call: str) -> None:
        """Raise InvalidArgumentError if a step that can be completed is under way."""
        if self._workers and not self.is_torn:
            raise InvalidArgumentError(
                f"{call} after workers {sorted(self._workers)} were collected; call step() before"
            )

    def check_new(self, worker: int) -> None:
        """Raise InvalidArgumentError if a worker has been collected already."""
        if worker in self._workers:
            raise InvalidArgumentError(
                f"worker {worker} was collected already in step {self._step}; call step() once "
                "all have been"
            )

    def add(self, worker: int, grads: Grads, coefficients: Sequence[Coefficients]) -> None:
        """Encode or hold a worker's gradients.

        Raises:
            NonFiniteError: One is not finite, under "raise".
        """
        if self._holds:
            self._held[worker] = grads
        else:
            self._encode(worker, self._segments_of(worker, grads, coefficients))
        self._workers.add(worker)

    def commit(self, coefficients: Sequence[Coefficients]) -> bool:
        """Count the votes and apply the replies; False where all workers skip the step.

        Raises:
            NonFiniteError: A gradient that was held is not finite, under "raise"; nothing moved.
        """
        if self._layout.n_workers == 1:
            return self._commit_alone(coefficients)
        if not self._release_held(coefficients):
            return False
        self._apply_replies(coefficients)
        return True

    @property
    def _holds(self) -> bool:
        """True if gradients wait for each other, because all of them decide."""
        settings = self._layout.settings
        clip = settings.clip_norm
        is_global = clip is not None and clip.scope == "global"
        return self._layout.n_workers == 1 or settings.nonfinite == "skip" or is_global

    def _encode(self, worker: int, segments: Sequence[Segment]) -> None:
        """Encode a worker's votes, then move its momenta; NonFiniteError stops it in between."""
        clip = self._layout.settings.clip_norm
        if clip is not None and clip.scope == "worker":
            segments = clip_alone(segments, clip, partial(self._note_norm, worker))
        coins = self._coins_of(self._layout.roster.ids[worker])
        segments = list(segments)
        for route in self.routes:
            placed = [segments[param.position]._replace(slot=param.slot) for param in route.params]
            finite = route.encode(worker, placed, coins).tolist()
            for index, is_finite in enumerate(finite):
                if not is_finite:
                    position = route.params[index].position
                    segments[position] = self._refuse(segments[position], worker)
        for route in self.routes:
            # Not before all are encoded, since _refuse may raise.
            present = [segments[param.position].grad is not None for param in route.params]
            if worker in self._excluded:
                route.leave_out(worker)
            else:
                route.note(worker, present)
        self._note_sample(worker, segments)
        for route in self.routes:
            mine = [segments[param.position] for param in route.params]
            route.kernels.update_momentum(mine, [1] * len(mine))
        self._has_moved = True

    def _coins_of(self, voter: int) -> Coins:
        """Return a voter's coins in this step, numbered by the votes on the part."""
        layout = self._layout
        return Coins(layout.settings.seed, self._step // layout.n_turns, voter)

    def _note_norm(self, worker: int, norm: float) -> None:
        self.grad_norms[worker] = norm

    def _note_global_norm(self, norm: float) -> None:
        self.grad_norms = dict.fromkeys(range(self._layout.n_workers), norm)

    def _refuse(self, segment: Segment, worker: int) -> Segment:
        """Abstain for a parameter that is not finite, or raise."""
        if self._layout.settings.nonfinite == "abstain":
            log_abstention([segment.slot.name], rank=worker, step=self._step)
            return segment._replace(grad=None)
        self.is_torn = self._has_moved
        raise self._non_finite(segment.slot.name, worker)

    def _non_finite(self, name: str, worker: int) -> NonFiniteError:
        return NonFiniteError(
            f"gradient, direction or new momentum of {name} is not finite on worker {worker}; "
            "nonfinite='skip' drops such a step, 'abstain' only that worker's votes",
            rank=worker,
            step=self._step,
            culprits=(worker,),
        )

    def _release_held(self, coefficients: Sequence[Coefficients]) -> bool:
        """Encode the gradients that waited for each other; False where the step is skipped."""
        settings = self._layout.settings
        held: dict[int, Sequence[Segment]] = {
            worker: self._segments_of(worker, grads, coefficients)
            for worker, grads in sorted(self._held.items())
        }
        if settings.nonfinite != "abstain" and not self._are_finite(held):
            return False
        clip = settings.clip_norm
        if clip is not None and clip.scope == "global":
            absent = self._layout.n_workers - len(held)
            clipped = clip_together([*held.values()], absent, clip, self._note_global_norm)
            held = dict(zip(held, clipped, strict=True))
        for worker, segments in held.items():
            self._encode(worker, segments)
        return True

    def _are_finite(self, held: Mapping[int, Sequence[Segment]]) -> bool:
        """Check all workers before the momentum of any of them moves."""
        for worker, segments in held.items():
            finite = check_finite(segments)
            if not all(finite):
                self._give_up(Verdict(Status.NON_FINITE, (worker,), finite.index(False)))
                return False
        return True

    def _give_up(self, verdict: Verdict) -> None:
        """Raise the error found, or log that the step is skipped."""
        worker = verdict.culprits[0]
        if self._layout.settings.nonfinite == "raise":
            raise self._non_finite(self._layout.params[verdict.position].name, worker)
        log_skip(self._layout.params, verdict, rank=worker, step=self._step)

    def _apply_replies(self, coefficients: Sequence[Coefficients]) -> None:
        coins = self._coins_of(0)
        replies: list[ParameterReply] = []
        for route in self.routes:
            # Momenta moved when workers were collected.
            segments = [
                param.segment(coefficients[param.group], None, param.exp_avg[0])
                for param in route.params
            ]
            route.count(coins)
            replies += route.list_replies()
            route.apply(segments, self._rounding(coins))
        self._examine(replies, coefficients)

    def _note_sample(self, worker: int, segments: Sequence[Segment]) -> None:
        examiner = self._layout.examiner
        if examiner is not None and examiner.is_due(self._step):
            voting = sorted(param.position for route in self.routes for param in route.params)
            self._samples[worker] = examiner.list_numbers({at: segments[at] for at in voting})

    def _examine(
        self, replies: Sequence[ParameterReply], coefficients: Sequence[Coefficients]
    ) -> None:
        """Diagnose the step; a worker that was not collected has no gradient."""
        examiner, workers = self._layout.examiner, range(self._layout.n_workers)
        if examiner is None or not examiner.is_due(self._step):
            return
        nothing: Grads = [None] * len(self._layout.params)
        for worker in set(workers) - set(self._samples):
            self._note_sample(worker, self._segments_of(worker, nothing, coefficients))
        examiner.conclude(self._step, [self._samples[worker] for worker in workers], replies)

    def _commit_alone(self, coefficients: Sequence[Coefficients]) -> bool:
        """Do a step of ``Lion``, under the same policy for values that are not finite."""
        params, settings = self._layout.params, self._layout.settings
        grads = self._held.get(0, [None] * len(params))
        verdict = commit_alone(
            params,
            self._segments_of(0, grads, coefficients),
            clip=make_clip_alone(settings.clip_norm),
            note_norm=partial(self._note_norm, 0),
            nonfinite=settings.nonfinite,
            rounding=self._rounding(Coins(settings.seed, self._step, 0)),
            step=self._step,
        )
        if verdict.status is not Status.OK:
            self._give_up(verdict)
        return verdict.status is Status.OK

    def _segments_of(
        self, worker: int, grads: Grads, coefficients: Sequence[Coefficients]
    ) -> list[Segment]:
        return [
            param.segment(coefficients[param.group], grads[index], param.exp_avg[worker])
            for index, param in enumerate(self._layout.params)
        ]

    def _rounding(self, coins: Coins) -> Coin | None:
        return coins.rounding if self._layout.settings.precision.is_stochastic else None
