"""N workers of ``DistributedLion`` in one process: the same kernels, layout and coins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from distlion.errors import (
    InvalidArgumentError,
    NonFiniteError,
    SparseGradientError,
    StepError,
    UnsupportedTypeError,
)
from distlion.failures import SPARSE_WORDS, Status, make_error
from distlion.kernels.contract import Coefficients
from distlion.optim.base import VotingBase
from distlion.peers.fingerprint import check_frozen
from distlion.peers.ownership import MomentumOwnership
from distlion.signals import deferred_signals
from distlion.step.agreement import Agreement
from distlion.step.arguments import refusing_former
from distlion.step.clipping import ClipNorm
from distlion.step.diagnostics import Diagnosis
from distlion.step.hyperparameters import describe_steps, read_step
from distlion.step.momentum import MomentumSync
from distlion.step.newcomers import Newcomers, check_newcomers
from distlion.step.outcome import describe_problem
from distlion.step.param import take_gradients
from distlion.step.precision import Precision
from distlion.step.replicas import Replicas
from distlion.step.settings import Settings
from distlion.step.timeouts import Timeouts
from distlion.step.traffic import Traffic
from distlion.virtual.accounting import Account, Accounting
from distlion.virtual.collection import Collection
from distlion.virtual.layout import ClusterLayout
from distlion.virtual.members import (
    average_momenta,
    change_roster,
    make_roster,
    read_worker,
    reseat,
)
from distlion.votes.aggregation import Aggregation
from distlion.wire.all_reduce import AllReduce
from distlion.wire.pattern import Exchange
from distlion.wire.registry import list_patterns


class VirtualCluster(VotingBase):
    """Train as N workers of ``DistributedLion`` would, in one process, bitwise identically.

    Workers take turns with one set of parameters: each computes its gradient and is collected; then
    all of them vote. Memory holds the parameters, one momentum for each worker, and the votes of a
    step. A gradient is encoded when it is collected, and then released. With ``nonfinite="skip"``
    or ``ClipNorm(scope="global")``, which need all gradients, this happens in ``step()``.

    Args:
        params: As for ``DistributedLion``, frozen ones too.
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
        self._layout: ClusterLayout | None = None
        self._settings = Settings(
            exchange=AllReduce() if exchange is None else _check_pattern(exchange),
            nodes=None,
            momentum_sync=momentum_sync,
            overlap=False,
            nonfinite=nonfinite,
            clip_norm=clip_norm,
            bucket_elements=bucket_elements,
            replicas=Replicas(check_every=None),
            agreement=agreement,
            precision=precision,
            timeouts=Timeouts(),
            seed=seed,
            weight=1,
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
        earlier = None if self._layout is None else self._layout.examiner
        self._layout = ClusterLayout.draw_up(
            self._settings,
            self._roster,
            self._list_trainable(),
            self.param_groups,
            earlier=earlier,
        )
        for stage in self._own_stages:
            stage.lay_out(self._layout.params)
        self._fixed.note(self.param_groups)
        self._begin_step(self._layout, committed=False)

    def _begin_step(self, layout: ClusterLayout, *, committed: bool) -> None:
        """Begin a step; ``committed`` tells whether the last one was committed."""
        for route in layout.routes:
            route.begin(committed=committed)
        self._collection = Collection(layout, step=self.committed_step)
        self._said: list[str] = []  # of the groups, when the first worker is collected

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
        layout = self._laid_out
        self._collection.check_whole()
        worker = self._check_worker(worker)
        self._collection.check_new(worker)
        with self._refusing(worker):
            coefficients, grads, said = self._read_inputs(layout)
            self._check_grads(layout, worker)
        for param in layout.params:
            param.param.grad = None
        self._collection.add(worker, grads, coefficients)
        self._said = said

    @deferred_signals("a step")
    def _do_step(self) -> None:
        for stage in self._own_stages:
            stage.begin(self._laid_out.params, self._find_step())
        try:
            self._vote_and_commit()
        finally:
            for stage in self._own_stages:
                stage.end()

    def _vote_and_commit(self) -> None:
        layout, collection, step = self._laid_out, self._collection, self._find_step()
        collection.check_whole()
        account = Account.draw_up(layout, collection.routes, step=step)
        with self._refusing(0):
            coefficients, *_ = self._read_inputs(layout)
        try:
            committed = collection.commit(coefficients)
            if committed and layout.momenta is not None:
                average_momenta(layout.momenta, layout, step=step)
        except NonFiniteError:
            self._begin_step(
                layout, committed=False
            )  # held gradients are checked before any momentum moves
            raise
        self._accounting.count(account, layout.n_elements, committed=committed)
        if committed:
            self._grad_norms = collection.grad_norms
            for stage in self._own_stages:
                stage.commit(collection.routes)
            self._advance()
        self._begin_step(layout, committed=committed)
        if layout.examiner is not None:
            layout.examiner.warn()

    def _read_inputs(
        self, layout: ClusterLayout
    ) -> tuple[Sequence[Coefficients], list[Tensor | None], list[str]]:
        """Check a step's inputs; return hyperparameters, gradients, and the former as text."""
        self._fixed.check(self.param_groups)
        grads, numbers = take_gradients(layout.params), self._reader.read(self)
        self._known_step = read_step(self.param_groups)
        said = [*numbers.lines, *describe_steps(self.param_groups)]
        for before, now in zip(self._said or said, said, strict=True):
            if now != before:
                raise InvalidArgumentError(
                    f"{now}, but {before} when the first worker of this step was collected. "
                    "Expected the same for all workers. Change groups after step()"
                )
        return numbers.coefficients, grads, said

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
    def _laid_out(self) -> ClusterLayout:
        assert self._layout is not None  # since the constructor returned
        return self._layout

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self._roster.n_voters

    @property
    def ids(self) -> tuple[int, ...]:
        """The id of each worker, by place."""
        return self._roster.ids

    @property
    def turns(self) -> list[int]:
        """The part of each parameter, where parts take turns to vote; 0 where all vote."""
        return [param.turn for param in self._laid_out.params]

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
        return self._accounting.up_bits_per_parameter(self._laid_out.n_elements)

    @property
    def down_bits_per_parameter(self) -> float:
        """Bits of the replies per element, averaged over all steps."""
        return self._accounting.down_bits_per_parameter(self._laid_out.n_elements)

    @property
    def momentum_ownership(self) -> MomentumOwnership:
        """The momenta that this process keeps, for checkpoints: all workers' momenta."""
        return MomentumOwnership.of_one_process(
            self.workers, is_stacked=True, seed=self._settings.seed
        )

    def diagnostics(self) -> list[Diagnosis]:
        """Return how far workers agreed, as ``DistributedLion.diagnostics``."""
        examiner = self._laid_out.examiner
        return [] if examiner is None else examiner.found

    def grad_norm(self, worker: int) -> float | None:
        """Return ``DistributedLion.grad_norm`` of a worker; None before a step, or unclipped."""
        self._check_worker(worker)
        if self._grad_norms is None or self._settings.clip_norm is None:
            return None
        return self._grad_norms.get(worker, 0.0)

    def exp_avg(self, worker: int) -> list[Tensor]:
        """Return the momenta of a worker: views, one for each trainable parameter in order."""
        return self._laid_out.exp_avg(self._check_worker(worker))

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
        self._collection.check_idle("change_workers()")
        self._collection.check_whole()
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
        if self._layout is None:
            super().add_param_group(param_group)
            return
        self._collection.check_idle("add_param_group()")
        super().add_param_group(param_group)
        self._lay_out()

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers and strings only; rules as their ``repr``."""
        self._collection.check_whole()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of a cluster of as many workers, or of one Lion for all of them.

        Raises:
            CheckpointError: Groups, shapes, momenta, steps or rules do not fit.
            InvalidArgumentError: Workers have been collected for the present step.
        """
        self._collection.check_idle("load_state_dict()")
        self._load_state(self._parse_state(state_dict))
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

    def _check_grads(self, layout: ClusterLayout, worker: int) -> None:
        """Refuse parameters and gradients that no worker can vote with."""
        known = {param.param for param in layout.params}
        names = self._param_names()
        frozen = {param: name for param, name in names.items() if param not in known}
        check_frozen(frozen, "make a new cluster and load the state into it")
        for param in layout.params:
            if param.has_sparse_grad():
                raise SparseGradientError(
                    SPARSE_WORDS.format(name=param.name), rank=worker, step=self.committed_step
                )


def _check_pattern(exchange: Any) -> Exchange:
    """Check that ``exchange`` is a pattern, and return it."""
    if not isinstance(exchange, Exchange):
        raise UnsupportedTypeError(
            f"exchange={exchange!r}: expected one of {list_patterns()}; without a network "
            "'auto' has nothing to measure"
        )
    return exchange
