"""Votes that count several times: those of the oracle, and of several workers who agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distlion
import matrix
import oracle
from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.virtual import VirtualCluster
from replay import Case, GroupSpec, initial_values, set_grads, worker_grads

# 2 + 1 against 3, and 3 + 1 against 2 + 2, are ties.
WEIGHTS = (3, 1, 2, 2)
SIZES = (1, 65, 130, 4133)
STEPS = 6
# An estimate is multiplied and rounded once; added several times, it may round otherwise.
COUNTED = {name: rule for name, rule in matrix.RULES.items() if not rule.worker_state}


def make_case(rule: distlion.Aggregation, dtype: str = "float32") -> Case:
    group = GroupSpec(rule, SIZES, lr=3e-3, weight_decay=0.1, dtype=dtype)
    return Case("weights", (group,), STEPS, seed=3, absent=True)


def make_cluster(case: Case, workers: int, **options: Any) -> VirtualCluster:
    (group,) = case.groups
    values = [
        torch.from_numpy(each).to(getattr(torch, group.dtype)) for each in initial_values(case)
    ]
    return VirtualCluster(
        [nn.Parameter(value) for value in values],
        workers=workers,
        lr=group.lr,
        weight_decay=group.weight_decay,
        aggregation=group.rule,
        seed=case.seed,
        **options,
    )


def train(cluster: VirtualCluster, case: Case, rows: Sequence[int]) -> list[torch.Tensor]:
    """Train workers whose gradients are those of ``rows``; return parameters."""
    for step in range(case.steps):
        for worker, row in enumerate(rows):
            set_grads(cluster, worker_grads(case, step, row))
            cluster.collect(worker)
        cluster.step()
    return [param.detach() for param in cluster.param_groups[0]["params"]]


@pytest.mark.parametrize("name", matrix.RULES)
def test_weighted_votes_of_every_rule_are_those_of_the_oracle(name: str) -> None:
    dtype = ("float32", "bfloat16")[list(matrix.RULES).index(name) % 2]
    case = make_case(matrix.RULES[name], dtype)
    (spec,) = case.groups
    group = oracle.Group(
        initial_values(case),
        matrix.describe_for_oracle(spec.rule),
        spec.lr,
        spec.betas,
        spec.weight_decay,
        dtype,
    )
    expected = oracle.OracleCluster([group], len(WEIGHTS), seed=case.seed, weights=WEIGHTS)
    cluster = make_cluster(case, len(WEIGHTS), weights=WEIGHTS)
    for step in range(STEPS):
        grads = [worker_grads(case, step, worker) for worker in range(len(WEIGHTS))]
        expected.step(grads)
        for worker, mine in enumerate(grads):
            set_grads(cluster, mine)
            cluster.collect(worker)
        cluster.step()
        params = cluster.param_groups[0]["params"]
        for param, wanted in zip(params, expected.params, strict=True):
            assert np.array_equal(param.detach().float().numpy(), wanted), step
    for worker in range(len(WEIGHTS)):
        for found, wanted in zip(cluster.exp_avg(worker), expected.exp_avgs[worker], strict=True):
            assert np.array_equal(found.float().numpy(), wanted)


@pytest.mark.parametrize("name", COUNTED)
def test_a_weight_is_as_many_workers_with_the_same_gradients(name: str) -> None:
    """Of directions that are not 0, which each worker's own coin decides."""
    case, rows = make_case(COUNTED[name]), [0, 0, 0, 1, 2, 2, 3, 3]
    weighted = make_cluster(case, len(WEIGHTS), weights=WEIGHTS)
    several = make_cluster(case, len(rows))
    assert weighted.weights == WEIGHTS and several.weights == (1,) * len(rows)
    for step in range(STEPS):
        for cluster, who in ((weighted, range(len(WEIGHTS))), (several, rows)):
            for worker, row in enumerate(who):
                grads = worker_grads(case, step, row)
                for grad in grads:
                    if grad is not None:
                        grad[grad == 0] = np.float32(1e-3) * (1 if row % 2 else -1)
                set_grads(cluster, grads)
                cluster.collect(worker)
            cluster.step()
        pairs = [cluster.param_groups[0]["params"] for cluster in (weighted, several)]
        assert all(map(torch.equal, *pairs)), step


@pytest.mark.parametrize("name", matrix.LISTED)
def test_weights_of_one_change_no_bit_and_no_byte(name: str) -> None:
    case = make_case(matrix.LISTED[name])
    plain, ones = make_cluster(case, 3), make_cluster(case, 3, weights=[1, 1, 1])
    assert all(map(torch.equal, train(plain, case, range(3)), train(ones, case, range(3))))
    assert plain.traffic == ones.traffic
    assert plain.down_bits_per_parameter == ones.down_bits_per_parameter


