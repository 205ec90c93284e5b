"""N workers of ``DistributedLion`` in one process: the same kernels, layout and coins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from distlion.errors import InvalidArgumentError, NonFiniteError, StepError, UnsupportedTypeError
from distlion.failures import Status, make_error
from distlion.kernels.contract import Coefficients
from distlion.layout import fill_buckets
from distlion.optim.base import VotingBase
from distlion.optim.saved_state import restoring
from distlion.peers.fingerprint import check_frozen
from distlion.peers.ownership import MomentumOwnership
from distlion.signals import deferred_signals
from distlion.step.agreement import Agreement
from distlion.step.arguments import refusing_former
from distlion.step.clipping import ClipNorm, plan_norms
from distlion.step.diagnostics import Diagnosis, Examiner
from distlion.step.hyperparameters import describe_steps, read_step
from distlion.step.momentum import MomentumRows, MomentumSchedule, MomentumSync
from distlion.step.newcomers import Newcomers, check_newcomers
from distlion.step.outcome import describe_problem
from distlion.step.param import take_gradients
from distlion.step.precision import Precision
from distlion.step.replicas import Replicas
from distlion.step.settings import Settings
from distlion.step.traffic import Traffic
from distlion.virtual.accounting import Accounting
from distlion.virtual.bucket import VirtualBucket
from distlion.virtual.collection import Collection
from distlion.virtual.members import change_roster, make_roster, read_worker, reseat
from distlion.votes.aggregation import Aggregation
from distlion.wire.all_reduce import AllReduce
from distlion.wire.pattern import Exchange
from distlion.wire.registry import list_patterns
from distlion.wire.transport import ByteCount


class VirtualCluster(VotingBase):
    """Train as N workers of ``DistributedLion`` would, in one process, bitwise identically.

    Workers take turns with one set of parameters: each computes its gradient and is collected; then
    all of them vote. Memory holds the parameters, one momentum for each worker, and the votes of a
    step. A gradient is encoded when it is collected, and then released. With ``nonfinite="skip"``
    or ``ClipNorm(scope="global")``, which need all gradients, this happens in ``step()``.

    Args:
        params: As for ``DistributedLion``, frozen ones too; no DTensors.
        lr, betas, weight_decay, cautious, aggregation: Likewise.
        momentum_sync, clip_norm, bucket_elements, agreement, precision, seed: Likewise.
        workers: N, 1 or more.
        weights: The number of times that each worker's vote counts, as ``weight`` of
            ``DistributedLion``; None: once each.
        exchange: The pattern whose bytes ``traffic`` counts; it has no other effect.
        nonfinite: As for ``DistributedLion``, but "raise" raises in ``collect``, unless gradients
            wait for ``step()``.

    Raises:
        InvalidArgumentError: A value is out of range, or a parameter is given twice.
        UnsupportedTypeError: A parameter or argument is of a kind without support.

    Notes:
        Bitwise identical to N processes with overlap off; with ``nodes``, workers are nodes, and
        their gradients the nodes' means. ``state[param]["exp_avg"]`` has shape (N, *param.shape).
        ``change_workers`` lets other workers vote, as in a crew. A worker that is not collected
        before ``step()`` abstains, like one without any gradient.

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

    @refusing_former
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        *,
        workers: int,
        weights: Sequence[int] | None = None,
        weight_decay: float = 0.0,
        cautious: bool = False,
        aggregation: Aggregation | None = None,
        exchange: Exchange | None = None,
        momentum_sync: MomentumSync | None = None,
        nonfinite: Literal["raise", "skip", "abstain"] = "raise",
        clip_norm: ClipNorm | None = None,
        bucket_elements: int | None = None,
        agreement: Agreement = Agreement(),
        precision: Precision = Precision(),
        seed: int = 0,
    ) -> None:
        self._grad_norms: dict[int, float] | None = None
        self._accounting = Accounting()
        self._collection: Collection | None = None
        self._examiner: Examiner | None = None
        self._settings = Settings(
            exchange=AllReduce() if exchange is None else _check_pattern(exchange),
            momentum_sync=momentum_sync,
            nonfinite=nonfinite,
            clip_norm=clip_norm,
            bucket_elements=bucket_elements,
            replicas=Replicas(check_every=None),
            agreement=agreement,
            precision=precision,
            seed=seed,
        )
        self._roster = make_roster(workers, weights, self._settings)
        super().__init__(
            params,
            lr,
            betas,
            weight_decay=weight_decay,
            cautious=cautious,
            aggregation=aggregation,
        )
        self._lay_out()

    def _lay_out(self) -> None:
        """Place the parameters into buckets, as a session does for real workers."""
        settings, roster, params = self._settings, self._roster, self._list_trainable()
        self._params, self._momenta = params, None
        if settings.momentum_sync is not None:
            # Made for a single worker too, to refuse patterns that select nothing.
            self._momenta = MomentumSchedule(
                settings.momentum_sync, params, n_workers=roster.n_voters
            )
        self._examiner = Examiner.build(
            settings, roster, self.param_groups, params, earlier=self._examiner
        )
        self._buckets = []
        if roster.n_voters == 1:
            self._momenta = self._examiner = None
        else:
            layouts = fill_buckets(
                [param.slot for param in params],
                [param.kind for param in params],
                n_shards=roster.n_voters,
                bucket_elements=settings.bucket_limit,
            )
            self._buckets = [
                VirtualBucket(layout, params, roster, self._pattern) for layout in layouts
            ]
        for stage in self._own_stages:
            stage.lay_out(params)
        self._fixed.note(self.param_groups, self.state)
        self._begin_step()

    def _begin_step(self) -> None:
        self._collection = Collection(
            self._settings,
            self._roster,
            self._params,
            self._buckets,
            self._examiner,
            step=self.committed_step,
        )
        self._said: list[str] = []  # of the groups, when the first worker is collected

    @property
    def _collected(self) -> Collection:
        assert self._collection is not None  # since the constructor returned
        return self._collection

    @torch.no_grad()
    def collect(self, worker: int) -> None:
        """Take every ``p.grad`` as the gradient of a worker, and clear it.

        Args:
            worker: 0 to N - 1; each at most once before ``step()``.

        Raises:
            InvalidArgumentError: There is no such worker, or it was collected already.
            UnsupportedTypeError: ``worker`` is not an integer.
            StepInputError: A parameter, gradient or momentum differs from construction in layout,
                or a group was changed; nothing has been collected.
            NonFiniteError: With ``nonfinite="raise"``: gradient, direction or new momentum is not
                finite. If other workers were collected before, the cluster cannot go on.
            SparseGradientError: A gradient is sparse.
        """
        collection = self._collected
        collection.check_whole()
        worker = self._check_worker(worker)
        collection.check_new(worker)
        with self._refusing(worker):
            coefficients, said = self._read_inputs()
            self._check_frozen()
            inputs = collection.load(worker, coefficients)
        for param in self._params:
            param.param.grad = None
        collection.add(worker, inputs)
        self._said = said

    @deferred_signals("a step")
    def _do_step(self) -> None:
        for stage in self._own_stages:
            stage.begin()
        try:
            self._vote_and_commit()
        finally:
            for stage in self._own_stages:
                stage.end()

    def _vote_and_commit(self) -> None:
        collection, step = self._collected, self._find_step()
        collection.check_whole()
        with self._refusing(0):
            take_gradients(self._params)  # checks momenta too
            coefficients, _ = self._read_inputs()
        try:
            is_committed = collection.commit(coefficients)
        except NonFiniteError:
            self._begin_step()  # held gradients are checked before any momentum moves
            raise
        self._count(collection, step, is_committed=is_committed)
        if is_committed:
            self._average_momenta(step)
            self._grad_norms = collection.grad_norms
            for stage in self._own_stages:
                stage.commit(collection.buckets)
            self._advance()
        self._begin_step()
        if self._examiner is not None:
            self._examiner.warn()

    def _count(self, collection: Collection, step: int, *, is_committed: bool) -> None:
        """Count a step's traffic; a skipped step ended with its votes."""
        clip, rest, rows = self._settings.clip_norm, ByteCount(), self._list_rows(step)
        if self._buckets and clip is not None and clip.scope == "global":
            rest += plan_norms(self.workers)
        if is_committed and self._examiner is not None:
            rest += self._examiner.plan(step)
        if is_committed and self._momenta is not None:
            rest += self._momenta.plan(step, self._pattern, self.workers - 1)
        averaged = rows if is_committed else ()
        self._accounting.count(collection.buckets, averaged, rest, self._n_elements)

    def _list_rows(self, step: int) -> Sequence[MomentumRows]:
        return () if self._momenta is None else self._momenta.list_rows(step)

    def _average_momenta(self, step: int) -> None:
        """Average the momenta that ``momentum_sync`` selects after a step, as real workers do."""
        workers = range(self.workers)
        for rows in self._list_rows(step):
            momenta = [[param.exp_avg[worker] for param in rows.params] for worker in workers]
            joined = [rows.join(mine) for mine in momenta]
            votes = torch.stack([rows.encode(row).view(-1) for row in joined])
            present = torch.ones(self.workers, 1, dtype=torch.bool, device="cpu")
            reply = rows.reduce(votes, present, 0).view(self.workers, -1)
            for worker, row in enumerate(joined):
                for param, mean in rows.read_means(row, reply):
                    param.exp_avg[worker].view(-1).copy_(mean)

    def _read_inputs(self) -> tuple[Sequence[Coefficients], list[str]]:
        """Check a step's hyperparameters; return them for the ops and as text."""
        self._fixed.check(self.param_groups)
        self._fixed.check_state(self.state)
        numbers = self._reader.read(self)
        self._known_step = read_step(self.param_groups)
        said = [*numbers.lines, *describe_steps(self.param_groups)]
        for before, now in zip(self._said or said, said, strict=True):
            if now != before:
                raise InvalidArgumentError(
                    f"{now}, but {before} when the first worker of this step was collected. "
                    "Expected the same for all workers. Change groups after step()"
                )
        return numbers.coefficients, said

    @contextmanager
    def _refusing(self, worker: int) -> Iterator[None]:
        """Turn errors in a worker's inputs into one error; nothing has changed."""
        try:
            yield
        except StepError:
            raise
        except Exception as error:
            said, step = describe_problem(error), self._find_step()
            raise make_error(
                Status.INPUT, rank=worker, step=step, culprits=(worker,), problem=said
            ) from error

    @property
    def _pattern(self) -> Exchange:
        assert isinstance(self._settings.exchange, Exchange)  # the constructor refuses "auto"
        return self._settings.exchange

    @property
    def _n_elements(self) -> int:
        return sum(param.slot.n_elements for param in self._params)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self._roster.n_voters

    @property
    def ids(self) -> tuple[int, ...]:
        """The id of each worker, by place."""
        return self._roster.ids

    @property
    def weights(self) -> tuple[int, ...]:
        """Number of times that each worker's vote counts, by place."""
        return self._roster.weights

    @property
    def traffic(self) -> Traffic:
        """Traffic that one real worker would have, other than the server."""
        return self._accounting.traffic

    @property
    def up_bits_per_parameter(self) -> float:
        """Bits of a worker's votes and momenta per element, averaged over all steps."""
        return self._accounting.up_bits / max(1, self.traffic.steps * self._n_elements)

    @property
    def down_bits_per_parameter(self) -> float:
        """Bits of the replies per element, averaged over all steps."""
        return self._accounting.down_bits / max(1, self.traffic.steps * self._n_elements)

    @property
    def momentum_ownership(self) -> MomentumOwnership:
        """The momenta that this process keeps, for checkpoints: all workers' momenta."""
        return MomentumOwnership.of_one_process(
            self.workers, is_stacked=True, seed=self._settings.seed
        )

    def diagnostics(self) -> list[Diagnosis]:
        """Return how far workers agreed, as ``DistributedLion.diagnostics``."""
        return [] if self._examiner is None else self._examiner.found

    def grad_norm(self, worker: int) -> float | None:
        """Return ``DistributedLion.grad_norm`` of a worker; None before a step, or unclipped."""
        self._check_worker(worker)
        if self._grad_norms is None or self._settings.clip_norm is None:
            return None
        return self._grad_norms.get(worker, 0.0)

    def exp_avg(self, worker: int) -> list[Tensor]:
        """Return the momenta of a worker: views, one for each trainable parameter in order."""
        worker = self._check_worker(worker)
        return [param.exp_avg[worker] for param in self._params]

    def change_workers(
        self,
        ids: Sequence[int],
        *,
        newcomers: Newcomers = "zeros",
        weights: Sequence[int] | None = None,
    ) -> None:
        """Let these workers vote from the next step on, as the members of a crew change.

        Args:
            ids: Ids of the workers, by place: ``collect(0)`` is for the first of them. At first
                they are 0 to N - 1. Workers that were there before keep their momentum and coins.
            newcomers: The momentum that others begin with, as for ``Crew``.
            weights: Their weights, by place; None: those that were there keep theirs, others get 1.

        Raises:
            InvalidArgumentError: Ids repeat or are negative, there are too many, ``newcomers`` is
                unknown, a weight is out of range, or workers have been collected for this step.
            UnsupportedTypeError: An id is not an integer.
        """
        self._collected.check_idle("change_workers()")
        self._collected.check_whole()
        check_newcomers(newcomers)
        ids, before = tuple(ids), self._roster
        self._roster = change_roster(before, ids, weights, self._settings)
        reseat(self.state, before.ids, ids, newcomers)
        self._lay_out()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, checked as in the constructor, between two steps.

        Raises:
            InvalidArgumentError, UnsupportedTypeError: As in the constructor, or workers have been
                collected for the present step.
        """
        if self._collection is None:
            super().add_param_group(param_group)
            return
        self._collected.check_idle("add_param_group()")
        super().add_param_group(param_group)
        self._lay_out()

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers and strings only; rules as their ``repr``."""
        self._collected.check_whole()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of a cluster of as many workers, or of one Lion for all of them.

        Raises:
            CheckpointError: Groups, shapes, momenta, steps or rules do not fit.
            InvalidArgumentError: Workers have been collected for the present step.
        """
        self._collected.check_idle("load_state_dict()")
        filled = self._parse_state(state_dict)
        with restoring(self):
            self._load_state(filled)
            self._lay_out()

    def _momentum_shape(self, param: Tensor) -> torch.Size:
        return torch.Size([self.workers, *param.shape])

    def _take_momentum(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return all workers' momenta; a single Lion's momentum is copied to all."""
        return exp_avg.expand(self._momentum_shape(param))

    def _check_worker(self, worker: Any) -> int:
        number = read_worker(worker)
        if not 0 <= number < self.workers:
            raise InvalidArgumentError(
                f"there is no worker {number} among {self.workers}; expected 0 to "
                f"{self.workers - 1}"
            )
        return number

    def _check_frozen(self) -> None:
        known = {param.param for param in self._params}
        frozen = {param: name for param, name in self._param_names().items() if param not in known}
        check_frozen(frozen, "make a new cluster and load the state into it")


def _check_pattern(exchange: Any) -> Exchange:
    """Check that ``exchange`` is a pattern, and return it."""
    if not isinstance(exchange, Exchange):
        raise UnsupportedTypeError(
            f"exchange={exchange!r}: expected one of {list_patterns()}; without a network "
            "'auto' has nothing to measure"
        )
    return exchange
