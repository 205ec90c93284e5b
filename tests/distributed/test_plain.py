"""The whole algorithm in one file gives the bits of the optimizer, under every rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import distlion
import matrix
from cluster import run_workers
from distlion.step.plain import PlainLion
from replay import (
    Case,
    GroupSpec,
    Outcome,
    assert_equal_to_the_bit,
    make_optimizer,
    play_worker,
    set_grads,
    snapshot,
    worker_grads,
)
from tiers import in_tiers

pytestmark = pytest.mark.distributed

MOST_LINES = 80
FLAT = GroupSpec(distlion.MajorityVote(), (65, 3, 300), lr=3e-3, weight_decay=0.1)
MASKED = GroupSpec(distlion.MajorityVote(), (130,), lr=1e-3, cautious=True)
MATRICES = GroupSpec(distlion.MajorityVote(), (60, 144), betas=(0.9, 0.99), rows=12)


QUICK = {"quantized-4-linf", *matrix.first_of_each_class()[::3]}


def list_cases(is_chosen: Callable[[str], bool]) -> list[Case]:
    whole = Case("all kinds of groups", (FLAT, MASKED, MATRICES), 4, seed=5, absent=True)
    cases = [whole]
    for name, rule in matrix.RULES.items():
        if not is_chosen(name):
            continue
        groups = [replace(FLAT, rule=rule)]
        if not isinstance(rule, distlion.MaskedVote):
            groups += [replace(MASKED, rule=rule), replace(MATRICES, rule=rule)]
        cases.append(replace(whole, name=name, groups=tuple(groups)))
    return cases


def play_plain(rank: int, case: Case) -> Outcome:
    """Train by the plain file, with the groups that the optimizer gets."""
    groups = make_optimizer(case, rank=rank).param_groups
    keys = ("params", "lr", "betas", "weight_decay", "cautious", "orthogonalize", "aggregation")
    plain = PlainLion([{key: group[key] for key in keys} for group in groups], {}, seed=case.seed)
    for step in range(case.steps):
        set_grads(plain, worker_grads(case, step, rank))
        plain.step()
    return snapshot(plain)


def play_both(rank: int, world_size: int, cases: Sequence[Case]) -> dict[str, list[Outcome]]:
    torch.set_num_threads(1)
    return {
        case.name: [play_worker(rank, world_size, case), play_plain(rank, case)] for case in cases
    }


@pytest.mark.parametrize(
    ("world_size", "is_quick"),
    in_tiers([(2, True), (2, False), (3, True), (3, False)], lambda case: case == (3, True)),
)
def test_plain_file_has_the_bits_of_the_optimizer(world_size: int, is_quick: bool) -> None:
    cases = list_cases(lambda name: (name in QUICK) == is_quick)
    outcomes = run_workers(play_both, world_size, cases, timeout_s=120)
    for rank, found in enumerate(outcomes):
        for case in cases:
            optimizer, plain = found[case.name]
            assert_equal_to_the_bit(plain, optimizer, f"{case.name}, rank {rank}")


def fail(rank: int, world_size: int) -> str:
    param = torch.nn.Parameter(torch.ones(3))
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0, "cautious": False}
    settings |= {"orthogonalize": False, "aggregation": distlion.MajorityVote()}
    plain = PlainLion([param], settings)
    param.grad = torch.full((3,), float("nan") if rank == 1 else 1.0)
    try:
        plain.step()
    except ValueError as error:
        return f"{error} {param.tolist()} {dist.get_rank()}"
    return "no error"


def test_all_workers_refuse_a_step_in_which_one_is_not_finite() -> None:
    errors = run_workers(fail, 2, timeout_s=60)
    assert all("not finite" in error and "[1.0, 1.0, 1.0]" in error for error in errors)


def test_it_fits_on_a_page() -> None:
    path = Path(distlion.__file__).parent / "step" / "plain.py"
    assert len(path.read_text().splitlines()) <= MOST_LINES
