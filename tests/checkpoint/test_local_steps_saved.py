"""Checkpoints of workers with local steps: saved inside of a period, resumed, remapped, refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
from checkpoint.forging import forge_tree
from checkpoint.runs import make_model
from cluster import WorkerDiedError, run_workers
from distlion import faults
from distlion.errors import CheckpointError, PeerLostError
from local_runs import EVERY, are_equal
from tiers import in_tiers

AT, STEPS = EVERY + 1, 3 * EVERY + 1
KINDS: dict[str, dict[str, Any]] = {
    "residuals, momentum": {
        "aggregation": distlion.ResidualVote(2),
        "outer_momentum": 0.9,
        "outer_lr": 0.5,
        "nesterov": True,
    },
    "estimates": {"aggregation": distlion.EstimateVote()},
    "scales": {"aggregation": distlion.ScaledVote()},
}


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=1e-2)


class LocalWorker:
    """A model, local steps with a schedule, and their checkpoints."""

    def __init__(
        self,
        rank: int,
        dtype: torch.dtype = torch.float32,
        make_inner: Callable[[nn.Module], Any] = make_adamw,
        **options: Any,
    ) -> None:
        self.rank = rank
        self.model = make_model().to(dtype)
        self.inner = make_inner(self.model)
        self.optimizer = distlion.LocalSteps(self.inner, **{"every": EVERY, **options})
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS)

    def train(self, start: int, stop: int) -> LocalWorker:
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(100 * step + self.rank)
            dtype = next(self.model.parameters()).dtype
            batch = torch.randn(8, 9, generator=generator).to(dtype)
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    def save(self, path: Path | str, **options: Any) -> Path:
        everything = (self.model, self.optimizer, self.scheduler)
        return distlion.save_checkpoint(path, *everything, **options).wait()

    def load(self, path: Path | str, **options: Any) -> Any:
        everything = (self.model, self.optimizer, self.scheduler)
        return distlion.load_checkpoint(path, *everything, **options)

    def own(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]

    def tensors(self) -> list[Tensor]:
        """Copy all that a run goes on from."""
        found = [*self.model.state_dict().values(), *self.optimizer.common_point]
        found += self.optimizer.outer_buffers
        for entries in (self.optimizer.state, self.optimizer.outer_optimizer.state):
            found += [value for entry in entries.values() for value in entry.values()]
        return [torch.as_tensor(each).detach().clone() for each in found]


def resume(rank: int, world_size: int, folder: str) -> list[str]:
    """Interrupt a run of each kind; return those that differ from an uninterrupted one."""
    wrong = []
    for number, (name, options) in enumerate(KINDS.items()):
        dtype = torch.bfloat16 if name == "estimates" else torch.float32
        whole = LocalWorker(rank, dtype, **options).train(0, STEPS)
        path = (
            LocalWorker(rank, dtype, **options)
            .train(0, AT)
            .save(f"{folder}/{number}", async_=number == 0)
        )
        second = LocalWorker(rank, dtype, **options).train(0, 1)
        loaded = second.load(path)
        own = second.optimizer
        counts = (loaded.step, loaded.local_step, own.local_step, own.committed_step)
        votes = AT // EVERY
        if counts != (votes, AT, AT, votes):
            wrong.append(f"{name}: {counts}")
        if not are_equal(second.train(AT, STEPS).tensors(), whole.tensors()):
            wrong.append(name)
    return wrong


@pytest.mark.distributed
def test_workers_resume_inside_of_a_period_to_the_bits_of_an_uninterrupted_run(
    tmp_path: Path,
) -> None:
    assert run_workers(resume, 3, str(tmp_path)) == [[]] * 3


def die_in_a_vote(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> str:
    """Save inside of a period; rank 1 is killed in the next vote."""
    worker = LocalWorker(rank, **options).train(0, AT)
    worker.save(folder)
    if rank == 1:
        faults.arm(rank=1, step=1, point="framed", action=lambda subject: die())
    try:
        worker.train(AT, STEPS)
    except PeerLostError as error:
        return str(error)
    return "nothing"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def start_again(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> bool:
    """Load the newest checkpoint of a run that was killed; compare its end with a whole run."""
    whole = LocalWorker(rank, **options).train(0, STEPS)
    worker = LocalWorker(rank, **options)
    loaded = worker.load(folder)
    assert loaded.local_step == AT
    return are_equal(worker.train(AT, STEPS).tensors(), whole.tensors())


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind", in_tiers(["residuals, momentum", "scales"], lambda kind: kind != "scales")
)
def test_a_killed_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path: Path, kind: str) -> None:
    first, victim, third = run_workers(die_in_a_vote, 3, str(tmp_path), KINDS[kind], may_die=True)
    assert isinstance(victim, WorkerDiedError)
    assert "rank 1" in first and "rank 1" in third
    assert run_workers(start_again, 3, str(tmp_path), KINDS[kind]) == [True] * 3


def test_a_single_worker_resumes_too(tmp_path: Path) -> None:
    assert resume(0, 1, str(tmp_path)) == []


def save(rank: int, world_size: int, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    worker = LocalWorker(rank, aggregation=distlion.ResidualVote()).train(0, AT)
    worker.save(folder)
    return worker.own(), worker.optimizer.common_point


def load(
    rank: int, world_size: int, folder: str, rule: Any
) -> tuple[list[Tensor], list[Tensor], list[Tensor], int]:
    worker = LocalWorker(rank, aggregation=distlion.ResidualVote())
    worker.load(folder, on_world_change=rule)
    own, common = worker.own(), [each.clone() for each in worker.optimizer.common_point]
    momenta = [entry["exp_avg"].clone() for entry in worker.optimizer.state.values()]
    worker.train(AT, STEPS)
    worker.optimizer.verify_replicas()
    return own, common, momenta, worker.optimizer.committed_step


@pytest.mark.distributed
@pytest.mark.parametrize("rule", in_tiers(["map", "mean", "reset"], lambda rule: rule == "map"))
def test_another_number_of_workers_begins_by_the_rule_of_momenta(tmp_path: Path, rule: str) -> None:
    saved = run_workers(save, 4, str(tmp_path))
    for rank, (own, common, momenta, votes) in enumerate(run_workers(load, 2, str(tmp_path), rule)):
        assert are_equal(common, saved[0][1])
        assert votes == STEPS // EVERY
        assert bool(momenta) == (rule != "reset")
        chosen = {"map": saved[2 * rank : 2 * rank + 2], "mean": saved}.get(rule)
        for index, value in enumerate(own):
            expected = common[index]
            if chosen is not None:
                expected = torch.stack([each[0][index].double() for each in chosen]).mean(0)
            # Sums of at most four float32 numbers in float64, rounded once.
            assert torch.allclose(value.double(), expected.double(), rtol=1e-6, atol=1e-7)


def load_apart(rank: int, world_size: int, folder: str) -> tuple[str, int]:
    worker = LocalWorker(rank).train(0, 1)
    try:
        worker.load(folder)
    except CheckpointError as error:
        return str(error), worker.optimizer.local_step
    return "", worker.optimizer.local_step


def add(key: str, value: Any, *more: tuple[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Add numbers that earlier versions saved."""
    return lambda tree: tree["local"]["items"].extend(map(list, ((key, value), *more)))


