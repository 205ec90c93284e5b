"""Momenta beside a framework's file: at every time, the file's own are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distlion
from distlion.integrations.companion import find_votes, name_companion, saving_votes


class Script:
    """A model whose momenta are saved beside a file."""

    def __init__(self, path: Path) -> None:
        self.path, self.model = path, torch.nn.Linear(3, 2)
        self.voter = distlion.DistributedLion(self.model.parameters())
        self.barriers = 0

    def train(self) -> None:
        self.model(torch.ones(1, 3)).sum().backward()
        self.voter.step()

    def wait(self) -> None:
        self.barriers += 1

    def save(self, write: Callable[[dict[str, Any]], Any]) -> None:
        checkpoint: dict[str, Any] = {}
        voters = {"voter": self.voter}
        with saving_votes(checkpoint, self.path, self.model, voters, barrier=self.wait):
            write(checkpoint)

    def write(self, checkpoint: dict[str, Any]) -> None:
        torch.save(checkpoint, self.path)

    def load(self) -> int:
        """Load what the file names; return its step."""
        folders = find_votes(torch.load(self.path, weights_only=True), self.path)
        return distlion.load_checkpoint(folders["voter"], self.model, self.voter).step

    def kept(self) -> list[str]:
        return sorted(path.name for path in name_companion(self.path).glob("0/step-*"))


def fail(checkpoint: dict[str, Any]) -> None:
    raise OSError("no space left on device")


@pytest.fixture
def script(tmp_path: Path) -> Script:
    script = Script(tmp_path / "last.ckpt")
    script.train()
    script.save(script.write)
    return script


def test_files_that_could_not_be_written_leave_the_momenta_of_the_one_that_is_there(
    script: Script,
) -> None:
    for _ in range(3):
        script.train()
        with pytest.raises(OSError, match="no space"):
            script.save(fail)
    assert script.load() == 1


def test_a_file_that_is_written_later_still_has_its_momenta_until_then(script: Script) -> None:
    later: list[dict[str, Any]] = []
    script.train()
    script.save(later.append)
    assert script.load() == 1
    script.write(later[0])
    assert script.load() == 2


def test_earlier_momenta_are_removed_when_all_ranks_know_of_the_file(script: Script) -> None:
    for _ in range(3):
        script.train()
        script.save(script.write)
    assert script.kept() == ["step-000000000003", "step-000000000004"]
    assert script.barriers == 4
    assert script.load() == 4
