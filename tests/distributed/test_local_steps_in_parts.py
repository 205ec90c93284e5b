"""Parts of the parameters that take turns to vote, in real processes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distlion
import matrix
from cluster import run_workers
from distlion import errors, faults
from distlion.votes import Aggregation
from drawn import make_params
from failures import Caught, assert_raised
from local_runs import (
    SHAPES,
    PlainRun,
    are_equal,
    catch,
    copies,
    make,
    make_adamw,
    train,
    train_virtually,
)

pytestmark = pytest.mark.distributed

N_WORKERS, EVERY, PARTS, STEPS = 3, 6, 3, 14
INTERVAL = EVERY // PARTS
SETTINGS: dict[str, Any] = {"every": EVERY, "parts": PARTS}

Options = dict[str, Any]
Ended = tuple[list[torch.Tensor], list[torch.Tensor]]


def run_cases(rank: int, world_size: int, cases: list[Options]) -> list[Ended]:
    """Train with one optimizer after the other; also look at what was sent."""
    found = []
    for options in cases:
        params = make_params(SHAPES)
        optimizer = make(params, **SETTINGS, **options)
        for step in range(STEPS):
            before, plan = optimizer.traffic.sent_bytes, optimizer.plan.sent_bytes
            train(optimizer, params.values(), rank, step, step + 1)
            sent = optimizer.traffic.sent_bytes - before
            is_vote = (step + 1) % INTERVAL == 0
            assert options.get("delay") or sent == is_vote * plan
        optimizer.verify_replicas()
        assert optimizer.local_step == STEPS
        assert optimizer.committed_step == optimizer.traffic.steps == STEPS // INTERVAL
        found.append((copies(optimizer.common_point), copies(params.values())))
    return found


def check_cases(rules: list[Aggregation], cases: list[Options], plain: list[Options]) -> None:
    """Compare real workers with plain torch and the oracle of votes."""
    ended = run_workers(run_cases, N_WORKERS, cases)
    for number, rule in enumerate(rules):
        described = matrix.describe_delta_rule(rule)
        expected = PlainRun(make_adamw, N_WORKERS, rule=described, **SETTINGS, **plain[number])
        expected.do(STEPS)
        for rank, found in enumerate(ended):
            common, own = found[number]
            assert are_equal(common, expected.common), (rank, rule)
            assert are_equal(own, expected.own[rank]), (rank, rule)


def test_every_rule_gives_the_bits_of_the_oracle() -> None:
    rules = [*matrix.DELTA_RULES.values()]
    check_cases(rules, [{"aggregation": rule} for rule in rules], [{}] * len(rules))


def test_every_pattern_gives_the_bits_of_the_oracle() -> None:
    rules = [distlion.ScaledVote(), distlion.EstimateVote()]
    cases = [*itertools.product(rules, matrix.PATTERNS_OF_ALL_RULES.values())]
    check_cases(
        [rule for rule, _ in cases],
        [{"aggregation": rule, "exchange": pattern} for rule, pattern in cases],
        [{}] * len(cases),
    )


def test_outer_steps_and_outcomes_taken_later_give_the_bits_of_the_oracle() -> None:
    outer = {"outer_lr": 0.5, "outer_momentum": 0.9, "nesterov": True}
    plain = {"lr": 0.5, "momentum": 0.9, "nesterov": True}
    rules: list[Aggregation] = [distlion.ScaledVote(), distlion.ResidualVote(2)]
    check_cases(
        rules,
        [{"aggregation": rules[0], **outer}, {"aggregation": rules[1], "delay": 1, **outer}],
        [plain, {"delay": 1, **plain}],
    )


def train_measured(rank: int, world_size: int, nodes: bool) -> Ended:
    params = make_params(SHAPES)
    options: Options = {"nodes": distlion.Nodes(ranks_per_node=2)} if nodes else {}
    optimizer = make(
        params,
        **SETTINGS,
        agreement=distlion.Agreement(every=1),
        **options,
    )
    for turn in range(PARTS + 1):
        before, plan = optimizer.traffic.sent_bytes, optimizer.plan.sent_bytes
        train(optimizer, params.values(), rank, INTERVAL * turn, INTERVAL * (turn + 1))
        assert optimizer.traffic.sent_bytes - before == plan
    found = [(each.step, each.parameter) for each in optimizer.diagnostics()]
    assert all(name.startswith(f"parameter {step % PARTS} of group 0") for step, name in found)
    # Of a small parameter, some ranks of a node have no element.
    assert nodes or [step for step, _ in found] == [*range(PARTS + 1)]
    optimizer.vote()
    optimizer.verify_replicas()
    return copies(optimizer.common_point), copies(params.values())


def test_measured_agreement_is_that_of_virtual_workers() -> None:
    params = make_params(SHAPES)
    cluster = distlion.VirtualLocalSteps(
        params.items(),
        make_adamw,
        workers=N_WORKERS,
        agreement=distlion.Agreement(every=1),
        **SETTINGS,
    )
    train_virtually(cluster, params.values(), 0, EVERY + INTERVAL)
    assert [each.step for each in cluster.outer_optimizer.diagnostics()] == [*range(PARTS + 1)]
    cluster.vote()
    for common, own in run_workers(train_measured, N_WORKERS, False):
        assert are_equal(common, cluster.common_point)
        assert are_equal(own, common)


def test_the_ranks_of_a_node_vote_as_one() -> None:
    ended = run_workers(train_measured, 4, True)
    for common, own in ended:
        assert are_equal(common, ended[0][0])
        assert are_equal(own, common)


def spoil(rank: int, world_size: int, nonfinite: str) -> tuple[Caught | None, Any, list[Any]]:
    """The delta of rank 1 in the second part is not finite, in the first vote on it."""
    params = make_params(SHAPES)
    optimizer = make(params, **SETTINGS, nonfinite=nonfinite)
    train(optimizer, params.values(), rank, 0, 2 * INTERVAL - 1)
    before = copies(optimizer.common_point)
    armed: list[faults.Fault] = []
    if rank == 1:

        def turn_nan(subject: Any) -> None:
            grad = optimizer.list_pairs(1)[0][1].grad
            assert grad is not None
            grad[2] = torch.nan

        armed.append(faults.arm(rank=1, step=1, point="before_step", action=turn_nan))
    found = catch(lambda: train(optimizer, params.values(), rank, 3, 4))
    assert all(fault.fired == 1 for fault in armed)
    faults.disarm_all()
    counts = [optimizer.committed_step]
    unchanged = are_equal(optimizer.common_point, before)
    is_at_common = are_equal(*zip(*optimizer.list_pairs(1), strict=True))
    train(optimizer, params.values(), rank, 4, 4 + INTERVAL)  # the same part votes again
    moved = [
        not torch.equal(now, then) for now, then in zip(optimizer.common_point, before, strict=True)
    ]
    counts.append(optimizer.committed_step)
    return found, (counts, unchanged, is_at_common, moved), copies(optimizer.common_point)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_part_whose_vote_was_not_committed_votes_in_the_next_turn(nonfinite: str) -> None:
    ended = run_workers(spoil, N_WORKERS, nonfinite)
    for found, seen, common in ended:
        if nonfinite == "raise":
            assert_raised(found, errors.NonFiniteError, "parameter 1 of group 0")
        else:
            assert found is None
        # Who gives the period up begins anew; after an error the next delta covers both turns.
        assert seen == ([1, 2], True, nonfinite == "skip", [False, True, False])
        assert are_equal(common, ended[0][2])


def call_apart(rank: int, world_size: int, call: str) -> list[Caught | None]:
    """Rank 1 makes another call while the others vote, in each of the turns."""

    def act(turn: int) -> Caught | None:
        params = make_params(SHAPES)
        # Of its own, as the error ends all optimizers of a group.
        group = dist.new_group(list(range(world_size)))
        options = {
            "timeouts": distlion.Timeouts(step_s=10),
            "exchange": distlion.AllReduce(),
            "process_group": group,
        }
        optimizer = make(params, **SETTINGS, **options)
        last = INTERVAL * (turn + 1)
        train(optimizer, params.values(), rank, 0, last - 1)
        if rank == 1:
            return catch(getattr(optimizer, call))
        return catch(lambda: train(optimizer, params.values(), rank, last - 1, last))

    return [act(turn) for turn in range(PARTS)]


@pytest.mark.parametrize("call", ["vote", "verify_replicas"])
def test_a_worker_at_another_call_is_told_in_every_turn(call: str) -> None:
    for found in run_workers(call_apart, 2, call):
        for each in found:
            assert_raised(each, errors.ConfigMismatchError, "")


def grow(rank: int, world_size: int) -> list[torch.Tensor]:
    params = make_params(SHAPES)
    optimizer = make(params, **SETTINGS, outer_momentum=0.5)
    train(optimizer, params.values(), rank, 0, INTERVAL)
    params["more"] = torch.nn.Parameter(torch.full((9000,), float(rank)))
    optimizer.add_param_group({"params": [params["more"]]})
    parts = [len(optimizer.list_pairs(part)) for part in range(PARTS)]
    assert parts == [2, 1, 1]  # divided anew
    train(optimizer, params.values(), rank, INTERVAL, 2 * EVERY)
    optimizer.vote()
    optimizer.verify_replicas()
    assert are_equal(optimizer.common_point, params.values())
    return copies(optimizer.common_point)


def test_parts_are_divided_anew_where_parameters_are_added() -> None:
    ended = run_workers(grow, 2)
    assert are_equal(ended[0], ended[1])
    assert ended[0][-1].any()


def repair(rank: int, world_size: int) -> Ended:
    """The common point of rank 1 is damaged in a part that does not vote, and repaired."""
    params = make_params(SHAPES)
    optimizer = make(
        params, **SETTINGS, replicas=distlion.Replicas(check_every=1, on_mismatch="repair")
    )
    train(optimizer, params.values(), rank, 0, 2 * INTERVAL - 1)
    if rank == 1:
        optimizer.common_point[2][0] += 1
    train(optimizer, params.values(), rank, 2 * INTERVAL - 1, 2 * INTERVAL)
    return copies(optimizer.common_point), copies(params.values())


def test_all_parts_begin_anew_where_replicas_were_repaired() -> None:
    ended = run_workers(repair, 3)
    for common, own in ended:
        assert are_equal(common, ended[0][0])
        assert are_equal(own, common)


def differ(rank: int, world_size: int) -> Caught | None:
    parts = 2 if rank else 3
    return catch(lambda: make(make_params(SHAPES), every=EVERY, parts=parts))


def test_workers_with_other_parts_are_told() -> None:
    for found in run_workers(differ, 2):
        assert_raised(found, errors.ConfigMismatchError, "in 2 parts")
