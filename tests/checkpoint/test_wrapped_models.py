"""A checkpoint of a model inside a wrapper loads without it, and the other way round."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distlion
from distlion.checkpoint.reader import find_wrappers
from distlion.errors import CheckpointError


class Tied(nn.Module):
    """A model with a tied weight, a buffer, and one part whose name is a wrapper's too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.module = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)
        self.head.weight = self.module.weight
        self.register_buffer("scale", torch.rand(2))


class Forward(nn.Module):
    """A wrapper whose state has the model's names, and whose parameters have longer ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._forward_module = model

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self._forward_module.state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return self._forward_module.load_state_dict(*args, **options)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda model: model,
    "compiled": torch.compile,  # type: ignore[dict-item]
    "parallel": nn.DataParallel,
    "fabric": Forward,
    "both": lambda model: torch.compile(nn.DataParallel(model)),  # type: ignore[return-value]
}


def make_cluster(model: nn.Module, temperature: nn.Parameter) -> distlion.VirtualCluster:
    return distlion.VirtualCluster([*model.parameters(), temperature], workers=2)


@pytest.mark.parametrize(("saved", "loaded"), list(itertools.product(WRAPPERS, repeat=2)))
def test_a_checkpoint_loads_whatever_is_around_the_model(
    tmp_path: Path, saved: str, loaded: str
) -> None:
    one, other = Tied(1), Tied(2)
    inside, outside = WRAPPERS[saved](one), WRAPPERS[loaded](other)
    temperatures = [nn.Parameter(torch.tensor(each)) for each in (7.0, -1.0)]
    distlion.save_checkpoint(tmp_path, inside, make_cluster(inside, temperatures[0]))
    distlion.load_checkpoint(tmp_path, outside, make_cluster(outside, temperatures[1]))
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert float(temperatures[1].detach()) == 7.0


def test_the_names_of_another_model_are_refused_as_before(tmp_path: Path) -> None:
    model, another = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    wrapped = nn.DataParallel(model)
    temperature = nn.Parameter(torch.zeros(()))
    distlion.save_checkpoint(tmp_path, wrapped, make_cluster(wrapped, temperature))
    with pytest.raises(CheckpointError, match=r"was 0\.weight .* and is 1\.weight"):
        distlion.load_checkpoint(tmp_path, another, make_cluster(another, temperature))


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], ""),
        (["weight", "module.bias"], ""),
        (["module.weight", "module.bias"], "module."),
        (["_orig_mod.module.a", "_orig_mod.module.b"], "_orig_mod.module."),
        (["modules.a"], ""),
        (["module." * 9 + "a"], "module." * 8),
    ],
)
def test_only_words_before_every_name_are_a_wrappers(names: list[str], found: str) -> None:
    assert find_wrappers(names) == found
