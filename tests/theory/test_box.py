"""Lion with weight decay w pulls every coordinate into the box |x| <= 1/w, under every rule.

Equation:
    x' = (1 - lr w) x - lr Delta,  |Delta| <= 1, and lr w < 1
    e(x') <= (1 - lr w) e(x),  e(x) = max(|x| - 1/w, 0), the distance to the box
    (Phase I: Distributed Lion, arXiv:2404.00438, section 4; Lion, arXiv:2310.05898)

Rounding, with u = 2^-24: 1 - lr w is rounded to float32 once, which moves it by u/2 or less (what
lies below 1 is u apart); lr and lr Delta are rounded once each, as are the product with x and the
difference. To first order, x' is off by (u/2) |x| + u |x| + 2 u lr + u (|x| + lr), less than
3 u (|x| + lr); ROUNDINGS = 4 covers the terms of higher order. Where numbers are denormal, each of
lr/n (times S, at most 5), the two products and the difference may be off by 2^-150: DENORMAL. As e
changes by no more than x does, e(x') <= (1 - lr w) e(x) + roundings.

After T steps these have added up to the sum of (1 - lr w)^k roundings, k < T: at most
roundings / (lr w). The box of float32 really is that much wider than 1/w, or narrower.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from torch import nn

import distlion
import matrix
from distlion.virtual import VirtualCluster
from tiers import in_tiers

U = 2.0**-24
ROUNDINGS = 4.0
DENORMAL = 2.0**-147
FLT_MAX = float(np.finfo(np.float32).max)
MAX_WORKERS = 5
STEPS = 4
# Examples of each rule; what is drawn are this many values, repeated over up to 70 coordinates.
EXAMPLES = 25
DRAWN_VALUES = 5
# DistributedLion refuses lr w = 1.
LARGEST_DECAY = 1.0 - 2.0**-20

RULES = {**matrix.LISTED, **matrix.VARIANTS}

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]

every_rule = pytest.mark.parametrize(
    "rule", in_tiers(RULES.values(), lambda rule: rule == RULES["majority"]), ids=RULES
)


@dataclass(frozen=True)
class Case:
    """A start, the hyperparameters, and the gradients [step][worker]; None is a missing one."""

    lr: float
    weight_decay: float
    start: F32
    grads: tuple[tuple[F32 | None, ...], ...]

    @property
    def workers(self) -> int:
        return len(self.grads[0])

    @property
    def bound(self) -> float:
        return 1.0 / self.weight_decay

    @property
    def factor(self) -> float:
        return max(0.0, 1.0 - self.lr * self.weight_decay)

    def distance(self, x: F32) -> F64:
        return np.maximum(np.abs(x.astype(np.float64)) - self.bound, 0.0)

    def roundings(self, x: F32) -> F64:
        return ROUNDINGS * U * (np.abs(x.astype(np.float64)) + self.lr) + DENORMAL


def floats32(largest: float) -> st.SearchStrategy[float]:
    """Any float32 up to ``largest``, which is one itself, often one on which things turn."""
    return st.one_of(
        st.floats(-largest, largest, width=32),
        st.sampled_from([0.0, 2.0**-149, -(2.0**-149), largest, -largest]),
    )


@st.composite
def cases(draw: st.DrawFn, *, inside: bool = False) -> Case:
    """Draw lr w in (0, 1), any finite start (or one in the box), and gradients up to 1e38."""
    n = draw(st.integers(1, 70))
    workers = draw(st.integers(1, MAX_WORKERS))
    weight_decay = draw(st.floats(1e-3, 1e3))
    decay = draw(st.one_of(st.floats(2.0**-30, LARGEST_DECAY), st.just(LARGEST_DECAY)))

    def values(largest: float) -> F32:
        drawn = draw(arrays(np.float32, DRAWN_VALUES, elements=floats32(largest)))
        return np.resize(drawn, n)

    start = values(floor32(1.0 / weight_decay) if inside else FLT_MAX)
    largest_grad = draw(st.sampled_from([floor32(1e38), 1.0]))
    grads = tuple(
        tuple(
            None if draw(st.sampled_from((False, False, True))) else values(largest_grad)
            for _ in range(workers)
        )
        for _ in range(STEPS)
    )
    return Case(decay / weight_decay, weight_decay, start, grads)


def floor32(value: float) -> float:
    """Return the largest float32 that is not above a positive number."""
    rounded = np.float32(value)
    return float(rounded if float(rounded) <= value else np.nextafter(rounded, np.float32(0)))


def positions(case: Case, rule: Any) -> list[F32]:
    """Train virtual workers, or one Lion if ``rule`` is None; return the start and all places."""
    param = nn.Parameter(torch.from_numpy(case.start.copy()))
    hyper = {"lr": case.lr, "weight_decay": case.weight_decay}
    optimizer: distlion.Lion | VirtualCluster
    if rule is None:
        optimizer = distlion.Lion([param], **hyper)
    else:
        optimizer = VirtualCluster([param], workers=case.workers, aggregation=rule, **hyper)
    visited = [case.start]
    for grads in case.grads:
        for worker, grad in enumerate(grads):
            param.grad = None if grad is None else torch.from_numpy(grad)
            if isinstance(optimizer, VirtualCluster):
                optimizer.collect(worker)
        optimizer.step()
        visited.append(param.detach().numpy().copy())
    return visited


def check_shrinks(case: Case, rule: Any) -> None:
    visited = positions(case, rule)
    for grads, (x, moved) in zip(case.grads, pairwise(visited), strict=True):
        if all(grad is None for grad in grads):
            # Left alone, weight decay included.
            assert np.array_equal(moved, x)
            continue
        before, after, slack = case.distance(x), case.distance(moved), case.roundings(x)
        assert np.isfinite(moved).all()
        assert (after <= case.factor * before + slack).all()
        assert after.max() <= case.factor * before.max() + slack.max()
        norms = [float(np.linalg.norm(each)) for each in (before, after, slack)]
        # Norms of 70 numbers in double are off by far less than the spare part of ROUNDINGS.
        assert norms[1] <= case.factor * norms[0] + norms[2]


@every_rule
@given(case=cases())
@settings(max_examples=EXAMPLES)
def test_distance_to_the_box_shrinks_under_every_rule(rule: Any, case: Case) -> None:
    check_shrinks(case, rule)


@given(case=cases())
@settings(max_examples=EXAMPLES)
def test_distance_to_the_box_shrinks_for_lion(case: Case) -> None:
    alone = tuple((grads[0],) for grads in case.grads)
    check_shrinks(Case(case.lr, case.weight_decay, case.start, alone), None)


@every_rule
@given(case=cases(inside=True))
@settings(max_examples=EXAMPLES)
def test_what_is_inside_stays_inside(rule: Any, case: Case) -> None:
    for step, x in enumerate(positions(case, rule)):
        # |x| stays below 1/w plus far less than 1/w, and lr is not above 1/w.
        assert (case.distance(x) <= step * ROUNDINGS * U * 2.01 * case.bound + DENORMAL).all()


def push(sign: float, *, start: float, lr: float, steps: int, workers: int) -> Case:
    """All workers push one coordinate up (-1) or down (+1) in all steps; the box is |x| <= 1."""
    grads = ((np.full(1, sign, np.float32),) * workers,) * steps
    return Case(lr, 1.0, np.full(1, start, np.float32), grads)


@every_rule
def test_a_push_outwards_shrinks_by_the_factor_and_no_more(rule: Any) -> None:
    case = push(-1.0, start=1000.0, lr=0.1, steps=20, workers=3)
    for x, moved in pairwise(positions(case, rule)):
        expected = case.factor * case.distance(x)
        assert abs(case.distance(moved) - expected) <= case.roundings(x)


@every_rule
@pytest.mark.parametrize("lr", in_tiers([1e-5, 0.03], lambda lr: lr > 0.01))
def test_hundreds_of_pushes_at_the_edge_leave_the_box_by_the_sum_of_roundings(
    rule: Any, lr: float
) -> None:
    case = push(-1.0, start=1.0, lr=lr, steps=500, workers=2)
    x = positions(case, rule)[-1]
    added_up = (1.0 - case.factor ** len(case.grads)) / lr
    assert case.distance(x).max() <= added_up * case.roundings(x).max()


def test_without_weight_decay_there_is_no_box() -> None:
    case = push(-1.0, start=1.0, lr=0.1, steps=20, workers=3)
    param = nn.Parameter(torch.from_numpy(case.start))
    lion = distlion.Lion([param], lr=case.lr, weight_decay=0.0)
    for _ in range(20):
        param.grad = torch.full((1,), -1.0)
        lion.step()
    assert float(param.detach()) > 2.9
