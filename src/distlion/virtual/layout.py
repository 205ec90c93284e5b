"""The layout of a process's workers between two changes of parameters: places and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from distlion.layout import BucketLayout, fill_buckets
from distlion.step.diagnostics import Examiner
from distlion.step.momentum import MomentumSchedule
from distlion.step.param import VotingParam, count_turns
from distlion.step.settings import Settings
from distlion.virtual.route import VirtualRoute
from distlion.votes.roster import Roster
from distlion.wire.pattern import Exchange


@dataclass(frozen=True)
class ClusterLayout:
    """The parts that all workers of one process share, as ``Session`` is for real workers.

    Attributes:
        settings: Settings that do not change from step to step.
        roster: The workers, by place.
        params: The trainable parameters; their momenta have shape (n_workers, *param.shape).
        buckets: The buckets of the parameters.
        momenta: The schedule of averaged momenta; None for no averaging.
        examiner: The measurement of workers' agreement; None for none.
        routes: The votes on each bucket; empty for a single worker.
        n_turns: Parts of the parameters that take turns to vote; 1 where all vote each time.
    """

    settings: Settings
    roster: Roster
    params: Sequence[VotingParam]
    buckets: Sequence[BucketLayout]
    momenta: MomentumSchedule | None
    examiner: Examiner | None
    routes: Sequence[VirtualRoute]
    n_turns: int

    @classmethod
    def draw_up(
        cls,
        settings: Settings,
        roster: Roster,
        params: Sequence[VotingParam],
        groups: Sequence[dict[str, Any]],
        *,
        earlier: Examiner | None,
    ) -> ClusterLayout:
        """Place parameters into buckets; ``earlier`` passes on its findings."""
        n_workers = roster.n_voters
        buckets = fill_buckets(
            [param.slot for param in params],
            [param.kind for param in params],
            n_shards=n_workers,
            bucket_elements=settings.bucket_limit,
        )
        momenta = None
        if settings.momentum_sync is not None:
            # Made for a single worker too, to refuse patterns that select nothing.
            stage = MomentumSchedule(settings.momentum_sync, params, n_workers=n_workers)
            momenta = stage if n_workers > 1 else None
        examiner = Examiner.build(settings, roster, groups, params, earlier=earlier)
        routes = []
        if n_workers > 1:
            routes = [VirtualRoute(bucket, params, roster) for bucket in buckets]
        for route in routes:
            if isinstance(settings.exchange, Exchange):
                shape = route.rule.shape(route.bucket, roster.n_votes)
                settings.exchange.check_carries(shape, route.rule)
        n_turns = count_turns(params)
        examiner = examiner if n_workers > 1 else None
        return cls(settings, roster, params, buckets, momenta, examiner, routes, n_turns)

    @property
    def n_workers(self) -> int:
        """Number of workers."""
        return self.roster.n_voters

    @property
    def n_elements(self) -> int:
        """Elements of all trainable parameters."""
        return sum(param.slot.n_elements for param in self.params)

    def take_turn(self, step: int) -> list[VirtualRoute]:
        """Return the routes that vote in a step."""
        turn = step % self.n_turns
        return [route for route in self.routes if route.params[0].turn == turn]

    def exp_avg(self, worker: int) -> list[Tensor]:
        """Return the momenta of a worker: views, one for each trainable parameter in order."""
        return [param.exp_avg[worker] for param in self.params]
