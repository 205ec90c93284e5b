"""Cases of local steps in real processes, each compared with plain torch and an oracle of votes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import matrix
from cluster import run_workers
from distlion.votes import Aggregation
from drawn import make_params
from local_runs import SHAPES, STEPS, PlainRun, are_equal, copies, make, make_adamw, train

N_WORKERS = 3

Options = dict[str, Any]
Ended = tuple[list[Tensor], list[Tensor]]


def run_cases(rank: int, world_size: int, cases: list[Options]) -> list[Ended]:
    """Train with one optimizer after the other; also look at what was sent."""
    found = []
    for options in cases:
        params = make_params(SHAPES)
        optimizer = make(params, **options)
        every = optimizer.every
        for step in range(STEPS):
            before = optimizer.traffic.sent_bytes
            train(optimizer, params.values(), rank, step, step + 1)
            is_vote = (step + 1) % every == 0
            sent = optimizer.traffic.sent_bytes - before
            assert sent == is_vote * optimizer.plan.sent_bytes
        assert optimizer.local_step == STEPS
        optimizer.verify_replicas()
        assert optimizer.committed_step == optimizer.traffic.steps == STEPS // every
        found.append((copies(optimizer.common_point), copies(params.values())))
    return found


def check_cases(rules: list[Aggregation], cases: list[Options], plain: list[Options]) -> None:
    """Compare real workers with the oracle of votes on deltas.

    Args:
        rules: The rule of each case.
        cases: Options of ``LocalSteps``.
        plain: The same as arguments of ``PlainRun``.
    """

    def make_run(number: int) -> PlainRun:
        rule = matrix.describe_delta_rule(rules[number])
        return PlainRun(make_adamw, N_WORKERS, rule=rule, **plain[number])

    check_runs(cases, make_run)


def check_runs(cases: list[Options], make_run: Callable[[int], PlainRun]) -> None:
    """Compare real workers with the run of each case."""
    ended = run_workers(run_cases, N_WORKERS, cases)
    for number, options in enumerate(cases):
        expected = make_run(number).do(STEPS)
        for rank, found in enumerate(ended):
            common, own = found[number]
            assert are_equal(common, expected.common), (rank, options)
            assert are_equal(own, expected.own[rank]), (rank, options)
