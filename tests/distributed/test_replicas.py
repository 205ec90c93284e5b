"""Replicas that differ are found, and the rank and parameter are named."""

from __future__ import annotations

import io
import logging
import random
from typing import Any

import pytest
import torch

from cluster import run_workers
from distlion import Replicas, errors
from failures import (
    Caught,
    assert_all_raised,
    assert_raised,
    caught,
    make_optimizer,
    params_of,
    set_grads,
)
from tiers import in_tiers

pytestmark = pytest.mark.distributed


def drift(
    rank: int, world_size: int, check_every: int | None, verify: bool
) -> tuple[int, Caught | None]:
    """Rank 1's second parameter changes by one ulp after step 3."""
    optimizer = make_optimizer(replicas=Replicas(check_every=check_every))
    for step in range(8):
        set_grads(optimizer, step, rank)
        found = caught(None, optimizer.step)
        if found is not None:
            return step, found
        if step == 3 and rank == 1:
            p = params_of(optimizer)[1]
            p.data[5] = torch.nextafter(p.data[5], torch.tensor(9.0))
    return 8, caught(optimizer, optimizer.verify_replicas) if verify else None


@pytest.mark.parametrize("world_size", in_tiers([3, 5], lambda n: n == 3))
def test_verify_replicas_names_rank_and_parameter(world_size: int) -> None:
    outcomes = run_workers(drift, world_size, None, True)
    assert_all_raised(
        [found for _, found in outcomes], errors.ReplicaMismatchError, "second", r"\b1\b"
    )
    for _, found in outcomes:
        assert found.culprits == (1,)


def test_verify_replicas_of_two_workers_names_the_parameter() -> None:
    outcomes = run_workers(drift, 2, None, True)
    assert_all_raised([found for _, found in outcomes], errors.ReplicaMismatchError, "second")


@pytest.mark.parametrize("check_every", [1, 3])
def test_replicas_that_differ_are_found_at_the_next_check(check_every: int) -> None:
    for step, found in run_workers(drift, 3, check_every, False):
        assert 3 < step <= 3 + check_every
        assert_raised(found, errors.ReplicaMismatchError, "second", r"\b1\b")


def drift_late(rank: int, world_size: int) -> dict[str, tuple[int, Caught | None]]:
    """Change rank 1's parameter after the first step, or after the first step after a load."""
    found = {}
    for case, options in {
        "start": {},
        "hundred": {"replicas": Replicas(check_every=200)},
        "load": {},
        "every 7": {"replicas": Replicas(check_every=7)},
        "never": {"replicas": Replicas(check_every=None)},
    }.items():
        optimizer, change_after = make_optimizer(**options), 1
        if case == "hundred":
            change_after = 10
        if case == "load":
            for step in range(12):
                set_grads(optimizer, step, rank)
                optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            change_after = 13
        found[case] = 0, None
        while found[case][1] is None and optimizer.committed_step < 115:
            if optimizer.committed_step == change_after and rank == 1:
                params_of(optimizer)[1].data[5] += 1
            set_grads(optimizer, 3, rank)
            caught_here = caught(None, optimizer.step)
            found[case] = optimizer.committed_step, caught_here
    return found


def test_a_change_after_the_first_step_is_found_10_or_100_steps_after_the_first() -> None:
    for found in run_workers(drift_late, 3):
        assert {case: step for case, (step, _) in found.items()} == {
            "start": 10,
            "hundred": 100,
            "load": 22,
            "every 7": 7,
            "never": 115,
        }
        assert found.pop("never")[1] is None
        for _, raised in found.values():
            assert_raised(raised, errors.ReplicaMismatchError, "second", r"\b1\b")


def test_equal_replicas_verify() -> None:
    assert run_workers(verify_equal, 3) == [None] * 3


def verify_equal(rank: int, world_size: int) -> None:
    optimizer = make_optimizer()
    for step in range(3):
        set_grads(optimizer, step, rank)
        optimizer.step()
        optimizer.verify_replicas()


