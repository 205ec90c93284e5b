"""One step of the workers of one process: collect, encode and count gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from distlion.errors import CheckpointError, InvalidArgumentError, NonFiniteError
from distlion.failures import Status
from distlion.kernels.coin import Coin, Coins
from distlion.kernels.contract import Coefficients, Segment
from distlion.step.alone import commit_alone, gather_alone
from distlion.step.bucket import run_all
from distlion.step.clipping import clip_alone, clip_together
from distlion.step.diagnostics import Examiner
from distlion.step.inputs import StepInputs
from distlion.step.outcome import explain, log_skip
from distlion.step.param import VotingParam, make_segments
from distlion.step.settings import Settings
from distlion.virtual.bucket import Side, VirtualBucket, take_rows
from distlion.votes.roster import Roster
from distlion.wire.frame import ChunkKind, Header
from distlion.wire.verdict import Verdict, worst_of


class Collection:
    """The gradients that were collected from workers for one step.

    A worker votes when it is collected: its gradient is encoded, its momentum moves, and the
    gradient is released. Where all workers decide together (a single one, a step to be skipped, a
    norm of all), gradients are *held* until the step ends.

    Args:
        settings: Settings that do not change from step to step.
        roster: The workers, by place.
        params: The trainable parameters; their momenta have shape (workers, *param.shape).
        buckets: The buckets of all parameters; none for a single worker.
        examiner: The measurement of workers' agreement; None for none.
        step: The number of this step.

    Attributes:
        buckets: The same.
        grad_norms: Norms measured for clipping, by worker; empty without clipping.
    """

    def __init__(
        self,
        settings: Settings,
        roster: Roster,
        params: Sequence[VotingParam],
        buckets: Sequence[VirtualBucket],
        examiner: Examiner | None,
        *,
        step: int,
    ) -> None:
        self._settings, self._roster, self._params, self._step = settings, roster, params, step
        self.buckets = buckets
        for bucket in self.buckets:
            bucket.begin()
        self._examiner = examiner
        self._excluded = frozenset() if examiner is None else examiner.excluded
        self._samples: dict[int, list[float]] = {}
        self._workers: set[int] = set()
        self._held: dict[int, StepInputs] = {}
        self._alone: Sequence[Segment] = ()
        self._has_moved = self.is_torn = False
        self.grad_norms: dict[int, float] = {}
        clip = settings.clip_norm
        is_global = clip is not None and clip.scope == "global"
        self._holds = settings.nonfinite == "skip" or is_global

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

    def load(self, worker: int, coefficients: Sequence[Coefficients]) -> StepInputs:
        """Take a worker's gradients; return the inputs of its vote.

        Raises:
            StepInputError, SparseGradientError: It cannot vote with them.
        """
        inputs = self._make_inputs(worker, coefficients)
        if self._roster.n_voters == 1:
            own = take_rows(self._params, worker)
            self._alone = gather_alone(own, coefficients, step=self._step)
        for side in self._list_sides(worker):
            side.load(inputs)
            side.marks = []  # the gradients leave the parameters
        verdict = self._join_verdicts(worker)
        if verdict.status is not Status.OK:
            problem = "; ".join(inputs.problems[:1])
            raise explain(verdict, self._params, problem, rank=worker, step=self._step)
        return inputs

    def add(self, worker: int, inputs: StepInputs) -> None:
        """Vote with the gradients that a worker has loaded, or hold them.

        Raises:
            NonFiniteError: One is not finite, under "raise".
        """
        if self._holds:
            self._held[worker] = inputs
        else:
            self._vote({worker: inputs})
        self._workers.add(worker)

    def commit(self, coefficients: Sequence[Coefficients]) -> bool:
        """Count the votes and apply the replies; False where all workers skip the step.

        Raises:
            NonFiniteError: A gradient that was held is not finite, under "raise"; nothing moved.
        """
        if self._roster.n_voters == 1:
            return self._commit_alone(coefficients)
        if not self._vote(dict(sorted(self._held.items()))):
            return False
        coins = self._coins_of(0)
        for bucket in self.buckets:
            bucket.count(coins, coefficients)
        self._examine(coefficients)
        for bucket in self.buckets:
            bucket.commit(coefficients, self._rounding())
        return True

    def _list_sides(self, worker: int) -> list[Side]:
        return [bucket.sides[worker] for bucket in self.buckets]

    def _join_verdicts(self, worker: int) -> Verdict:
        headers = [side.header for side in self._list_sides(worker)]
        return worst_of([Verdict(Status.OK), *map(Verdict.of, headers)])

    def _make_inputs(self, worker: int, coefficients: Sequence[Coefficients]) -> StepInputs:
        return StepInputs(
            rank=worker,
            header=Header(ChunkKind.VOTE, self._step, 0, worker, 0),
            coins=self._coins_of(self._roster.ids[worker]),
            rounding=self._rounding(),
            coefficients=coefficients,
            nonfinite=self._settings.nonfinite,
            found_inf=False,
            wants_digest=False,
            note_norm=partial(self._note_norm, worker),
            after_encode=lambda: None,
            is_excluded=worker in self._excluded,
        )

    def _coins_of(self, voter: int) -> Coins:
        """Return a voter's coins in this step."""
        return Coins(self._settings.seed, self._step, voter)

    def _note_norm(self, worker: int, norm: float) -> None:
        self.grad_norms[worker] = norm

    def _vote(self, loaded: Mapping[int, StepInputs]) -> bool:
        """Encode workers' votes, then move their momenta; False where the step is skipped.

        Raises:
            NonFiniteError: A gradient is not finite, under "raise"; no momentum has moved here.
        """
        self._clip(loaded)
        for worker, inputs in loaded.items():
            for side in self._list_sides(worker):
                run_all([side.cast(inputs)])
            verdict = self._join_verdicts(worker)
            if verdict.status is not Status.OK:
                self.is_torn = self._has_moved
                self._give_up(verdict)
                return False
        for worker in loaded:
            self._note_sample(worker)
            for side in self._list_sides(worker):
                side.hand_in()
            self._has_moved = True
        return True

    def _clip(self, loaded: Mapping[int, StepInputs]) -> None:
        """Scale the loaded gradients by the factors of their norms."""
        clip = self._settings.clip_norm
        if clip is None:
            return
        segments = [
            [segment for side in self._list_sides(worker) for segment in side.segments]
            for worker in loaded
        ]
        if clip.scope == "worker":
            notes = [inputs.note_norm for inputs in loaded.values()]
            clipped = [
                clip_alone(own, clip, note) for own, note in zip(segments, notes, strict=True)
            ]
        else:
            absent = self._roster.n_voters - len(loaded)
            clipped = clip_together(segments, absent, clip, self._note_global_norm)
        for worker, own in zip(loaded, clipped, strict=True):
            rest = iter(own)
            for side in self._list_sides(worker):
                side.segments = [next(rest) for _ in side.segments]

    def _note_global_norm(self, norm: float) -> None:
        self.grad_norms = dict.fromkeys(range(self._roster.n_voters), norm)

    def _give_up(self, verdict: Verdict) -> None:
        """Raise the error found, or log that the step is skipped."""
        worker = verdict.culprits[0]
        if self._settings.nonfinite == "skip":
            log_skip(self._params, verdict, rank=worker, step=self._step)
            return
        raise NonFiniteError(
            f"gradient, direction or new momentum of {self._params[verdict.position].name} is not "
            f"finite on worker {worker}; nonfinite='skip' drops such a step, 'abstain' only that "
            "worker's votes",
            rank=worker,
            step=self._step,
            culprits=(worker,),
        )

    def _note_sample(self, worker: int) -> None:
        examiner = self._examiner
        if examiner is not None and examiner.is_due(self._step):
            segments = {
                param.position: segment
                for side in self._list_sides(worker)
                for param, segment in zip(side.params, side.segments, strict=True)
            }
            self._samples[worker] = examiner.list_numbers(segments)

    def _examine(self, coefficients: Sequence[Coefficients]) -> None:
        """Diagnose the step; a worker that was not collected has no gradient."""
        examiner, workers = self._examiner, range(self._roster.n_voters)
        if examiner is None or not examiner.is_due(self._step):
            return
        for worker in set(workers) - set(self._samples):
            for side in self._list_sides(worker):
                side.load_absent(coefficients)
            self._note_sample(worker)
        replies = [reply for bucket in self.buckets for reply in bucket.list_replies()]
        examiner.conclude(self._step, [self._samples[worker] for worker in workers], replies)

    def _commit_alone(self, coefficients: Sequence[Coefficients]) -> bool:
        """Do a step of ``Lion``, under the same policy for values that are not finite."""
        absent = [None] * len(self._params)
        segments = self._alone or make_segments(
            take_rows(self._params, 0), absent, coefficients, 1.0
        )
        inputs = self._make_inputs(0, coefficients)
        verdict = commit_alone(self._params, segments, inputs, self._settings.clip_norm)
        if verdict.status is not Status.OK:
            self._give_up(verdict)
        return verdict.status is Status.OK

    def _rounding(self) -> Coin | None:
        return self._coins_of(0).rounding if self._settings.precision.is_stochastic else None
