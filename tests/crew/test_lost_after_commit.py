"""A worker is lost after a commit; each call that needs all members asks to be made again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
from cluster import WorkerDiedError
from crews import await_members, await_true, draw_loss, host_store, make_crew, make_model, start
from distlion import faults
from distlion.errors import CrewError, StepError
from local_crews import bits, connect

pytestmark = pytest.mark.distributed

STRUCK_AT = 3
"""The step, or the vote, that is committed before a worker is lost."""


class Run:
    """A worker that votes in each step, or every second one."""

    def __init__(self, crew: distlion.Crew, rank: int, kind: str, folder: str) -> None:
        self.crew, self.model, self.folder = crew, make_model(rank), folder
        self.model.register_buffer("seen", torch.full((3,), float(rank)))
        settings: dict[str, Any] = {
            "timeouts": distlion.Timeouts(step_s=4),
            "replicas": distlion.Replicas(check_every=1),
        }
        self.optimizer: Any
        if kind == "votes":
            self.optimizer = crew.optimizer(self.model.named_parameters(), lr=1e-2, **settings)
        else:
            inner = torch.optim.AdamW(self.model.named_parameters(), lr=1e-2)
            self.optimizer = crew.local_steps(inner, every=2, **settings)

    def train(self, goal: int) -> None:
        while self.optimizer.committed_step < goal:
            draw_loss(self.model, self.optimizer.committed_step, self.crew.rank).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Return the calls that need all members."""
        model, optimizer, state = self.model, self.optimizer, self.optimizer.state_dict()
        return {
            "save_checkpoint": partial(distlion.save_checkpoint, self.folder, model, optimizer),
            "load_checkpoint": partial(distlion.load_checkpoint, self.folder, model, optimizer),
            "verify_replicas": optimizer.verify_replicas,
            "load_state_dict": partial(optimizer.load_state_dict, state),
            "add_param_group": partial(
                optimizer.add_param_group, {"params": [("added", nn.Parameter(torch.ones(2)))]}
            ),
            "average_buffers": partial(distlion.average_buffers, model, timeout_s=4),
        }

    def tensors(self) -> Iterable[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]


def make_calls(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Make each call; return the error of each that failed."""
    failed = {}
    for name, call in calls.items():
        try:
            call()
        except StepError as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def lose_one(rank: int, size: int, port: int, kind: str, folder: str) -> Any:
    store, crew = connect(port), make_crew(port, min_workers=2, max_workers=size)
    with crew:
        run = Run(crew, rank, kind, folder)
        while crew.size < size:
            await_members(crew, size)
            run.train(run.optimizer.committed_step + 1)
        run.train(STRUCK_AT)
        distlion.save_checkpoint(folder, run.model, run.optimizer)

        def act(_: object) -> None:
            store.add("committed", 1)
            await_true(lambda: store.add("committed", 0) == size)
            if crew.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        at = run.optimizer.committed_step
        fault = faults.arm(rank=crew.rank, step=at, point="after_commit", action=act)
        run.train(at + 1)
        assert (fault.fired, run.optimizer.committed_step) == (1, at + 1)
        before = bits(run.tensors())
        failed = make_calls(run.calls())
        assert bits(run.tensors()) == before
        run.train(at + 2)
        assert crew.size == size - 1
        later = make_calls(run.calls())
        run.train(at + 4)
    with pytest.raises(CrewError, match="has left its crew"):  # it would save as if it were alone
        distlion.save_checkpoint(folder, run.model, run.optimizer)
    return failed, later, bits(run.tensors())


@pytest.mark.parametrize("kind", ["votes", "local steps"])
def test_each_call_after_a_loss_asks_to_be_made_again(kind: str, tmp_path: Any) -> None:
    store = host_store()
    results = start(lose_one, 3, store.port, kind, str(tmp_path / "saved"), may_die=True)
    (dead,) = [each for each in results if isinstance(each, WorkerDiedError)]
    results.remove(dead)
    for failed, later, end in results:
        assert len(failed) == 6
        for name, said in failed.items():
            assert said.startswith("PeerLostError: ")
            assert name in said
            # Buffers have no optimizer: their call finds the loss by itself.
            assert "The next step() forms an epoch" in said or name == "average_buffers"
        assert not later
        assert end == results[0][2]
