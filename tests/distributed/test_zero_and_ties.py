"""Directions of 0, and ties: where one bit has no room for the truth, nothing may drift."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

import distlion
from cluster import run_workers
from tiers import in_tiers

pytestmark = pytest.mark.distributed

WORLD_SIZES = [1, 2, 3, 4, 5]
N_COORDINATES = 64 * 157 + 3
LR = 1e-3


TERNARY, MAJORITY = distlion.TernaryVote(), distlion.MajorityVote()
RULES_WITHOUT_A_ZERO = [
    MAJORITY,
    distlion.MajorityVote(tie="zero"),
    distlion.Average(),
    distlion.QuantizedVote(bits=1),
    distlion.QuantizedVote(bits=4),
    distlion.MaskedVote(),
    distlion.MaskedVote(tie="random"),
]
UNTOUCHED_STEPS = 6


def run_untouched(rank: int, world_size: int) -> dict[object, list[np.ndarray]]:
    """Return, for each rule, a parameter of zeros with zero gradients after each step."""
    paths: dict[object, list[np.ndarray]] = {}
    for aggregation in [TERNARY, *RULES_WITHOUT_A_ZERO]:
        p = torch.nn.Parameter(torch.zeros(N_COORDINATES))
        optimizer = distlion.DistributedLion(
            [p], lr=LR, aggregation=aggregation, replicas=distlion.Replicas(check_every=None)
        )
        paths[aggregation] = []
        for _ in range(UNTOUCHED_STEPS):
            p.grad = torch.zeros_like(p)
            optimizer.step()
            paths[aggregation].append(p.detach().numpy().copy())
    return paths


@functools.cache
def untouched(world_size: int) -> list[dict[object, list[np.ndarray]]]:
    return run_workers(run_untouched, world_size)


def run_tied(
    rank: int, world_size: int, aggregation: object, steps: int, tied_at: int | None = None
) -> list[np.ndarray]:
    """Return the movement at each step where odd and even ranks contradict each other.

    Where ``tied_at`` is 0 or 1, only even or odd steps are tied; at the others all gradients point
    upwards.
    """
    p = torch.nn.Parameter(torch.zeros(N_COORDINATES))
    optimizer = distlion.DistributedLion(
        [p],
        lr=LR,
        betas=(0.0, 0.0),
        aggregation=aggregation,
        seed=3,
        replicas=distlion.Replicas(check_every=None),
    )
    moves = []
    for step in range(steps):
        tied = tied_at is None or step % 2 == tied_at
        # Ranks differ in size, so that no rank repeats another's gradient.
        p.grad = torch.full_like(p, float(rank + 1) * (-1.0 if tied and rank % 2 else 1.0))
        before = p.detach().clone()
        optimizer.step()
        moves.append(torch.sign(before - p.detach()).numpy())
    return moves


each_world_size = pytest.mark.parametrize("world_size", in_tiers(WORLD_SIZES, lambda n: n == 3))


@pytest.mark.slow
@each_world_size
def test_zeros_stay_put_under_ternary_vote(world_size: int) -> None:
    for paths in untouched(world_size):
        assert not np.any(paths[TERNARY])


@pytest.mark.parametrize("aggregation", RULES_WITHOUT_A_ZERO, ids=repr)
@each_world_size
def test_zeros_are_back_in_place_after_every_second_step(
    world_size: int, aggregation: object
) -> None:
    for paths in untouched(world_size):
        assert not np.any(paths[aggregation][1::2])


@pytest.mark.parametrize("world_size", in_tiers(WORLD_SIZES[1:], lambda n: n == 3))
def test_zeros_move_between_the_steps_of_a_pair_under_majority_vote(world_size: int) -> None:
    """One bit cannot say zero: the pairs above are a promise kept, and not idleness."""
    for after_first in (paths[MAJORITY][0] for paths in untouched(world_size)):
        assert np.array_equal(np.abs(after_first), np.full(N_COORDINATES, np.float32(LR)))


def test_zeros_do_not_move_at_all_with_one_worker() -> None:
    assert not np.any(untouched(1)[0][MAJORITY])


# A fair coin at n coordinates and k steps has a sum of standard deviation sqrt(n k). The bound of
# 4.9 standard deviations has a false-alarm rate of 1e-6 for a fresh seed; the seed here is fixed,
# so the tests below never alarm by chance.
Z_BOUND = 4.9


def z_score(signs: np.ndarray) -> float:
    return float(signs.sum() / math.sqrt(signs.size))


RULES_WITH_A_COIN = {
    "majority": distlion.MajorityVote(),
    "quantized": distlion.QuantizedVote(bits=4, step=0.5),
}
TIED_AT = {"always": None, "even-steps": 0, "odd-steps": 1}


def run_all_tied(rank: int, world_size: int) -> dict[tuple[str, str], np.ndarray]:
    return {
        (rule, name): np.stack(run_tied(rank, world_size, aggregation, 16, tied_at))
        for rule, aggregation in RULES_WITH_A_COIN.items()
        for name, tied_at in TIED_AT.items()
    }


@functools.cache
def tied(world_size: int) -> dict[tuple[str, str], np.ndarray]:
    first: dict[tuple[str, str], np.ndarray] = run_workers(run_all_tied, world_size)[0]
    return first


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES_WITH_A_COIN)
@pytest.mark.parametrize("tied_at", TIED_AT)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ties_have_no_drift_in_the_mean(world_size: int, tied_at: str, rule: str) -> None:
    moves = tied(world_size)[rule, tied_at]
    # The coin of an odd step is the inverse of the one before: only one step of each pair is news.
    tied_moves = moves[1::2] if tied_at == "odd-steps" else moves[0::2]
    assert set(np.unique(tied_moves)) == {-1.0, 1.0}
    assert abs(z_score(tied_moves)) < Z_BOUND
    # Neighbors in space, and steps two apart, must be independent too: their products are fair
    # coins.
    assert abs(z_score(tied_moves[:, 1:] * tied_moves[:, :-1])) < Z_BOUND
    assert abs(z_score(tied_moves[1:] * tied_moves[:-1])) < Z_BOUND
    # Each of the 64 places in a word: 5.6 standard deviations leave 1.4e-6 for all of them
    # together.
    whole_words = tied_moves[:, : N_COORDINATES // 64 * 64].reshape(len(tied_moves), -1, 64)
    by_place = whole_words.sum(axis=(0, 1)) / math.sqrt(whole_words[..., 0].size)
    assert np.abs(by_place).max() < 5.6


def test_a_tied_coordinate_returns_after_every_second_step() -> None:
    moves = run_workers(run_tied, 2, distlion.MajorityVote(), 8)[0]
    for even, odd in zip(moves[0::2], moves[1::2], strict=True):
        assert np.array_equal(even, -odd)


@pytest.mark.parametrize(
    "aggregation", [distlion.MajorityVote(tie="zero"), distlion.TernaryVote(), distlion.Average()]
)
def test_a_tie_of_rules_with_zero_does_not_move(aggregation: object) -> None:
    moves = run_workers(run_tied, 2, aggregation, 4)
    assert not np.any(moves)
