"""Warm-up: kernels are launched once at construction, when no peer waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distlion.kernels.coin import Coins
from distlion.kernels.contract import SCALE_BLOCK_ELEMENTS, Coefficients, Segment
from distlion.layout import Slot, fill_buckets
from distlion.step.bucket import Bucket
from distlion.step.gradients import look_at_gradients
from distlion.step.settings import Settings
from distlion.step.staging import bring_down, bring_up, name_failure
from distlion.votes.bucket_vote import make_worker_state

_STILL = Coefficients(beta1=0.9, beta2=0.99, lr=0.0, weight_decay=0.0, grad_scale=1.0)


def compile_kernels(buckets: Sequence[Bucket], settings: Settings) -> None:
    """Launch every kernel that steps will launch, on scratch tensors.

    The first launch of a kernel compiles it, which takes seconds. In a step, peers would wait for
    that, and could exceed ``Timeouts.step_s``.

    Args:
        buckets: The buckets; those on the host are skipped.
        settings: The optimizer's settings.

    Raises:
        DeviceError: A kernel cannot be compiled for the device, or it failed.
    """
    done = set()
    for bucket in buckets:
        for part in bucket.parts:
            if part.device.type != "cuda":
                continue
            for param in part.params:
                dtypes = (param.param.dtype, param.kept.dtype)
                if (part.rule, part.device, dtypes) not in done:
                    done.add((part.rule, part.device, dtypes))
                    with name_failure(part.device, "kernels were compiled"):
                        _launch_all(part, dtypes, settings, is_split=part is not bucket)


def _launch_all(
    part: Bucket,
    dtypes: tuple[torch.dtype, torch.dtype],
    settings: Settings,
    *,
    is_split: bool,
) -> None:
    """Launch a step's ops on zeros that fill some tiles and part of one more."""
    dtype, exp_avg_dtype = dtypes
    slot = Slot("scratch", SCALE_BLOCK_ELEMENTS + 1, 0, 0)
    (layout,) = fill_buckets(
        [slot], [0], n_shards=part.layout.n_shards, bucket_elements=slot.n_elements
    )
    param, grad = torch.zeros((2, slot.n_elements), dtype=dtype, device=part.device)
    exp_avg = torch.zeros(slot.n_elements, dtype=exp_avg_dtype, device=part.device)
    vote, kernels = part.rule.start(layout, part.vote.roster), part.kernels
    segments = kernels.gather([Segment(slot, param, grad.clone(), exp_avg, _STILL)])
    kept = [make_worker_state(part.rule, param)]
    coins = Coins(settings.seed, 0, part.vote.roster.ids[part.link.rank])
    rounding = coins.rounding if settings.precision.is_stochastic else None

    votes, finite = vote.encode(kernels, segments, kept, coins, device=part.device)
    bring_down([votes, finite, look_at_gradients(kernels, segments)])
    kernels.digests([param])
    if settings.clip_norm is not None:
        kernels.square_sums(grad)
    if settings.momentum_sync is not None:
        kernels.update_momentum(segments, [1])
    n_bytes = vote.shape.n_shards * vote.shape.reply_bytes
    reply = vote.read_reply(torch.zeros(n_bytes, dtype=torch.uint8, device="cpu"))
    moves: list[Sequence[Segment]] = [segments]
    if is_split:  # the parts of other ranks come without a momentum
        exp_avg = torch.zeros_like(param, dtype=torch.float32)
        moves.append([segments[0]._replace(grad=None, exp_avg=exp_avg)])
    for moved in moves:
        there = bring_up(reply, part.device)
        kernels.commit(moved, [1], there, reply_format=part.rule.reply_format, rounding=rounding)
