"""Several optimizers on one process group: calls in another order end alike on every rank."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distlion
import oracle
from cluster import run_workers
from distlion import errors
from distlion.wire import watch
from failures import (
    Caught,
    assert_all_raised,
    assert_raised,
    await_waits,
    caught,
    freeze_state,
    give_time,
    note_wait,
    params_of,
)
from matrix import PATTERNS
from tiers import in_tiers

pytestmark = pytest.mark.distributed

Pair = tuple[distlion.DistributedLion, distlion.DistributedLion]
ODD_RANK = 1
STEP_TIMEOUT_S = 20.0
LAYOUTS = {"equal layouts": (4200, 4200), "different layouts": (4200, 9000)}
ROUTES: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (3, {"exchange": pattern}) for name, pattern in PATTERNS.items()},
    **{
        f"{name}, overlap": (3, {"exchange": pattern, "overlap": True, "bucket_elements": 1})
        for name, pattern in PATTERNS.items()
    },
    "nodes": (4, {"exchange": distlion.AllReduce(), "nodes": distlion.Nodes(ranks_per_node=2)}),
    "nodes, overlap": (
        4,
        {
            "exchange": distlion.AllReduce(),
            "nodes": distlion.Nodes(ranks_per_node=2),
            "overlap": True,
        },
    ),
}


@dataclass(frozen=True)
class Mistake:
    """What rank 1 calls in place of the first step of the first optimizer, and how it is told."""

    action: Callable[[Pair], object] = field(compare=False)
    call: str


def add_group(optimizer: distlion.DistributedLion) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})


def do_nothing(pair: Pair) -> None:
    pass


# A step that was omitted is one of the other optimizer to the others, too: the next that comes.
MISTAKES = {
    "step": Mistake(lambda pair: pair[1].step(), "step 1 of optimizer 1"),
    "verify_replicas": Mistake(
        lambda pair: pair[1].verify_replicas(), r"verify_replicas\(\) of optimizer 1"
    ),
    "add_param_group": Mistake(
        lambda pair: add_group(pair[1]), r"add_param_group\(\) of optimizer 1"
    ),
    "load_state_dict": Mistake(
        lambda pair: pair[1].load_state_dict(pair[1].state_dict()),
        r"load_state_dict\(\) of optimizer 1",
    ),
    "construction": Mistake(
        lambda pair: make_one(6, pair[1].param_groups[0]["lr"], pair[2], {}),  # type: ignore[misc]
        "construction of optimizer 2",
    ),
}


def make_one(
    n_elements: int, lr: float, group: dist.ProcessGroup, options: dict[str, Any]
) -> distlion.DistributedLion:
    params = [nn.Parameter(torch.full((n,), 0.5)) for n in (n_elements, 70)]
    return distlion.DistributedLion(
        params,
        lr=lr,
        timeouts=distlion.Timeouts(step_s=STEP_TIMEOUT_S),
        process_group=group,
        **options,
    )


def run_backward(optimizer: distlion.DistributedLion, rank: int) -> None:
    """Let gradients arrive as from a model, which overlap waits for."""
    optimizer.zero_grad()
    loss = torch.zeros(())
    for index, p in enumerate(params_of(optimizer)):
        step = optimizer.committed_step
        loss = loss + (p * torch.from_numpy(oracle.gradient(9, step, rank, index, p.numel()))).sum()
    loss.backward()


def make_pair(
    world_size: int, sizes: tuple[int, int], options: dict[str, Any]
) -> tuple[distlion.DistributedLion, distlion.DistributedLion, dist.ProcessGroup]:
    group = dist.new_group(list(range(world_size)))
    assert group is not None
    return (*(make_one(n, 1e-2, group, options) for n in sizes), group)  # type: ignore[return-value]


def err(rank: int, world_size: int, route: str, layout: str, mistakes: list[str]) -> list[Any]:
    """Let rank 1 make one mistake after the other, each on a process group of its own."""
    watch.LONG_S = 0.2
    give_time()
    found = []
    others = [other for other in range(world_size) if other != ODD_RANK]
    for mistake in mistakes:
        pair = make_pair(world_size, LAYOUTS[layout], ROUTES[route][1])
        for optimizer in pair[:2]:
            run_backward(optimizer, rank)
            optimizer.step()
        before = [freeze_state(optimizer) for optimizer in pair[:2]]
        if rank != ODD_RANK:
            note_wait(rank, pair[2], at=mistake)
        if mistake == "step" or rank != ODD_RANK:
            for optimizer in pair[:2]:
                run_backward(optimizer, rank)
        if rank == ODD_RANK:
            await_waits(others, at=mistake)
        action = MISTAKES[mistake].action if rank == ODD_RANK else step_first
        first = caught(None, lambda pair=pair, action=action: action(pair))
        unchanged = [freeze_state(optimizer) for optimizer in pair[:2]] == before
        afterwards = [caught(None, optimizer.verify_replicas) for optimizer in pair[:2]]
        found.append((first, unchanged, afterwards))
    return found


def step_first(pair: Pair) -> None:
    pair[0].step()


def is_quick(case: tuple[str, str, str]) -> bool:
    return case in {
        ("all-reduce", "different layouts", "step"),
        ("all-reduce", "different layouts", "other calls"),
        ("all-gather, overlap", "equal layouts", "step"),
        ("nodes", "equal layouts", "step"),
    }


@pytest.mark.parametrize(
    ("route", "layout", "calls"),
    in_tiers(itertools.product(ROUTES, LAYOUTS, ("step", "other calls")), is_quick),
)
def test_a_call_of_another_optimizer_on_one_rank_is_one_error_on_every_rank(
    route: str, layout: str, calls: str
) -> None:
    world_size, _ = ROUTES[route]
    names = [name for name in MISTAKES if (name == "step") is (calls == "step")]
    outcomes = run_workers(err, world_size, route, layout, names, timeout_s=90)
    others = ", ".join(str(rank) for rank in range(world_size) if rank != ODD_RANK)
    for number, mistake in enumerate(MISTAKES[name] for name in names):
        for first, unchanged, afterwards in (outcome[number] for outcome in outcomes):
            assert_raised(
                first,
                errors.StepMismatchError,
                f"step 1 of optimizer 0 on ranks {others}",
                f"{mistake.call} on rank {ODD_RANK}",
            )
            assert first.culprits == (ODD_RANK,)
            assert unchanged
            for later in afterwards:
                assert_raised(later, errors.ProcessGroupError)


def swap(rank: int, world_size: int) -> tuple[Caught | None, bool, int, float]:
    """Let two workers train a pair of equal layouts; rank 1 swaps the two steps in the second."""
    watch.LONG_S = 0.2
    pair = make_pair(world_size, LAYOUTS["equal layouts"], {})[:2]
    for step in range(3):
        before = [freeze_state(optimizer) for optimizer in pair]
        for optimizer in pair:
            run_backward(optimizer, rank)
        for optimizer in reversed(pair) if step == 1 and rank == ODD_RANK else pair:
            started_s = time.monotonic()
            found = caught(None, optimizer.step)
            if found is not None:
                unchanged = [freeze_state(optimizer) for optimizer in pair] == before
                return found, unchanged, step, time.monotonic() - started_s
    return None, False, 3, 0.0


def test_two_swapped_steps_of_two_workers_are_one_error_that_blames_nobody() -> None:
    for found, unchanged, step, took_s in run_workers(swap, 2):
        raised = assert_raised(
            found,
            errors.StepMismatchError,
            "step 1 of optimizer 0 on rank 0, but step 1 of optimizer 1 on rank 1",
        )
        assert (raised.culprits, unchanged, step) == ((), True, 1)
        assert took_s < STEP_TIMEOUT_S / 2


def go_on_beside(rank: int, world_size: int) -> tuple[Caught | None, Caught | None]:
    watch.LONG_S = 0.2
    pair = make_pair(world_size, LAYOUTS["equal layouts"], {})[:2]
    for optimizer in pair:
        run_backward(optimizer, rank)
    first, second = reversed(pair) if rank == ODD_RANK else pair
    return caught(first, first.step), caught(second, second.step)


def test_an_optimizer_beside_one_that_failed_is_dead_too() -> None:
    for first, second in run_workers(go_on_beside, 2):
        assert_raised(first, errors.StepMismatchError)
        assert_raised(
            second, errors.ProcessGroupError, "an optimizer on it failed .StepMismatchError"
        )


def omit_last(rank: int, world_size: int) -> tuple[Caught | None, int]:
    """Let rank 1 leave out a step of the first optimizer, before calls of the second only."""
    watch.LONG_S = 0.2
    pair = make_pair(world_size, LAYOUTS["different layouts"], {})[:2]
    for optimizer in (*pair, pair[1]) if rank == ODD_RANK else (*pair, pair[0], pair[1]):
        run_backward(optimizer, rank)
        found = caught(optimizer, optimizer.step)
        if found is not None:
            return found, optimizer.committed_step
    return None, -1


def test_an_omitted_step_is_one_error_at_the_next_call_of_the_other_optimizer() -> None:
    outcomes = run_workers(omit_last, 3)
    assert_all_raised([found for found, _ in outcomes], errors.StepMismatchError, "rank 1")
    assert [step for _, step in outcomes] == [1, 1, 1]


def train_two(rank: int, world_size: int, options: dict[str, Any], alone: bool) -> list[bytes]:
    """Train a pair in turns, or one after the other on process groups of their own."""
    group = dist.new_group(list(range(world_size)))
    assert group is not None
    states: list[bytes] = []
    pair = [make_one(n, 1e-2, group, options) for n in LAYOUTS["different layouts"]]
    order = sorted([0, 1] * 4) if alone else [0, 1] * 4
    for which in order:
        run_backward(pair[which], rank)
        pair[which].step()
    for optimizer in pair:
        states += freeze_state(optimizer)
    return states


@pytest.mark.parametrize(
    "options", in_tiers([{}, {"overlap": True, "bucket_elements": 1}], bool), ids=str
)
def test_two_optimizers_in_turns_do_what_each_does_by_itself(options: dict[str, Any]) -> None:
    in_turns = run_workers(train_two, 2, options, False)
    assert in_turns == run_workers(train_two, 2, options, True)


def make_in_another_order(rank: int, world_size: int) -> list[Caught | None]:
    """Rank 1 makes an optimizer that the others do not make, then all make one."""
    first = make_one(5, 1e-2, dist.group.WORLD, {})  # type: ignore[arg-type]
    assert first.committed_step == 0
    sizes = (7, 6) if rank == ODD_RANK else (6, 7)
    return [
        caught(None, lambda n=n: make_one(n, 1e-2, dist.group.WORLD, {}))  # type: ignore[arg-type]
        for n in sizes
    ]


def test_optimizers_made_in_another_order_are_refused_on_every_rank() -> None:
    for outcomes in zip(*run_workers(make_in_another_order, 3), strict=True):
        assert_all_raised(list(outcomes), errors.ConfigMismatchError, r"\(6,\)", r"\(7,\)")


def lose_count(rank: int, world_size: int) -> Caught | None:
    """On rank 1, let a number be missing, as after a construction that the others did not see."""
    if rank == ODD_RANK:
        watch.watch_peers(dist.group.WORLD).turns.admit(lose_count)  # type: ignore[arg-type]
    return caught(None, lambda: make_one(5, 1e-2, dist.group.WORLD, {}))  # type: ignore[arg-type]


def test_optimizers_of_different_numbers_are_refused_on_every_rank() -> None:
    assert_all_raised(
        run_workers(lose_count, 3),
        errors.ConfigMismatchError,
        "optimizer: number 0 of its process group on ranks 0, 2",
        "optimizer: number 1 of its process group on rank 1",
    )


def wait_for_long(rank: int, world_size: int) -> tuple[list[int], list[str]]:
    """Take steps in which everybody waits for longer than turns are compared after."""
    watch.LONG_S = -1.0
    pair = make_pair(world_size, LAYOUTS["equal layouts"], {})
    keeper = watch.watch_peers(pair[2])
    posted = []
    for _ in range(3):
        for optimizer in pair[:2]:
            run_backward(optimizer, rank)
            keeper.enter_exchange("a transfer")
            keeper.look()
            keeper.leave_exchange("a transfer")
            optimizer.step()
            posted.append(keeper.turns._posted)
    dist.barrier()
    left = [f"distlion/turn/{n}" for n in posted if keeper._store.check([f"distlion/turn/{n}"])]
    return [optimizer.committed_step for optimizer in pair[:2]], left


def test_slow_steps_in_order_are_no_mismatch_and_leave_one_key_in_the_store() -> None:
    for steps, left in run_workers(wait_for_long, 2):
        assert steps == [3, 3]
        assert len(left) <= 2
