"""Several optimizers, and what a framework loads with them: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distlion
from checkpoint.runs import Run
from distlion import errors
from distlion.checkpoint import Check, check_checkpoints, load_together


class Pair:
    """Two optimizers of one model, and a list for what a framework has."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
        self.voters = [distlion.VirtualCluster(each.parameters(), workers=2) for each in self.model]
        self.folders = [folder / str(number) for number in range(2)]
        self.rest = ["before"]

    def collect(self, worker: int, number: int) -> None:
        self.model(torch.full((1, 3), worker + 1.0)).square().sum().backward()
        self.voters[number].collect(worker)
        self.model.zero_grad()

    def step(self) -> None:
        for number, voter in enumerate(self.voters):
            for worker in range(2):
                self.collect(worker, number)
            voter.step()

    def save(self) -> None:
        for folder, voter in zip(self.folders, self.voters, strict=True):
            distlion.save_checkpoint(folder, self.model, voter)

    def load_rest(self, check: Check) -> str:
        check(self.folders)
        self.rest[:] = ["loaded"]
        return "rest"

    def load(self, load_rest: Callable[[Check], Any] | None = None) -> Any:
        return load_together(
            self.model,
            self.voters,
            load_rest or self.load_rest,
            self.rest,
            on_world_change="raise",
        )

    def picture(self) -> Any:
        params = [param.tolist() for param in self.model.parameters()]
        momenta = [
            [each.tolist() for worker in range(2) for each in voter.exp_avg(worker)]
            for voter in self.voters
        ]
        return params, momenta, [voter.committed_step for voter in self.voters], list(self.rest)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    pair = Pair(tmp_path)
    pair.step()
    pair.save()
    pair.step()
    return pair


def test_all_of_it_is_loaded(pair: Pair, tmp_path: Path) -> None:
    saved = Pair(tmp_path)
    saved.step()
    saved.rest[:] = ["loaded"]
    assert pair.load() == "rest"
    assert pair.picture() == saved.picture()


def test_the_first_optimizer_is_taken_back_where_the_second_one_refuses(pair: Pair) -> None:
    pair.collect(0, number=1)
    before = pair.picture()
    with pytest.raises(errors.InvalidArgumentError, match="load_state_dict"):
        pair.load()
    assert pair.picture() == before
    assert pair.voters[0].committed_step == 2


def test_nothing_is_loaded_where_the_file_of_a_second_worker_is_damaged(pair: Pair) -> None:
    path = pair.folders[1] / "step-000000000001" / "worker-00001.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    touched = []

    def load_rest(check: Check) -> None:
        check(pair.folders)
        touched.append("too early")

    before = pair.picture()
    with pytest.raises(errors.CheckpointError, match="worker-00001"):
        pair.load(load_rest)
    assert pair.picture() == before
    assert not touched


def test_a_framework_that_loads_without_a_check_is_refused(pair: Pair) -> None:
    def load_rest(check: Check) -> None:
        pair.rest[:] = ["loaded"]

    before = pair.picture()
    with pytest.raises(errors.CheckpointError, match="does not say where"):
        pair.load(load_rest)
    assert pair.picture() == before


def test_what_interrupts_a_framework_leaves_nothing_half_loaded(pair: Pair) -> None:
    def load_rest(check: Check) -> None:
        pair.load_rest(check)
        raise KeyboardInterrupt

    before = pair.picture()
    with pytest.raises(KeyboardInterrupt):
        pair.load(load_rest)
    assert pair.picture() == before


def test_files_are_checked_before_there_is_an_optimizer(tmp_path: Path) -> None:
    run = Run(workers=1)
    path = run.save(tmp_path)
    check_checkpoints(lambda: [tmp_path], on_world_change="raise")
    worker = path / "worker-00000.safetensors"
    worker.write_bytes(worker.read_bytes()[:-1])
    with pytest.raises(errors.CheckpointError, match="worker-00000"):
        check_checkpoints(lambda: [tmp_path], on_world_change="raise")
    Run(workers=4).save(tmp_path / "four")
    with pytest.raises(errors.CheckpointError, match="4 workers, and now there are 1"):
        check_checkpoints(lambda: [tmp_path / "four"], on_world_change="raise")
    check_checkpoints(lambda: [tmp_path / "four"], on_world_change="mean")
