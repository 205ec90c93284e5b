"""A step without its commit: what communication alone costs."""

from __future__ import annotations

import torch

from distlion.exchange import Status, Verdict, worst_of
from distlion.optim.distributed_lion import DistributedLion


@torch.no_grad()
def rehearse_step(optimizer: DistributedLion) -> None:
    """Encode, exchange and count as ``step()`` does, and change none of the state.

    For measurements; every worker calls it. ``optimizer.traffic`` counts it as a step.

    Raises:
        StepError: As ``step()``, but for values that are not finite: what came back is let go.
    """
    peers = optimizer._peers
    with peers.lifecycle.exchange("rehearse_step()"):
        inputs, votes = optimizer._cast_votes()
        peers.meter.count_step(peers.n_elements)
        # A worker that is alone casts no vote.
        verdict = worst_of([Verdict(Status.OK), *(vote.reply.verdict for vote in votes)])
        if verdict.status not in (Status.OK, Status.NON_FINITE):
            peers.abandon(verdict, optimizer.param_groups, inputs)
    # Gradients are compared between workers in the first steps only.
    if votes and inputs.wants_digest:
        peers.gradients.observe([vote.reply for vote in votes], peers.params)


def is_trying_overlap(optimizer: DistributedLion) -> bool:
    """Whether ``overlap="auto"`` still takes turns; for measurements, which begin after that."""
    peers = optimizer._peers
    return not (peers.is_alone or peers.network.trial.is_over)
