"""States that earlier releases saved load today; ``released/save.py`` has saved them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import distlion
from checkpoint.released.save import OPTIMIZERS, list_tensors, make_model, set_grads
from cluster import run_workers

pytestmark = pytest.mark.distributed

RELEASED = Path(__file__).parent / "released"
RELEASES = sorted(path.name for path in RELEASED.iterdir() if (path / "VERSION").is_file())


def differ(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) != len(expected) or not all(map(torch.equal, found, expected))


def load(rank: int, world_size: int, release: str) -> list[str]:
    """Load a worker's checkpoints and states; return what differs from what was saved."""
    wrong, folder = [], RELEASED / release
    for name, make in OPTIMIZERS.items():
        expected: dict[str, list[Tensor]] = torch.load(folder / f"{name}-{rank}-expected.pt")
        model = make_model()
        optimizer: Any = make(model)
        distlion.load_checkpoint(folder / name, model, optimizer)
        if differ([param.detach() for param in model.parameters()], expected["params"]):
            wrong.append(f"{name}: parameters")
        if differ(list_tensors(optimizer), expected["state"]):
            wrong.append(f"{name}: state of a checkpoint")
        set_grads(model, rank, 3)
        optimizer.step()  # training goes on

        optimizer = make(make_model())
        optimizer.load_state_dict(torch.load(folder / f"{name}-{rank}.pt"))
        if differ(list_tensors(optimizer), expected["state"]):
            wrong.append(f"{name}: state by itself")
    return wrong


@pytest.mark.parametrize("release", RELEASES)
def test_states_of_earlier_releases_load(release: str) -> None:
    assert run_workers(load, 2, release) == [[], []]


def test_there_is_a_release_to_load() -> None:
    assert "0.1.0" in RELEASES
