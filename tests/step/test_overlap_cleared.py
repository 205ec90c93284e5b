"""Overlap keeps no gradients of a step that an error has ended."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crews import await_true
from distlion.step import overlap as overlap_module
from distlion.step.overlap import Overlap


class HeldBucket:
    """A bucket whose load waits until the test lets it go on."""

    def __init__(self) -> None:
        self.params: list[Any] = []
        self.device = torch.device("cpu")
        self.may_load = threading.Event()
        self.loads, self.is_loaded = 0, False

    def load(self, inputs: object) -> None:
        self.may_load.wait(10)
        self.is_loaded = True
        self.loads += 1

    def cast(self, inputs: object, completion: object) -> Any:
        raise RuntimeError("nothing is sent in this test")

    def clear(self) -> None:
        self.is_loaded = False


class Beginner:
    """Stands in for the optimizer, which gathers inputs."""

    def begin(self) -> Any:
        return SimpleNamespace()


def test_bucket_that_loads_after_an_error_of_the_main_thread_is_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, buckets = Beginner(), [HeldBucket(), HeldBucket()]
    made = Overlap(begin=owner.begin, lifecycle=SimpleNamespace(is_dead=False))  # type: ignore[arg-type]
    made.take(buckets, waits=False)  # type: ignore[arg-type]

    def fail(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(overlap_module.Overlap, "_make_completion", fail)
    with pytest.raises(MemoryError):
        made.finish(SimpleNamespace())  # type: ignore[arg-type]
    for bucket in buckets:
        bucket.clear()  # as the step does in any case
        bucket.may_load.set()
    await_true(lambda: buckets[0].loads == 1)
    await_true(lambda: not buckets[0].is_loaded)
