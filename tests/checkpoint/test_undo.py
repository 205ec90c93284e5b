"""What is put back after an error, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, SequentialSampler

from distlion.checkpoint.undo import all_or_nothing


class Failed(Exception):
    """Ends what is tried."""


def fail_after(change: Callable[[], Any], *kept: Any) -> None:
    """Change something that is kept, then fail."""
    with suppress(Failed), all_or_nothing(*kept):
        change()
        raise Failed


class WithMore(torch.nn.Module):
    """Has state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(2, 2), [1]
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_modules_have_their_own_tensors_and_extra_state_again() -> None:
    model = WithMore()
    weight, before = model.linear.weight, model.linear.weight.detach().clone()

    def change() -> None:
        state = {**WithMore().state_dict(), "_extra_state": [2]}
        model.load_state_dict(state, assign=True)
        model.hidden.fill_(1.0)

    fail_after(change, [model])
    assert model.linear.weight is weight and torch.equal(weight, before)
    assert model.seen == [1] and not model.hidden.any()


def test_what_was_not_changed_is_not_written() -> None:
    tensor = torch.zeros(2)
    version = tensor._version
    fail_after(tensor.sum, tensor)
    assert tensor._version == version


def test_samplers_are_restored_and_data_is_not_copied() -> None:
    data = [1, 2, 3]
    sampler = SequentialSampler(data)
    loader = DataLoader(data, sampler=sampler)
    fixed = np.zeros(2)
    fixed.flags.writeable = False

    def change() -> None:
        sampler.data_source = [4]
        data.append(4)

    fail_after(change, loader, fixed)
    assert sampler.data_source is data
    assert data == [1, 2, 3, 4]


def test_chains_and_cycles_of_any_length_are_kept() -> None:
    first: list[Any] = []
    last = first
    for _ in range(10_000):
        last.append([])
        last = last[0]
    last.append(first)
    fail_after(last.clear, first)
    assert last[0] is first


def test_nothing_is_put_back_where_nothing_failed() -> None:
    tensor = torch.zeros(2)
    with all_or_nothing(tensor):
        tensor.fill_(1.0)
    assert tensor.all()
