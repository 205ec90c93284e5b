"""Workers whose votes count several times: the oracle's bits in every pattern, agreed by all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import distlion
import matrix
import oracle
from cluster import run_workers
from distlion import errors
from distributed.sharded_models import (
    Reference,
    build,
    gather_gradients,
    make_mesh,
    run_backward,
    shard,
)
from distributed.sharded_models import make_optimizer as make_sharded
from drawn import make_params, set_grads
from failures import Caught, assert_all_raised, caught
from failures import make_optimizer as make_plain
from local_runs import make_adamw
from replay import (
    Case,
    GroupSpec,
    Outcome,
    assert_equal_to_the_bit,
    initial_values,
    make_optimizer,
    play_all,
    play_oracle,
    snapshot,
    worker_grads,
)
from replay import set_grads as set_case_grads

pytestmark = pytest.mark.distributed

# 1 + 2 against 3 is a tie.
WEIGHTS = (1, 3, 2)
N = len(WEIGHTS)
DTYPES = ("float32", "bfloat16")
SHAPES = {"a": (513,), "b": (3, 71), "c": (1,)}


def make_case(name: str, rules: dict[str, distlion.Aggregation], **settings: Any) -> Case:
    """Return a run of one group for each rule, of one dtype or the other."""
    groups = tuple(
        GroupSpec(rule, (1, 65, 4133), 3e-3, weight_decay=0.1, dtype=DTYPES[number % 2])
        for number, rule in enumerate(rules.values())
    )
    return Case(name, groups, steps=4, seed=4, weights=WEIGHTS, **settings)


def list_cases() -> list[Case]:
    rules = dict(matrix.LISTED)
    patterns = [
        make_case(name, rules, absent=True, exchange=pattern)
        for name, pattern in matrix.PATTERNS.items()
        if not pattern.counts_in_parts
    ]
    return [
        *patterns,
        make_case("overlap", rules, overlap=True, bucket_elements=5000),
    ]


def play_and_count(rank: int, world_size: int, cases: list[Case]) -> dict[str, Any]:
    """Play cases; then a step whose bytes are those that were planned."""
    outcomes: dict[str, Any] = play_all(rank, world_size, cases)
    optimizer = make_optimizer(cases[0], rank=rank)
    set_case_grads(optimizer, worker_grads(cases[0], 0, rank))
    planned = optimizer.plan
    optimizer.step()
    assert optimizer.traffic.last_sent_bytes == planned.sent_bytes
    assert optimizer.weight == WEIGHTS[rank]
    return outcomes


def test_every_rule_in_every_pattern_is_that_of_the_oracle() -> None:
    cases = list_cases()
    ranks = run_workers(play_and_count, N, cases, timeout_s=120, measured=False)
    expected: dict[Any, list[Outcome]] = {}
    for case in cases:
        key = (case.groups, case.absent)
        if key not in expected:
            expected[key] = play_oracle(case, N)
        for rank, outcomes in enumerate(ranks):
            where = f"{case.name}, rank {rank}"
            assert_equal_to_the_bit(outcomes[case.name], expected[key][rank], where)


def count_bytes(rank: int, world_size: int) -> list[Any]:
    """Return outcome and traffic without a weight, and with a weight of 1."""
    found = []
    group = GroupSpec(distlion.Average(), (1, 65, 700), lr=3e-3)
    case = Case("one", (group,), steps=3, seed=4, exchange=distlion.AllReduce())
    for options in ({}, {"weight": 1}):
        optimizer = make_optimizer(case, rank=rank, **options)
        for step in range(case.steps):
            set_case_grads(optimizer, worker_grads(case, step, rank))
            optimizer.step()
        lines = optimizer._session.fingerprint.list_lines([])
        assert not any(line.startswith("weight") for line in lines)
        found.append((snapshot(optimizer), optimizer.traffic))
    return found


def test_a_weight_of_one_everywhere_changes_no_bit_and_no_byte() -> None:
    for plain, ones in run_workers(count_bytes, 2):
        assert_equal_to_the_bit(ones[0], plain[0], "weight=1")
        assert ones[1:] == plain[1:]


# Weights that are refused.

REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[int, ...], str]] = {
    "zero": ((1, 0, 1), {}, (1,), "rank 1 cannot vote: weight=0: expected 1 to 255"),
    "negative, beside others": ((2, 5, -1), {}, (2,), "rank 2 cannot vote: weight=-1"),
    "too large": ((256, 1, 1), {}, (0,), "rank 0 cannot vote: weight=256.*Only ratios matter"),
    "a fraction": ((1, 1.5, 1), {}, (1,), r"weight=1\.5: expected an integer from 1 to 255"),
    "a truth": ((1, True, 1), {}, (1,), "weight=True: expected an integer"),
    "nothing": ((1, 1, None), {}, (2,), "weight=None: expected an integer"),
    "text, twice": (("3", 1, "2"), {}, (0, 2), "ranks 0, 2 cannot vote: weight='3'"),
    "momentum sync": (
        (1, 2, 1),
        {"momentum_sync": distlion.MomentumSync(every=2)},
        (1,),
        "rank 1 cannot vote: weight=2 and momentum_sync",
    ),
    "norm of all": (
        (1, 2, 3),
        {"clip_norm": distlion.ClipNorm(1.0, scope="global")},
        (1, 2),
        "ranks 1, 2 cannot vote: weight=2 and clip_norm",
    ),
    "packed sums": (
        (1, 1, 3),
        {"exchange": distlion.RecursiveDoubling()},
        (2,),
        r"rank 2 cannot vote: weight=3 and exchange=RecursiveDoubling\(\)",
    ),
}


def construct(rank: int, world_size: int, names: list[str]) -> list[Caught | None]:
    """Make optimizers that are refused; then one that is not."""
    found = []
    for name in names:
        weights, options, *_ = REFUSED[name]
        found.append(caught(None, lambda: make_plain(weight=weights[rank], **options)))  # noqa: B023
    optimizer = make_plain(weight=rank + 1)
    for step in range(2):
        set_grads([p for group in optimizer.param_groups for p in group["params"]], rank, step)
        optimizer.step()
    return found


def test_a_weight_that_cannot_be_used_is_refused_on_every_rank() -> None:
    outcomes = run_workers(construct, N, list(REFUSED))
    for index, (_, _, culprits, message) in enumerate(REFUSED.values()):
        found = [row[index] for row in outcomes]
        assert_all_raised(found, errors.StepInputError, message)
        assert all(each is not None and each.culprits == culprits for each in found)


def weigh_too_much(rank: int, world_size: int) -> Caught | None:
    with pytest.MonkeyPatch.context() as patch:
        # 4,096 votes would take 17 workers.
        patch.setattr("distlion.peers.weights.MOST_VOTES", 700)
        return caught(None, lambda: make_plain(weight=255))


def test_weights_that_add_up_to_too_much_are_refused() -> None:
    outcomes = run_workers(weigh_too_much, N)
    message = r"the weights of all workers add up to 765\. Expected 700 at most"
    assert_all_raised(outcomes, errors.StepInputError, message)


def test_alone_a_weight_is_checked_too() -> None:
    params = make_params(SHAPES).values()
    assert distlion.DistributedLion(params, weight=7).weight == 7
    for weight in (0, 256, 1.0, True):
        with pytest.raises(errors.InvalidArgumentError, match="weight="):
            distlion.DistributedLion(params, weight=weight)  # type: ignore[arg-type]
    optimizer = distlion.DistributedLion(params)
    with pytest.raises(AttributeError):
        optimizer.weight = 3  # type: ignore[misc]


def change_weights(rank: int, world_size: int) -> Caught | None:
    """On rank 1 the weights of others change behind the back of a run, before a call."""
    optimizer = make_plain(weight=rank + 1, exchange=distlion.AllReduce())
    params = [p for group in optimizer.param_groups for p in group["params"]]
    set_grads(params, rank, 0)
    optimizer.step()
    session = optimizer._session
    if rank == 1:
        roster = replace(session.ranks.roster, weights=(1, 2, 4))
        session.ranks = replace(session.ranks, members=roster)
        session.routing.take_ranks(session.ranks)
    more = {"params": [("third", torch.nn.Parameter(torch.ones(3)))]}
    return caught(optimizer, lambda: optimizer.add_param_group(more))


def test_weights_that_change_are_found_and_name_the_rank() -> None:
    found = run_workers(change_weights, N)
    told = "weights of workers: 1, 2, 3 on ranks 0, 2, but weights of workers: 1, 2, 4 on rank 1"
    assert_all_raised(found, errors.ConfigMismatchError, told)
    assert all(each is not None and each.culprits == (1,) for each in found)


def step_with_other_weights(rank: int, world_size: int) -> Caught | None:
    optimizer = make_plain(weight=rank + 1, exchange=distlion.AllReduce())
    session = optimizer._session
    if rank == 1:
        roster = replace(session.ranks.roster, weights=(1, 2, 4))
        session.ranks = replace(session.ranks, members=roster)
        session.routing.take_ranks(session.ranks)
        optimizer._lay_out()
    set_grads([p for group in optimizer.param_groups for p in group["params"]], rank, 0)
    return caught(optimizer, optimizer.step)


def test_a_step_with_other_weights_is_refused() -> None:
    found = run_workers(step_with_other_weights, N)
    assert_all_raised(found, errors.ConfigMismatchError, "1, 2, 4 on rank 1")
    assert all(each is not None and each.culprits == (1,) for each in found)


# States.


def resume(rank: int, world_size: int, case: Case, at: int) -> Any:
    """Save with the weights of a case; go on with others."""
    optimizer = make_optimizer(case, rank=rank)
    for step in range(at):
        set_case_grads(optimizer, worker_grads(case, step, rank))
        optimizer.step()
    state, params = optimizer.state_dict(), snapshot(optimizer).params
    resumed = make_optimizer(case, rank=rank, weight=WEIGHTS[rank - 1])
    for group in resumed.param_groups:
        for param, values in zip(group["params"], params, strict=True):
            param.data.copy_(torch.from_numpy(values).reshape(param.shape))
    resumed.load_state_dict(state)
    for step in range(at, case.steps):
        set_case_grads(resumed, worker_grads(case, step, rank))
        resumed.step()
    return snapshot(resumed)


@pytest.mark.parametrize("name", ["average", "feedback-1"])
def test_a_state_goes_on_with_other_weights(name: str) -> None:
    """Weights are no state: what was saved says nothing of them."""
    at, group = 3, GroupSpec(matrix.LISTED[name], (1, 65, 700), lr=3e-3)
    case = Case(name, (group,), steps=6, seed=4, absent=True, weights=WEIGHTS)
    found = run_workers(resume, N, case, at)
    expected = play_oracle_with_two_weights(case, at)
    for rank, outcome in enumerate(found):
        assert_equal_to_the_bit(outcome, expected[rank], f"rank {rank}")


def play_oracle_with_two_weights(case: Case, at: int) -> list[Outcome]:
    (spec,) = case.groups
    rule = matrix.describe_for_oracle(spec.rule)
    cluster = oracle.OracleCluster(
        [oracle.Group(initial_values(case), rule, spec.lr, spec.betas)],
        N,
        seed=case.seed,
        weights=case.weights,
    )
    for step in range(case.steps):
        if step == at:
            cluster.weights = [WEIGHTS[rank - 1] for rank in range(N)]
        cluster.step([worker_grads(case, step, rank) for rank in range(N)])
    return [Outcome(cluster.params, cluster.exp_avgs[rank]) for rank in range(N)]


# Several ranks that act as one worker.


def vote_by_nodes(rank: int, world_size: int, weights: tuple[int, ...]) -> Any:
    params = make_params(SHAPES)
    optimizer = distlion.DistributedLion(
        params.items(),
        nodes=distlion.Nodes(ranks_per_node=2),
        aggregation=distlion.Average(),
        weight=weights[rank // 2],
    )
    for step in range(4):
        set_grads(params.values(), rank // 2, step)  # the mean of equal gradients is exact
        optimizer.step()
    return [param.detach() for param in params.values()]


def test_a_node_votes_with_its_weight() -> None:
    weights = (1, 3)
    params = make_params(SHAPES)
    cluster = distlion.VirtualCluster(
        params.items(), workers=2, weights=weights, aggregation=distlion.Average()
    )
    for step in range(4):
        for worker in range(2):
            set_grads(params.values(), worker, step)
            cluster.collect(worker)
        cluster.step()
    for found in run_workers(vote_by_nodes, 4, weights):
        assert all(map(torch.equal, found, [param.detach() for param in params.values()]))


def disagree_inside(rank: int, world_size: int) -> Caught | None:
    return caught(
        None, lambda: make_plain(nodes=distlion.Nodes(ranks_per_node=2), weight=(1, 1, 2, 3)[rank])
    )


def test_ranks_of_a_node_have_one_weight() -> None:
    found = run_workers(disagree_inside, 4)
    message = r"ranks 2, 3 act as one worker and have the weights \[2, 3\]"
    assert_all_raised(found, errors.StepInputError, message)
    assert all(each is not None and each.culprits == (2, 3) for each in found)


def vote_by_shards(rank: int, world_size: int) -> list[bool]:
    mesh, weights = make_mesh(2, 2), (1, 3)
    equal = []
    for rule in (distlion.MajorityVote(), distlion.Average()):
        model = shard(build(), mesh["shard"])
        weight = weights[mesh["replicate"].get_local_rank()]
        optimizer = make_sharded(model, mesh, aggregation=rule, weight=weight)
        reference = Reference(2, aggregation=rule, weights=weights)
        for step in range(3):
            run_backward(model, step, rank)
            reference.step(gather_gradients(model, mesh))
            optimizer.step()
            optimizer.zero_grad()
        equal.append(reference.equals(model))
    return equal


@pytest.mark.slow
def test_sharded_workers_vote_with_their_weights() -> None:
    assert run_workers(vote_by_shards, 4, timeout_s=120) == [[True, True]] * 4


# Local steps.


def take_local_steps(rank: int, world_size: int, rule: distlion.Aggregation) -> Any:
    params = make_params(SHAPES)
    optimizer = distlion.LocalSteps(
        make_adamw(params.values()), every=2, aggregation=rule, weight=WEIGHTS[rank]
    )
    for step in range(6):
        set_grads(params.values(), rank, step)
        optimizer.step()
    return [param.detach() for param in params.values()]


@pytest.mark.parametrize("name", ["scaled", "residual-2", "estimate-1"])
def test_local_steps_vote_with_weights_as_virtual_ones(name: str) -> None:
    rule = matrix.DELTA_RULES[name]
    params = make_params(SHAPES)
    cluster = distlion.VirtualLocalSteps(
        params.values(), make_adamw, workers=N, weights=WEIGHTS, every=2, aggregation=rule
    )
    unweighted = make_params(SHAPES)
    other = distlion.VirtualLocalSteps(
        unweighted.values(), make_adamw, workers=N, every=2, aggregation=rule
    )
    for run, mine in ((cluster, params), (other, unweighted)):
        for step in range(6):
            for worker in range(N):
                set_grads(mine.values(), worker, step)
                run.collect(worker)
            run.step()
    for found in run_workers(take_local_steps, N, rule):
        assert all(map(torch.equal, found, [param.detach() for param in params.values()]))
        assert not all(map(torch.equal, found, [p.detach() for p in unweighted.values()]))
