"""Averages of the momenta of the workers of one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlion.step.momentum_stage import MomentumStage
from distlion.virtual.layout import ClusterLayout


def average_momenta(
    stage: MomentumStage, layout: ClusterLayout, groups: Sequence[dict[str, Any]], *, step: int
) -> None:
    """Average the momenta that ``momentum_sync`` selects after a step, as real workers would.

    Args:
        stage: The schedule of averages.
        layout: The workers, whose momenta are written.
        groups: The optimizer's param groups, which remember the selection of "auto".
        step: The step that has just been applied.
    """
    momenta = [layout.exp_avg(worker) for worker in range(layout.n_workers)]
    selected = None
    if stage.sync.is_measured(step):
        samples = [stage.take_sample(partial(_pick, mine)) for mine in momenta]
        selected = stage.select_dispersed(samples)
    for rows in stage.list_rows(step):
        joined = [
            rows.join([part.of(mine[part.position]) for part in rows.slices]) for mine in momenta
        ]
        votes = torch.stack([rows.encode(row).view(-1) for row in joined])
        reply = rows.reduce(votes, torch.ones(len(joined), 1, dtype=torch.bool, device="cpu"), 0)
        for worker, row in enumerate(joined):
            for part, mean in rows.settle(row, reply.view(len(joined), -1)):
                part.of(momenta[worker][part.position]).copy_(mean)
    if selected is not None:
        stage.remember(selected, groups)


def _pick(momenta: Sequence[Tensor], position: int, index: Tensor) -> Tensor:
    return momenta[position].view(-1)[index]