def test_replies_have_room_for_all_votes() -> None:
    """Counts to 4 take 3 bits, counts to 8 take 4; votes have one."""
    case = make_case(distlion.Average())
    clusters = [make_cluster(case, 4), make_cluster(case, 4, weights=WEIGHTS)]
    for cluster in clusters:
        train(cluster, case, range(4))
    assert [cluster.down_bits_per_parameter for cluster in clusters] == [3, 4]
    assert [cluster.up_bits_per_parameter for cluster in clusters] == [1, 1]


def test_who_has_more_than_half_of_all_votes_decides() -> None:
    case = make_case(distlion.MajorityVote())
    # The same place has the same coin where a direction is 0.
    heavy = make_cluster(case, 3, weights=[3, 1, 1])
    alone = make_cluster(case, 2, weights=[2, 1])
    # A worker that is absent has no votes.
    case = Case(case.name, case.groups, case.steps, case.seed)
    assert all(map(torch.equal, train(heavy, case, [2, 5, 7]), train(alone, case, [2, 4])))


def test_diagnoses_weigh_as_votes_do() -> None:
    """Directions +, - and - of weights 3, 1 and 1: of 5 votes, 1 is left over."""
    params = [nn.Parameter(torch.zeros(8))]
    cluster = VirtualCluster(
        params, workers=3, weights=[3, 1, 1], agreement=distlion.Agreement(every=1)
    )
    for worker, value in enumerate((1.0, -2.0, -1.5)):
        params[0].grad = torch.full((8,), value)
        cluster.collect(worker)
    cluster.step()
    (found,) = cluster.diagnostics()
    # 3 * 1 - 2 - 1.5 is below 0, as the sum of directions: the vote differs from it.
    assert (found.margin, found.ties, found.agreement) == (0.2, 0.0, 0.0)
    # Each worker counts once: the others of the first agree, those of another are tied.
    assert found.agreement_of == (0.0, None, None)


def test_workers_keep_their_weights_while_others_come_and_go() -> None:
    case = make_case(distlion.MajorityVote())
    cluster = make_cluster(case, 3, weights=[2, 1, 5])
    cluster.change_workers([2, 0, 7])
    assert cluster.weights == (5, 2, 1)
    cluster.change_workers([7, 2], weights=[4, 3])
    assert cluster.weights == (4, 3)
    train(cluster, case, range(2))
    with pytest.raises(InvalidArgumentError, match="1 to 255"):
        cluster.change_workers([7, 2], weights=[0, 3])
    assert cluster.weights == (4, 3)


def test_a_change_to_weights_that_a_pattern_does_not_count_changes_nothing() -> None:
    case = make_case(distlion.MajorityVote())
    cluster = make_cluster(case, 2, exchange=distlion.RecursiveDoubling())
    with pytest.raises(InvalidArgumentError, match="RecursiveDoubling"):
        cluster.change_workers([1, 0], weights=[4, 3])
    assert cluster.weights == (1, 1)
    train(cluster, case, range(2))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "too few": ({"weights": [1, 2]}, InvalidArgumentError, "3 voters have the weights"),
    "too many": ({"weights": [1, 2, 3, 4]}, InvalidArgumentError, "3 voters have the weights"),
    "zero": ({"weights": [1, 0, 2]}, InvalidArgumentError, "1 to 255"),
    "negative": ({"weights": [1, -1, 2]}, InvalidArgumentError, "1 to 255"),
    "too large": ({"weights": [1, 256, 2]}, InvalidArgumentError, "Only ratios matter"),
    "a sum": (
        {"workers": 17, "weights": [255] * 17},
        InvalidArgumentError,
        "4,096 votes in all",
    ),
    "a fraction": ({"weights": [1, 1.5, 2]}, UnsupportedTypeError, "1.5; expected integers"),
    "a truth": ({"weights": [1, True, 2]}, UnsupportedTypeError, "True; expected integers"),
    "momentum sync": (
        {"weights": [1, 1, 2], "momentum_sync": distlion.MomentumSync(every=2)},
        InvalidArgumentError,
        "weight=2 and momentum_sync",
    ),
    "norm of all": (
        {"weights": [1, 1, 2], "clip_norm": distlion.ClipNorm(1.0, scope="global")},
        InvalidArgumentError,
        "weight=2 and clip_norm",
    ),
    "packed sums": (
        {"weights": [1, 1, 2], "exchange": distlion.RecursiveDoubling()},
        InvalidArgumentError,
        r"weight=2 and exchange=RecursiveDoubling\(\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_cannot_be_counted_are_refused(name: str) -> None:
    options, kind, message = REFUSED[name]
    options = {"workers": 3, **options}
    with pytest.raises(kind, match=message):
        make_cluster(make_case(distlion.MajorityVote()), **options)
