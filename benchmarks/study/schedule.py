"""What all methods share: what they are built for, the schedule of the rate, and the decay."""

from __future__ import annotations

from dataclasses import dataclass

# What weights lose in a step at the highest rate, for every method with decoupled decay.
DECAY_PER_STEP = 1e-4
WARM_UP_SHARE = 0.2


@dataclass(frozen=True)
class Run:
    """What a method is built for.

    Attributes:
        lr: Highest learning rate.
        workers: N.
        steps: Of the run; DGC warms up over a share of them.
        seed: Of every draw.
        decay: What weights lose in a step at the highest rate.
    """

    lr: float
    workers: int
    steps: int
    seed: int
    decay: float = DECAY_PER_STEP


def rate_factor(step: int, steps: int, warm_up_share: float = WARM_UP_SHARE) -> float:
    """Return the share of the highest rate: up over a fifth of the run, then down to 0."""
    warm_up = max(1, round(warm_up_share * steps))
    return min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up + 1))