def load_other_weights(rank: int, world_size: int) -> Caught | None:
    """Weights loaded after construction, differently on rank 2."""
    optimizer = make_optimizer()
    params_of(optimizer)[0].data.fill_(0.25 if rank == 2 else 0.125)
    set_grads(optimizer, 0, rank)
    return caught(optimizer, optimizer.step)


def test_weights_that_differ_at_the_first_step_are_an_error_on_every_rank() -> None:
    outcomes = run_workers(load_other_weights, 3)
    assert_all_raised(outcomes, errors.ReplicaMismatchError, "first", r"\b2\b")


def flip_bits(rank: int, world_size: int, tries: int) -> list[str]:
    """Flip one bit of one parameter on one rank, compare, and flip it back, again and again."""
    optimizer = make_optimizer()
    chance = random.Random(0)
    missed = []
    for number in range(tries):
        victim = chance.randrange(world_size)
        param = chance.choice(params_of(optimizer))
        name = optimizer._param_names()[param]
        words = param.data.view(-1).view(torch.int32)
        place, bit = chance.randrange(len(words)), chance.randrange(32)
        mask = torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
        if rank == victim:
            words[place] ^= mask
        found = caught(optimizer, optimizer.verify_replicas)
        if rank == victim:
            words[place] ^= mask
        named = found is not None and found.culprits == (victim,) and name in found.text
        if not named:
            missed.append(f"{number}: bit {bit} of {name} on rank {victim}: {found}")
    optimizer.verify_replicas()
    return missed


@pytest.mark.parametrize("tries", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_flipped_bit_of_a_parameter_is_found_and_rank_and_parameter_named(tries: int) -> None:
    assert run_workers(flip_bits, 3, tries) == [[]] * 3


def drift_and_repair(rank: int, world_size: int) -> tuple[Any, int, str]:
    """One element of one parameter changes on rank 1, two parameters on rank 2."""
    heard = io.StringIO()
    logging.getLogger("distlion").addHandler(logging.StreamHandler(heard))
    optimizer = make_optimizer(replicas=Replicas(check_every=2, on_mismatch="repair"))
    momenta = []
    for step in range(4):
        set_grads(optimizer, step, rank)
        if step == 1:
            momenta = [state["exp_avg"].clone() for state in optimizer.state.values()]
            params = params_of(optimizer)
            if rank == 1:
                params[1].data[5] += 1
            if rank == 2 and world_size > 3:
                params[0].data[0] += 1
                params[1].data[6] += 1
        found = caught(None, optimizer.step)
        if found is not None:
            return found, optimizer.committed_step, heard.getvalue()
    assert momenta
    optimizer.verify_replicas()
    return bits_of(params_of(optimizer)), optimizer.committed_step, heard.getvalue()


def bits_of(tensors: list[torch.nn.Parameter]) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def undisturbed(rank: int, world_size: int) -> list[bytes]:
    optimizer = make_optimizer()
    for step in range(4):
        set_grads(optimizer, step, rank)
        optimizer.step()
    return bits_of(params_of(optimizer))


@pytest.mark.parametrize(
    ("world_size", "ranks"),
    in_tiers([(3, "rank 1"), (5, "ranks 1, 2")], lambda case: case[0] == 3),
)
def test_what_differs_is_repaired_from_the_majority_where_asked_for(
    world_size: int, ranks: str
) -> None:
    expected = run_workers(undisturbed, world_size)
    for rank, (found, steps, heard) in enumerate(run_workers(drift_and_repair, world_size)):
        assert found == expected[rank]
        assert steps == 4
        assert "second" in heard and f"repaired on {ranks}, from rank 0" in heard


def test_two_workers_have_no_majority_to_repair_from() -> None:
    for found, _, _ in run_workers(drift_and_repair, 2):
        assert_raised(found, errors.ReplicaMismatchError, "second", "no majority")
