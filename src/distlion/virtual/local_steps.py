"""N workers of ``LocalSteps`` in one process: the same inner steps, votes and outer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.local.arguments import check_agreement
from distlion.local.inner_optimizers import needs_closure
from distlion.local.inner_state import find_broken, list_made, reset_broken, warn_of_copies
from distlion.local.local_steps import Inner, check_inner
from distlion.local.outer_step import OuterStage, OuterStep
from distlion.local.pairs import Pairs, copy_to_common, set_deltas, take_common
from distlion.local.write_check import WriteCheck
from distlion.numpy_numbers import as_python
from distlion.optim.arguments import check_params, list_params, resolve_names
from distlion.step.agreement import Agreement
from distlion.step.arguments import check_count, refusing_former
from distlion.step.traffic import Traffic
from distlion.virtual.cluster import VirtualCluster
from distlion.votes.aggregation import Aggregation
from distlion.wire.pattern import Exchange

MakeInner = Callable[[list[nn.Parameter]], Inner]


@dataclass
class _Worker:
    """A worker: its own parameters, and what moves them.

    Attributes:
        own: Its parameters, in the order of the model's; frozen ones are the model's.
        inner: Its inner optimizer.
        pairs: Those that votes move, each with its common point.
        made_early: Those whose inner state was made with the inner optimizer.
    """

    own: list[nn.Parameter]
    inner: Optimizer
    pairs: Pairs
    made_early: set[Tensor]


class VirtualLocalSteps:
    """Train as N workers of ``LocalSteps`` would, in one process, bitwise identically.

    The workers share the model: it holds the parameters of the worker in turn. ``collect`` does
    that worker's inner step, and then loads the next worker's parameters.

    Args:
        params: The model's parameters, or (name, parameter) pairs.
        make_inner: Function that makes a worker's inner optimizer, or a list of them, over its own
            copy of ``params``, which it gets as a list in their order.
        workers: N, 2 or more.
        weights: The number of times that each worker's vote counts; None: once each.
        every, aggregation, outer_lr, outer_momentum, nesterov: As for ``LocalSteps``.
        exchange: The pattern whose bytes ``traffic`` counts; it has no other effect.
        nonfinite, bucket_elements, agreement, seed: As for ``VirtualCluster``; gradients are
            deltas there.

    Raises:
        InvalidArgumentError: A value is out of range, or does not fit another.
        UnsupportedTypeError: A parameter or argument is of a kind without support.

    Notes:
        Elements are placed in the order of the inner optimizer's groups, as in a real worker.
        ``collect`` takes the worker's parameters from the model, where a forward pass may write.
        Memory holds each worker's parameters and inner state, and the common point. Between two
        steps the model holds the parameters of worker 0; after a vote these are everybody's.

    Example:
        >>> cluster = distlion.VirtualLocalSteps(
        ...     model.parameters(), lambda params: torch.optim.AdamW(params, lr=3e-3), workers=8
        ... )
        >>> for batches in loader:
        ...     for worker, batch in enumerate(batches):
        ...         model(batch).loss.backward()
        ...         cluster.collect(worker)
        ...     cluster.step()
    """

    @refusing_former
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        make_inner: MakeInner,
        *,
        workers: int,
        weights: Sequence[int] | None = None,
        every: int = 8,
        aggregation: Aggregation | None = None,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        nesterov: bool = False,
        exchange: Exchange | None = None,
        nonfinite: Literal["raise", "skip", "abstain"] = "raise",
        bucket_elements: int | None = None,
        agreement: Agreement = Agreement(),
        seed: int = 0,
    ) -> None:
        group = {"params": list_params(params)}
        self._names, self._stage = resolve_names(group, 0, has_names=False)
        check_params(self._stage, self._names, known={})
        self._every = every = as_python(every)
        check_count("every", every)
        step = OuterStep(lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
        self._make_inner, own = make_inner, self._copy_params()
        inner = self._check_inner(make_inner(own))
        # Places in ``params``, in the order of the inner optimizers.
        self._trained = self._find_order(inner, own)
        self._common = [nn.Parameter(copy_to_common(self._stage[n], None)) for n in self._trained]
        self._votes = self._open_votes(
            step,
            aggregation,
            workers=workers,
            weights=weights,
            exchange=exchange,
            nonfinite=nonfinite,
            bucket_elements=bucket_elements,
            agreement=check_agreement(agreement),
            seed=seed,
        )
        self._workers = [
            self._pair(own, inner),
            *(self._start_worker() for _ in range(workers - 1)),
        ]
        # Places of workers that came since the last vote, and abstain from the next.
        self._newcomers: set[int] = set()
        self._turn = self._calls = self._since = 0
        self._begin: WriteCheck | None = None
        self._note_begin()

    def _open_votes(
        self, step: OuterStep, aggregation: Aggregation | None, *, workers: int, **options: Any
    ) -> VirtualCluster:
        """Make the cluster that votes on deltas.

        Raises:
            InvalidArgumentError: There is a single worker.
        """
        if workers == 1:
            raise InvalidArgumentError(
                "workers=1: a worker alone has nobody to vote with. Expected 2 or more. Use its "
                "inner optimizer"
            )
        return VirtualCluster.with_stages(
            [OuterStage(step)],
            list(zip([self._names[n] for n in self._trained], self._common, strict=True)),
            **step.list_arguments(aggregation),
            workers=workers,
            **options,
        )

    def _start_worker(self) -> _Worker:
        """Make a worker with the model's parameters.

        Raises:
            InvalidArgumentError: Its inner optimizer does not have the first worker's parameters.
        """
        own = self._copy_params()
        inner = self._check_inner(self._make_inner(own))
        if self._find_order(inner, own) != self._trained:
            raise InvalidArgumentError(
                "make_inner gave two workers their parameters in different orders. Expected equal "
                "groups on all workers. Let it depend on its argument alone"
            )
        return self._pair(own, inner)

    def _check_inner(self, given: object) -> Optimizer:
        """Return a worker's inner optimizer, which ``collect`` steps on given gradients.

        Raises:
            UnsupportedTypeError: It needs a closure, or ``LocalSteps`` would refuse it.
        """
        inner = check_inner(given)
        if needs_closure(inner):
            raise UnsupportedTypeError(
                f"{type(inner).__name__} evaluates a closure in its step, and collect() has the "
                "gradients alone. Expected an optimizer that steps on given gradients. Use this "
                "one in LocalSteps, with real workers"
            )
        return inner

    def _pair(self, own: list[nn.Parameter], inner: Optimizer) -> _Worker:
        common = zip(self._trained, self._common, strict=True)
        return _Worker(own, inner, [(own[n], point) for n, point in common], list_made(inner))

    def _find_order(self, inner: Optimizer, own: Sequence[Tensor]) -> list[int]:
        """Return the places of trainable parameters, in the order of an inner optimizer.

        Raises:
            InvalidArgumentError: It lacks one of them, or has others.
        """
        places = {param: place for place, param in enumerate(own)}
        held = [param for group in inner.param_groups for param in group["params"]]
        for param in held:
            if param not in places:
                raise InvalidArgumentError(
                    f"make_inner put a parameter of shape {tuple(param.shape)} into the optimizer "
                    "that is not among those that it was given. Expected the worker's own copies. "
                    "Make the optimizer over the argument of make_inner, not over the model"
                )
        order = [places[param] for param in held if param.requires_grad]
        left_out = {place for place, param in enumerate(own) if param.requires_grad} - {*order}
        if left_out:
            raise InvalidArgumentError(
                f"make_inner left {self._names[min(left_out)]} out of the optimizer. Expected "
                "every trainable parameter. Freeze it, or give it to an optimizer"
            )
        return order

    def _copy_params(self) -> list[nn.Parameter]:
        """Return a worker's own parameters: copies, except frozen ones."""
        return [
            nn.Parameter(param.detach().clone(), requires_grad=True)
            if param.requires_grad
            else param
            for param in self._stage
        ]

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self._workers)

    @property
    def inners(self) -> tuple[Optimizer, ...]:
        """Each worker's inner optimizer."""
        return tuple(worker.inner for worker in self._workers)

    @property
    def local_step(self) -> int:
        """Number of calls of ``step()`` so far."""
        return self._calls

    @property
    def committed_step(self) -> int:
        """Number of votes committed so far."""
        return self._votes.committed_step

    @property
    def common_point(self) -> list[Tensor]:
        """The common point x of each trainable parameter, in order."""
        by_place = sorted(zip(self._trained, self._common, strict=True), key=lambda pair: pair[0])
        return [each.detach() for _, each in by_place]

    def worker_params(self, worker: int) -> list[Tensor]:
        """Return the parameters of a worker, in order; frozen ones are the model's."""
        return [each.detach() for each in self._workers[worker].own]

    @property
    def traffic(self) -> Traffic:
        """Traffic that one real worker would have; a step is a vote here."""
        return self._votes.traffic

    @property
    def outer_optimizer(self) -> VirtualCluster:
        """The cluster that votes on deltas."""
        return self._votes

    @torch.no_grad()
    def collect(self, worker: int) -> None:
        """Do the inner step of a worker with the model's gradients, and load the next worker.

        Args:
            worker: 0 to N - 1, in this order.

        Raises:
            InvalidArgumentError: It is not this worker's turn, or the model was written to since
                this was made; nothing has changed.
        """
        if worker != self._turn or worker == self.workers:
            raise InvalidArgumentError(
                f"worker {worker} is collected; expected worker {self._turn} of {self.workers}, "
                "in order, then step()"
            )
        self._check_begin()
        self._begin = None
        own = self._workers[worker].own
        for number in self._trained:
            staged = self._stage[number]
            own[number].copy_(staged)  # a forward pass may write, as nn.Embedding(max_norm=) does
            own[number].grad, staged.grad = staged.grad, None
        with torch.enable_grad():
            self._workers[worker].inner.step()
        for number in self._trained:
            own[number].grad = None
        self._turn += 1
        self._show(self._turn % self.workers)

    def _note_begin(self) -> None:
        """Note that the model and all workers are at the common point."""
        self._begin = WriteCheck([self._stage[n] for n in self._trained], self._common)

    def _check_begin(self) -> None:
        """Check that the model holds what the workers begin a period with.

        Raises:
            InvalidArgumentError: Something wrote to it.
        """
        found = [] if self._begin is None else self._begin.list_written()
        written = {id(param) for param in found}
        for name, staged in zip(self._names, self._stage, strict=True):
            if id(staged) in written:
                raise InvalidArgumentError(
                    f"{name} was written to between two periods, and each worker has a copy of its "
                    "own. Expected the values of the common point. Load weights into the model "
                    "before VirtualLocalSteps is made"
                )

    @torch.no_grad()
    def step(self) -> None:
        """End a step of all workers; after every H-th call with a vote.

        Raises:
            InvalidArgumentError: Not all workers were collected.
            NonFiniteError: A worker's delta is not finite, under "raise".
        """
        if self._turn != self.workers:
            raise InvalidArgumentError(
                f"step() after {self._turn} of {self.workers} workers. Expected all of them. "
                "Call collect() for each worker"
            )
        self._turn = 0
        self._calls += 1
        self._since += 1
        if self._calls % self._every == 0:
            self._cast_votes()
            self._newcomers = set()
        self._show(0)
        if not self._since:
            self._note_begin()

    @torch.no_grad()
    def vote(self) -> None:
        """Vote now, as ``LocalSteps.vote`` does; without a step since the last vote, nothing moves.

        Raises:
            InvalidArgumentError: Workers have been collected for the present step.
            NonFiniteError: A worker's delta is not finite, under "raise".
        """
        if self._turn:
            raise InvalidArgumentError(
                f"vote() after {self._turn} of {self.workers} workers were collected. Call step() "
                "before"
            )
        self._check_begin()
        if self._since:
            self._cast_votes()
        self._newcomers = set()
        for worker in self._workers:
            take_common(worker.pairs)
        self._show(0)
        self._note_begin()

    @torch.no_grad()
    def change_workers(self, ids: Sequence[int]) -> None:
        """Let these workers vote from the next vote on, as the members of a crew change.

        Args:
            ids: Ids of the workers, by place. At first they are 0 to N - 1. Workers that were there
                before go on; all others begin at the common point with a new inner optimizer, and
                abstain from the next vote. Call this before the ``step()`` or ``vote()`` in which
                they come.

        Raises:
            InvalidArgumentError: As ``VirtualCluster.change_workers``, a single worker is left,
                or some workers have been collected and others not.
            UnsupportedTypeError: An id is not an integer.
        """
        if self._turn not in (0, self.workers):
            raise InvalidArgumentError(
                f"change_workers() after {self._turn} of {self.workers} workers were collected. "
                "Expected all of them, or none. Collect the others first"
            )
        if len(ids) < 2:
            raise InvalidArgumentError(
                f"change_workers({list(ids)!r}): expected 2 workers or more, as in a crew"
            )
        self._check_begin()
        is_collected, before = self._turn > 0, self._votes.ids
        self._votes.change_workers(ids)
        known = dict(zip(before, self._workers, strict=True))
        self._workers = [known.get(identity) or self._start_worker() for identity in ids]
        self._newcomers = {place for place, identity in enumerate(ids) if identity not in known}
        for place in self._newcomers:
            take_common(self._workers[place].pairs)
        self._turn = len(ids) if is_collected else 0
        self._show(0)

    def _cast_votes(self) -> None:
        """Vote on all workers' deltas, and begin the next period at the common point."""
        for place, worker in enumerate(self._workers):
            if self._since and place not in self._newcomers:
                set_deltas(worker.pairs, worker.inner)
            self._votes.collect(place)
        before = self._votes.committed_step
        self._votes.step()
        self._since = 0
        for place, worker in enumerate(self._workers):
            take_common(worker.pairs)
            broken = find_broken(worker.inner, [param for param, _ in worker.pairs])
            reset_broken(worker.inner, broken, made_early=worker.made_early, worker=place)
        if (before, self._votes.committed_step) == (0, 1):
            warn_of_copies(self._workers[0].inner, [own for own, _ in self._workers[0].pairs])

    def _show(self, place: int) -> None:
        """Let the model hold a worker's parameters."""
        for number in self._trained:
            self._stage[number].copy_(self._workers[place].own[number])
