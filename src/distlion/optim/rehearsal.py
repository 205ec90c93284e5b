"""A step without its commit: what communication alone costs."""

from __future__ import annotations

import torch

from distlion.optim.distributed_lion import DistributedLion


@torch.no_grad()
def rehearse_step(optimizer: DistributedLion) -> None:
    """Encode, exchange and count as ``step()`` does, and change neither parameters nor momenta.

    For measurements; every worker calls it. ``optimizer.traffic`` counts it as a step.

    Raises:
        StepError: As ``step()``, but for values that are not finite: what came back is let go.
    """
    with optimizer._peers.lifecycle.exchange("rehearse_step()"):
        inputs, votes = optimizer._cast_votes()
        optimizer._peers.meter.count_step(optimizer._peers.n_elements)
    # Gradients are compared between workers in the first steps only.
    if inputs.wants_digest:
        optimizer._identical.observe([vote.reply.gradient_digests for vote in votes])
