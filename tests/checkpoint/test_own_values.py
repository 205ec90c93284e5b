"""Checkpoints give each parameter its own values, go where they are told, and load whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import distlion
from distlion.errors import CheckpointError


def make(order: Sequence[int], *, seed: int) -> tuple[nn.Module, distlion.LocalSteps]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(2)))
    params = list(model.parameters())
    inner = torch.optim.AdamW([params[place] for place in order], lr=1e-2)
    return model, distlion.LocalSteps(inner, every=2)


def train(model: nn.Module, optimizer: distlion.LocalSteps, n_steps: int) -> None:
    for _ in range(n_steps):
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_weights_of_one_shape_are_never_exchanged(tmp_path: Path) -> None:
    model, optimizer = make([0, 1], seed=0)
    train(model, optimizer, 3)
    distlion.save_checkpoint(tmp_path, model, optimizer)
    other, exchanged = make([1, 0], seed=1)
    before = [param.detach().clone() for param in other.parameters()]
    with pytest.raises(CheckpointError, match=r"parameter 0 of the inner optimizer was 0\.weight"):
        distlion.load_checkpoint(tmp_path, other, exchanged)
    assert all(map(torch.equal, other.parameters(), before))
    again, same = make([0, 1], seed=1)
    distlion.load_checkpoint(tmp_path, nn.DataParallel(again), same)
    assert all(map(torch.equal, again.parameters(), model.parameters()))


class Masked(torch.optim.SGD):
    """An optimizer with a state that is None."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param]["mask"] = None


def test_a_value_that_is_none_comes_back_with_all_others(tmp_path: Path) -> None:
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Linear(3, 3, bias=False)
        optimizer = distlion.LocalSteps(Masked(model.parameters(), lr=0.1, momentum=0.9), every=4)
        if seed:
            distlion.load_checkpoint(tmp_path, model, optimizer)
        else:
            train(model, optimizer, 1)
            distlion.save_checkpoint(tmp_path, model, optimizer)
        states.append(optimizer.inner.state[model.weight])
    assert states[1]["mask"] is None
    assert torch.equal(states[0]["momentum_buffer"], states[1]["momentum_buffer"])


@pytest.mark.parametrize("path", ["s3://bucket/run", "file:///tmp/run"])
def test_an_address_is_no_folder(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = make([0, 1], seed=0)
    for call in (distlion.save_checkpoint, distlion.check_checkpoint_folder):
        with pytest.raises(CheckpointError, match="is an address"):
            call(path, model, optimizer)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_somebody_puts_into_an_old_checkpoint_does_not_make_it_new(
    tmp_path: Path,
) -> None:
    model, optimizer = make([0, 1], seed=0)
    for n_votes in range(3):
        train(model, optimizer, 2)
        distlion.save_checkpoint(tmp_path, model, optimizer, keep_last=2)
        if not n_votes:
            (first,) = tmp_path.glob("step-*")
        if first.exists():
            (first / "eval.json").write_text("{}")
    assert not first.exists()
    assert len(list(tmp_path.glob("step-*"))) == 2


def test_a_checkpoint_in_a_folder_that_may_not_be_listed_is_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make([0, 1], seed=0)
    train(model, optimizer, 4)
    distlion.save_checkpoint(tmp_path, model, optimizer)
    (folder,) = tmp_path.glob("step-*")

    def refuse(path: object = ".") -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("distlion.checkpoint.folder.os.scandir", refuse)
    other, again = make([0, 1], seed=1)
    assert distlion.load_checkpoint(folder, other, again).step == 2
    assert again.committed_step == 2
    assert all(map(torch.equal, other.parameters(), model.parameters()))
