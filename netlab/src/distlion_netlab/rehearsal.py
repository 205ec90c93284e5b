"""A step without its commit, to measure the cost of communication alone."""

from __future__ import annotations

import torch

from distlion.failures import Status
from distlion.optim.distributed_lion import DistributedLion
from distlion.step.bucket import judge


@torch.no_grad()
def rehearse_step(optimizer: DistributedLion) -> None:
    """Encode, exchange and count as ``step()`` does, without changing any state.

    For measurements; every worker must call it. ``optimizer.traffic`` counts it as a step.

    Raises:
        StepError: As ``step()``, except for values that are not finite, as results are dropped.
    """
    session = optimizer._session
    with session.lifecycle.collective("rehearse_step()", votes=True):
        inputs, buckets = optimizer._cast_votes()
        session.meter.count_step(session.n_elements)
        verdict = judge(buckets)  # a worker that is alone casts none
        if verdict.status not in (Status.OK, Status.NON_FINITE, Status.OVERFLOW):
            session.abandon(verdict, optimizer.param_groups, inputs)
    # Gradients are compared between workers in the first steps only.
    if buckets and inputs.wants_digest:
        session.gradients.observe([bucket.reply for bucket in buckets], session.params)
    for bucket in buckets:
        bucket.clear()


def is_trying_overlap(optimizer: DistributedLion) -> bool:
    """Return True while ``overlap="auto"`` still tries both ways; measurements begin later."""
    session = optimizer._session
    return not (session.ranks.is_alone or session.routing.trial.is_over)