def change_steps(tree: dict[str, Any]) -> None:
    for pair in tree["local"]["items"]:
        if pair[0] == "local_step":
            pair[1] += EVERY


@pytest.mark.distributed
def test_workers_that_were_at_different_steps_are_loaded_on_none(tmp_path: Path) -> None:
    run_workers(save, 2, str(tmp_path))
    (folder,) = tmp_path.glob("step-*")
    forge_tree(folder, change_steps)
    for text, counts in run_workers(load_apart, 2, str(tmp_path)):
        assert "the local steps that were saved differ from rank 0's" in text
        assert counts == 1


def test_the_model_is_saved_as_the_common_point_has_it(tmp_path: Path) -> None:
    worker = LocalWorker(0, outer_lr=0.5).train(0, AT)
    path = worker.save(tmp_path)
    other = make_model()
    common = dict(zip(other.parameters(), worker.optimizer.common_point, strict=True))
    votes = distlion.LocalSteps(
        torch.optim.AdamW(other.named_parameters()), every=EVERY, outer_lr=0.5
    )
    distlion.load_checkpoint(path, other, votes, on_world_change="raise")
    assert are_equal(votes.common_point, common.values())
    assert are_equal(other.parameters(), worker.model.parameters())
    assert not are_equal(other.parameters(), common.values())


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    saved = LocalWorker(0).train(0, AT)
    path = saved.save(tmp_path)
    cases: list[tuple[str, Any, Any]] = [
        ("votes every 3 steps", {"every": EVERY + 1}, None),
        ("outer_momentum was saved with the shapes", {"outer_momentum": 0.9}, None),
        ("was saved with parts=2", {}, add("parts", 2)),
        ("while a vote with delay= was under way", {}, add("parts", 1, ("late_part", 0))),
        ("without local steps", {}, lambda tree: tree.pop("local")),
        ("malformed", {}, lambda tree: tree.update(local=7)),
    ]
    for words, options, change in cases:
        if change is not None:
            forge_tree(path, change)
        worker = LocalWorker(0, **options).train(0, 2)
        before, counts = worker.tensors(), worker.optimizer.local_step
        with pytest.raises(CheckpointError, match=words):
            worker.load(path)
        assert are_equal(worker.tensors(), before)
        assert worker.optimizer.local_step == counts


def test_what_cannot_be_loaded_at_the_end_puts_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = LocalWorker(0, outer_momentum=0.9).train(0, AT).save(tmp_path)
    worker = LocalWorker(0, outer_momentum=0.9).train(0, EVERY + 2)
    before = worker.tensors()

    def fail(state: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(worker.optimizer.outer_optimizer, "load_state_dict", fail)
    with pytest.raises(RuntimeError, match="no room"):
        worker.load(path)
    monkeypatch.undo()
    assert are_equal(worker.tensors(), before)
    assert worker.optimizer.local_step == EVERY + 2
    worker.train(EVERY + 2, STEPS)
