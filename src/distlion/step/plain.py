"""Distributed Lion in one file, with plain ops: what the optimizer equals, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlion.kernels import Coefficients, Coins, Kernels, Segment
from distlion.layout import BucketLayout, place_parameters, repack
from distlion.votes import BucketVote, Roster, make_worker_state

_PLAIN, _HOST = Kernels(), torch.device("cpu")


class PlainLion(torch.optim.Optimizer):
    """Step as ``DistributedLion`` does, slowly: each worker counts all votes itself.

    Args:
        params: Parameters or param groups on the CPU, the same on all workers.
        settings: lr, betas, weight_decay, cautious, orthogonalize and aggregation, a rule.
        seed: Of the coins.
    """

    def __init__(self, params: Any, settings: dict[str, Any], *, seed: int = 0) -> None:
        super().__init__(params, settings)
        n = dist.get_world_size()
        roster = Roster(ids=tuple(range(n)), owners=(0,), weights=(1,) * n)
        self._seed, self._done = seed, 0
        sizes = [param.numel() for group in self.param_groups for param in group["params"]]
        slots = iter(place_parameters([""] * len(sizes), sizes))
        self._votes: list[BucketVote] = []
        for group in self.param_groups:
            own = tuple(next(slots) for _ in group["params"])
            bucket = repack(BucketLayout(0, tuple(range(len(own))), own, n_shards=1), own)
            self._votes.append(group["aggregation"].start(bucket, roster))
            for param in group["params"]:
                dist.broadcast(param.data, 0)
                kept = make_worker_state(group["aggregation"], param)
                self.state[param] = {"exp_avg": torch.zeros_like(param), **kept}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Do one step: 1 encode, 2 exchange and count, 3 commit."""
        coins, casts = Coins(self._seed, self._done, dist.get_rank()), []
        for group, vote in zip(self.param_groups, self._votes, strict=True):
            segments, kept = self._read(group, vote)
            # 1. What this worker sends: for most rules the sign of beta1 m + (1 - beta1) g.
            sent, finite = vote.encode(_PLAIN, segments, kept, coins, device=_HOST)
            voted = finite.new_tensor([segment.grad is not None for segment in segments])
            # 2. All workers' votes, and the parameters on which they voted; the result of the vote.
            votes, present = _gather(sent.flatten()), _gather(voted)
            result = vote.count(_PLAIN, votes, present, 0, coins)
            casts.append((vote, segments, vote.count_present(present).tolist(), result))
            if not _gather(finite).all():
                raise ValueError("a gradient, direction or momentum is not finite")
        for vote, segments, counts, result in casts:
            # 3. x = x - lr (S / n + weight_decay x);  m = beta2 m + (1 - beta2) g.
            vote.commit(_PLAIN, segments, counts, result, None)
        self._done += 1

    def _read(self, group: dict[str, Any], vote: BucketVote) -> tuple[list[Segment], list[Any]]:
        """Return a group's parameters as ops take them, and the rule's state of each."""
        named = {key: group[key] for key in ("lr", "weight_decay", "cautious", "orthogonalize")}
        settings = Coefficients(*group["betas"], **named)
        segments, kept = [], []
        for slot, param in zip(vote.bucket.slots, group["params"], strict=True):
            state = self.state[param]
            segments.append(Segment(slot, param, param.grad, state["exp_avg"], settings))
            kept.append({name: state[name] for name in vote.rule.worker_state})
        return segments, kept


def _gather(own: Tensor) -> Tensor:
    """Return the tensors of all workers, one a row."""
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return torch.stack(rows)
