"""Misuse between construction and the end of training; rows as in test_misuse_rows.py."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import nn

from cluster import run_workers
from distlion import errors, faults
from failures import (
    Caught,
    assert_all_raised,
    assert_raised,
    caught,
    make_optimizer,
    params_of,
    set_grads,
)

pytestmark = pytest.mark.distributed


def step_with_absent(rank: int, world_size: int) -> list[list[float]]:
    params = [nn.Parameter(torch.full((3,), 1.0)) for _ in range(3)]
    optimizer = make_optimizer(params, lr=0.25, weight_decay=0.5)
    params[0].grad = torch.ones(3)
    if rank != 1:
        params[1].grad = torch.ones(3)
    optimizer.step()
    return [param.tolist() for param in params]


def test_row_14_a_rank_without_a_gradient_abstains_and_the_others_decide() -> None:
    for everywhere, on_some, _ in run_workers(step_with_absent, 3):
        assert everywhere == on_some == [1.0 - 0.25 * (1 + 0.5)] * 3


def test_row_15_a_parameter_without_any_gradient_stays_and_does_not_decay() -> None:
    for _, _, nowhere in run_workers(step_with_absent, 3):
        assert nowhere == [1.0] * 3


def freeze_later(rank: int, world_size: int, ranks: tuple[int, ...]) -> tuple[Caught | None, int]:
    optimizer = make_optimizer()
    set_grads(optimizer, 0, rank)
    optimizer.step()
    optimizer.zero_grad()
    first, second = params_of(optimizer)
    second.requires_grad_(rank not in ranks)
    first.grad = torch.ones(first.shape)
    return caught(optimizer, optimizer.step), optimizer.committed_step


def test_row_16_a_parameter_frozen_later_on_one_rank_is_an_error_on_every_rank() -> None:
    outcomes = run_workers(freeze_later, 3, (1,))
    assert_all_raised(
        [found for found, _ in outcomes],
        errors.ConfigMismatchError,
        "no longer trained: second on rank 1",
    )
    assert [found.culprits for found, _ in outcomes] == [(1,)] * 3


def test_row_16_a_parameter_frozen_later_on_all_ranks_stays_where_it_is() -> None:
    assert run_workers(freeze_later, 2, (0, 1)) == [(None, 2)] * 2


def step_in_fork(rank: int, world_size: int) -> tuple[str, int]:
    optimizer = make_optimizer()
    set_grads(optimizer, 0, rank)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        found = caught(None, optimizer.step)
        del optimizer  # its connections belong to the parent
        os.write(writing, f"{found}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    optimizer.step()
    return os.read(reading, 4096).decode(), optimizer.committed_step


def test_row_24_a_step_in_a_fork_is_refused_on_every_rank_and_harms_nobody() -> None:
    for text, steps in run_workers(step_in_fork, 2):
        assert "ProcessGroupError" in text
        assert "cannot vote in its fork" in text
        assert steps == 1


def call_within_a_step(rank: int, world_size: int) -> tuple[list[Caught | None], int, int]:
    """On every rank, step and compare on a second thread while a step is under way."""
    optimizer = make_optimizer()
    found: list[Caught | None] = []

    def call_at_once(subject: object) -> None:
        for action in (optimizer.step, optimizer.verify_replicas):
            thread = threading.Thread(
                target=lambda action=action: found.append(caught(None, action))
            )
            thread.start()
            thread.join()

    fault = faults.arm(rank=rank, step=0, point="after_encode", action=call_at_once)
    set_grads(optimizer, 0, rank)
    optimizer.step()
    return found, fault.fired, optimizer.committed_step


def test_row_29_calls_on_a_second_thread_are_refused_and_the_step_goes_on() -> None:
    for found, fired, steps in run_workers(call_within_a_step, 2):
        assert (fired, steps) == (1, 1)
        for one in found:
            assert_raised(one, errors.ConcurrentCallError, "under way, on another thread")


def step_within_a_step(rank: int, world_size: int) -> tuple[Caught | None, int, int]:
    optimizer = make_optimizer()
    set_grads(optimizer, 0, rank)
    found = caught(optimizer, lambda: optimizer.step(optimizer.step))
    before = optimizer.committed_step
    optimizer.step()
    return found, before, optimizer.committed_step


def test_row_29_a_step_within_the_closure_of_a_step_is_refused() -> None:
    for found, before, after in run_workers(step_within_a_step, 2):
        assert assert_raised(found, errors.ConcurrentCallError, "closure").unchanged
        assert (before, after) == (0, 1)
