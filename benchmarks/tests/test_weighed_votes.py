"""Votes weighed by agreement: a majority where weights are equal, and the definition where not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import distlion
from distlion.errors import InvalidArgumentError, NonFiniteError
from distlion.wire import AllReduce
from distlion_lab.training.workers import LION_BETAS, MethodRun
from programs import BENCHMARKS, imported_modules

with imported_modules(BENCHMARKS / "study", "weighed_votes") as (weighed_votes,):
    WeighedVotes, Weighing = weighed_votes.WeighedVotes, weighed_votes.Weighing

SHAPES = ((70,), (5, 3))
LR, DECAY = 0.01, 0.1


class Team:
    """Workers of one method, and their gradients.

    Args:
        weighing: Which method.
        workers: Their number.
        flippers: Those that hand in the negative of their gradient.
        leaning: Size of the common gradient, beside noise of size 1.
        whole: Whether gradients are rounded to whole numbers, so that some are 0.
    """

    def __init__(
        self,
        weighing: Weighing,
        workers: int,
        flippers: Sequence[int] = (),
        *,
        leaning: float = 1.0,
        whole: bool = False,
    ) -> None:
        self.params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        self.run = MethodRun(
            params=list(zip("ab", self.params, strict=True)),
            lr=LR,
            weight_decay=DECAY,
            workers=workers,
            steps=10,
            seed=3,
        )
        self.votes = WeighedVotes(self.run, weighing)
        self._flippers, self._leaning, self._whole = flippers, leaning, whole
        self._generator = torch.Generator().manual_seed(workers)

    def draw(self) -> list[list[Tensor]]:
        """Draw the gradients of a step, by worker and parameter."""
        common = [self._leaning * torch.randn(s, generator=self._generator) for s in SHAPES]
        rows = []
        for worker in range(self.run.workers):
            noisy = [each + torch.randn(each.shape, generator=self._generator) for each in common]
            rows.append([-each if worker in self._flippers else each for each in noisy])
        return [[each.round() for each in row] for row in rows] if self._whole else rows

    def take_steps(self, count: int) -> None:
        """Take some steps."""
        for _ in range(count):
            hand_in(self.votes, self.params, self.draw())


def hand_in(
    method: WeighedVotes | distlion.VirtualCluster,
    params: list[nn.Parameter],
    grads: list[list[Tensor]],
) -> None:
    """Let all workers vote once."""
    for worker, row in enumerate(grads):
        for param, grad in zip(params, row, strict=True):
            param.grad = grad.clone()
        method.collect(worker)
    method.step()


@pytest.mark.parametrize("weighing", list(Weighing))
@pytest.mark.parametrize("workers", [2, 5, 8])
def test_equal_weights_are_a_majority_vote_bitwise(
    monkeypatch: pytest.MonkeyPatch, weighing: Weighing, workers: int
) -> None:
    monkeypatch.setattr(weighed_votes, "GATE", -1.0)
    monkeypatch.setattr(weighed_votes, "LEAST_SHARE", 0.75)
    monkeypatch.setattr(weighed_votes, "MOST_SHARE", 0.75)
    # Whole numbers in the first step: directions of 0, and ties.
    team = Team(weighing, workers, leaning=0.5, whole=True)
    plain = [nn.Parameter(param.detach().clone()) for param in team.params]
    cluster = distlion.VirtualCluster(
        list(zip("ab", plain, strict=True)),
        LR,
        LION_BETAS,
        workers=workers,
        weight_decay=DECAY,
        seed=3,
    )
    for step in range(6):
        rate = LR / (1 + step)
        team.votes.optimizer.param_groups[0]["lr"] = cluster.param_groups[0]["lr"] = rate
        grads = team.draw()
        hand_in(team.votes, team.params, grads)
        hand_in(cluster, plain, grads)
        assert all(map(torch.equal, team.params, plain)), step


def follow(
    weighing: Weighing, agreement: list[float], rows: list[list[float]], moved: list[float]
) -> None:
    """Check the outcome of a step in plain numbers, and update agreements in place."""
    weights, columns = weigh(weighing, agreement), list(zip(*rows, strict=True))
    for column, direction in zip(columns, moved, strict=True):
        total = sum(weight * vote for weight, vote in zip(weights, column, strict=True))
        assert abs(direction) == 1
        assert total * direction > 0 or total == 0  # a tie is the coin's
    for worker, row in enumerate(rows):
        pairs = []
        for vote, column, direction in zip(row, columns, moved, strict=True):
            judge = direction if weighing is Weighing.RUNNING else sum(column) - vote
            if judge:
                pairs.append((vote > 0) == (judge > 0))
        agreement[worker] = 0.95 * agreement[worker] + 0.05 * sum(pairs) / len(pairs)


def weigh(weighing: Weighing, agreement: Sequence[float]) -> list[int]:
    """Return the weights by the definition."""
    if weighing is Weighing.GATED:
        weights = [int(each > 0.5) for each in agreement]
    else:
        kept = [min(max(each, 0.02), 0.98) for each in agreement]
        odds = [max(0.0, math.log(each / (1 - each))) for each in kept]
        weights = [round(7 * each / max(*odds, 1e-6)) for each in odds]
    return weights if any(weights) else [1] * len(agreement)


@pytest.mark.parametrize("weighing", list(Weighing))
def test_weights_and_outcomes_are_those_of_the_definition(weighing: Weighing) -> None:
    team = Team(weighing, 6, flippers=[1, 4], leaning=0.7)
    agreement, momenta = [0.75] * 6, torch.zeros(6, 85)
    seen = set()
    for _ in range(40):
        assert team.votes.weights.tolist() == weigh(weighing, agreement)
        seen.add(tuple(weigh(weighing, agreement)))
        grads = team.draw()
        flat = torch.stack([torch.cat([each.flatten() for each in row]) for row in grads])
        signs = (0.9 * momenta + (1 - 0.9) * flat).sign().tolist()
        momenta = 0.99 * momenta + (1 - 0.99) * flat
        before = torch.cat([param.detach().flatten() for param in team.params])
        hand_in(team.votes, team.params, grads)
        after = torch.cat([param.detach().flatten() for param in team.params])
        moved = ((1 - LR * DECAY) * before - after).div(LR).round().tolist()
        follow(weighing, agreement, signs, moved)
        assert team.votes.agreement.tolist() == pytest.approx(agreement)
    assert len(seen) > 1


def test_a_gate_closes_for_those_who_flip_and_opens_again() -> None:
    team = Team(Weighing.GATED, 8, flippers=[2, 5], leaning=3.0)

    team.take_steps(30)
    assert team.votes.weights.tolist() == [1, 1, 0, 1, 1, 0, 1, 1]

    team._flippers = ()
    team.take_steps(200)
    assert team.votes.weights.tolist() == [1] * 8


def test_where_no_worker_agrees_all_count() -> None:
    team = Team(Weighing.GATED, 2)
    for grads in [[[torch.ones(shape) * sign for shape in SHAPES] for sign in (1.0, -1.0)]] * 30:
        hand_in(team.votes, team.params, grads)

    assert float(team.votes.agreement.max()) < 0.5
    assert team.votes.weights.tolist() == [1, 1]


def test_a_worker_with_more_weight_than_all_others_agrees_with_itself_ever_after() -> None:
    """All votes are coins; a gate, which looks at the others, is not fooled by a good start."""
    running, gated = Team(Weighing.RUNNING, 4, leaning=0.0), Team(Weighing.GATED, 4, leaning=0.0)
    for team in (running, gated):
        team.votes.agreement[:] = torch.tensor([0.9, 0.6, 0.6, 0.6])
        team.take_steps(100)

    assert float(running.votes.agreement[0]) > 0.99
    assert float(running.votes.agreement[1:].max()) < 0.7
    assert float(gated.votes.agreement[0]) < 0.7


def test_who_has_no_gradient_votes_by_its_momentum() -> None:
    team = Team(Weighing.RUNNING, 2)
    hand_in(team.votes, team.params, [[torch.ones(s) for s in SHAPES]] * 2)
    before = [param.detach().clone() for param in team.params]
    for worker in range(2):
        team.votes.collect(worker)
    team.votes.step()

    assert all((param < old).all() for param, old in zip(team.params, before, strict=True))


def test_workers_come_in_order_and_all_before_a_step() -> None:
    team = Team(Weighing.GATED, 2)
    with pytest.raises(InvalidArgumentError, match="worker 1 is collected; expected worker 0 of 2"):
        team.votes.collect(1)
    with pytest.raises(InvalidArgumentError, match="after 0 of 2 workers"):
        team.votes.step()
    with pytest.raises(InvalidArgumentError, match="workers is 0"):
        Team(Weighing.GATED, 0)


def test_a_direction_that_is_not_finite_is_refused() -> None:
    team = Team(Weighing.GATED, 2)
    team.params[1].grad = torch.full(SHAPES[1], math.inf)
    with pytest.raises(NonFiniteError, match="worker 0"):
        team.votes.collect(0)


@pytest.mark.parametrize(("weighing", "numbers"), [(Weighing.RUNNING, 1), (Weighing.GATED, 8)])
def test_bytes_are_those_of_a_majority_and_of_the_agreements(
    weighing: Weighing, numbers: int
) -> None:
    team = Team(weighing, 8)
    team.take_steps(3)

    shape = distlion.MajorityVote().shape_of(85, 8)
    votes = AllReduce().plan(shape, 0).sent_bytes
    assert team.votes.sent_bytes == 3 * (votes + 7 * 4 * numbers)
    assert team.votes.rounds == AllReduce().cost(shape).rounds + 1
    assert (team.votes.up_bits_per_parameter, team.votes.down_bits_per_parameter) == (1, 1)
