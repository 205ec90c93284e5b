"""A checkpoint of a model inside a wrapper loads without it, and the other way round."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import distlion
from distlion.checkpoint.contents import collect
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


class Fused(nn.Module):
    """A model whose state has two halves of one weight, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.both = nn.Parameter(torch.rand(4, 3))
        self.register_buffer("scale", torch.rand(2))
        self.register_state_dict_post_hook(type(self).split)
        self.register_load_state_dict_pre_hook(type(self).join)

    @staticmethod
    def split(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        both = state.pop(f"{prefix}both")
        state[f"{prefix}first"], state[f"{prefix}second"] = both[:2], both[2:]

    @staticmethod
    def join(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        halves = state.pop(f"{prefix}first"), state.pop(f"{prefix}second", torch.zeros(2, 3))
        state.pop(f"{prefix}row", None)
        state[f"{prefix}both"] = torch.cat(halves)


class Halved(Fused):
    """The same, of whose weight the state has one half."""

    @staticmethod
    def split(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        state[f"{prefix}first"] = state.pop(f"{prefix}both")[:2]


class Doubled(Fused):
    """The same, of whose weight the state has the first half twice, in part."""

    @staticmethod
    def split(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        both = state.pop(f"{prefix}both")
        state[f"{prefix}first"], state[f"{prefix}row"] = both[:2], both[1:3]


class Copied(Fused):
    """The same, of whose weight the state has a copy, transposed."""

    @staticmethod
    def split(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        state[f"{prefix}turned"] = state.pop(f"{prefix}both").T.contiguous()

    @staticmethod
    def join(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        state[f"{prefix}both"] = state.pop(f"{prefix}turned").T


class Strided(nn.Module):
    """A model with a weight that is a part of a larger tensor, and a transposed one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.part = nn.Parameter(torch.rand(4, 7)[:, 2:5])
        self.turned = nn.Parameter(torch.rand(5, 3).T)
        self.register_buffer("scale", torch.rand(2))


class Renamed(Strided):
    """The same, whose state has other names."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.register_state_dict_post_hook(type(self).rename)
        self.register_load_state_dict_pre_hook(type(self).name_back)

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        for name in ("part", "turned"):
            state[f"{prefix}my_{name}"] = state.pop(f"{prefix}{name}")

    @staticmethod
    def name_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name in ("part", "turned"):
            state[f"{prefix}{name}"] = state.pop(f"{prefix}my_{name}")


def wrap_inside(model: nn.Module) -> nn.Module:
    """Wrap a layer as activation checkpointing does: its state has the layer's own names."""
    model.module = checkpoint_wrapper(model.module)  # type: ignore[assignment]
    return model


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


MODELS: dict[str, Callable[[int], nn.Module]] = {
    **{name: lambda seed, wrap=wrap: wrap(Tied(seed)) for name, wrap in WRAPPERS.items()},  # type: ignore[misc]
    "checkpointed": lambda seed: wrap_inside(Tied(seed)),
    "fused": Fused,
    "halved": Halved,
    "doubled": Doubled,
    "copied": Copied,
    "strided": Strided,
    "renamed": Renamed,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("options", [{}, {"async_": True}])
def test_trained_weights_are_saved_under_whatever_name(
    tmp_path: Path, make: Callable[[int], nn.Module], options: dict[str, Any]
) -> None:
    one, other = make(1), make(2)
    for mine, theirs in zip(other.buffers(), one.buffers(), strict=True):
        mine.copy_(theirs)  # is not trained, and so not saved
    clusters = [make_cluster(model, nn.Parameter(torch.zeros(()))) for model in (one, other)]
    distlion.save_checkpoint(tmp_path, one, clusters[0], only_trained=True, **options).wait()
    distlion.load_checkpoint(tmp_path, other, clusters[1])
    for mine, theirs in zip(other.parameters(), one.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_weights_that_votes_keep_equal_are_known_under_whatever_name(
    make: Callable[[int], nn.Module],
) -> None:
    model, temperature = make(1), nn.Parameter(torch.zeros(()))
    cluster = make_cluster(model, temperature)
    contents = collect(model, cluster, None, None, cluster.momentum_ownership)
    others = contents.model.keys() - contents.replicated
    unknown = {"turned"} if isinstance(model, Copied) else set()  # no part of any weight
    assert {name.rpartition(".")[2] for name in others} == {"scale"} | unknown
    assert {name.rpartition(".")[2] for name in contents.untrained} == {"scale"}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_common_point_is_saved_under_whatever_name(
    make: Callable[[int], nn.Module],
) -> None:
    model = make(1)
    local = distlion.LocalSteps(torch.optim.SGD(model.parameters(), lr=1.0), every=2)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    local.step()  # between two votes
    votes = local.outer_optimizer
    contents = collect(model, votes, None, None, votes.momentum_ownership, local)
    for name, value in contents.model.items():
        is_known = name in start and name in contents.replicated
        assert not is_known or torch.equal(value, start[name]), name
    assert {name for name in start if not torch.equal(model.state_dict()[name], start[name])}


def test_weights_of_another_optimizer_are_saved_with_what_is_trained(tmp_path: Path) -> None:
    one, other = Tied(1), Tied(2)
    other.scale.copy_(one.scale)
    votes = [distlion.VirtualCluster(each.module.parameters(), workers=2) for each in (one, other)]
    distlion.save_checkpoint(tmp_path, one, votes[0], only_trained=True)
    distlion.load_checkpoint(tmp_path, other, votes[1])
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


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
