"""A parameter that is frozen during training keeps its momentum and its estimate, saved or not."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
from checkpoint.forging import PROCESS, forge_manifest, forge_tree
from distlion.checkpoint import contents
from distlion.checkpoint.folder import read_manifest
from distlion.errors import CheckpointError

RULES = [distlion.MajorityVote(), distlion.FeedbackVote()]
EVERY = pytest.mark.parametrize("rule", RULES, ids=repr)
LOADERS = pytest.mark.parametrize("loader", ["trained", "frozen later", "frozen from the start"])


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.linspace(-1, 1, n)) for n in (70, 5))


class Case:
    """Two virtual workers, or a real one alone, and two parameters."""

    def __init__(self, kind: str, rule: Any, *, is_frozen: bool = False) -> None:
        self.model = Body()
        self.model.first.requires_grad_(not is_frozen)
        settings = {"lr": 1e-2, "aggregation": rule}
        named = self.model.named_parameters()
        self.optimizer: Any = (
            distlion.VirtualCluster(named, workers=2, **settings)
            if kind == "virtual"
            else distlion.DistributedLion(named, **settings)
        )
        self.is_virtual = kind == "virtual"

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            for worker in range(2 if self.is_virtual else 1):
                for number, param in enumerate(self.model.parameters()):
                    if param.requires_grad:
                        generator = torch.Generator().manual_seed(100 * step + 10 * worker + number)
                        param.grad = torch.randn(param.shape, generator=generator)
                if self.is_virtual:
                    self.optimizer.collect(worker)
            self.optimizer.step()

    def freeze(self) -> None:
        self.model.first.requires_grad_(False)
        self.model.first.grad = None

    def kept(self, param: Tensor) -> dict[str, Tensor]:
        return {key: kept.clone() for key, kept in self.optimizer.state[param].items()}


def make_saved(kind: str, rule: Any) -> Case:
    case = Case(kind, rule)
    case.train(0, 3)
    case.freeze()
    case.train(3, 4)
    return case


def make_loader(kind: str, rule: Any, loader: str) -> Case:
    case = Case(kind, rule, is_frozen=loader == "frozen from the start")
    if loader == "frozen later":
        case.train(0, 1)
        case.freeze()
    return case


def assert_same(case: Case, other: Case) -> None:
    pairs = zip(case.model.parameters(), other.model.parameters(), strict=True)
    for param, its in pairs:
        kept, found = case.kept(param), other.kept(its)
        assert kept["exp_avg"].any() and ("estimate" in kept) == keeps_estimates(case)
        assert kept.keys() == found.keys()
        assert all(torch.equal(kept[key], found[key]) for key in kept)


def keeps_estimates(case: Case) -> bool:
    return bool(case.optimizer.param_groups[0]["aggregation"].worker_state)


@EVERY
@LOADERS
@pytest.mark.parametrize("kind", ["virtual", "alone"])
def test_what_a_frozen_parameter_had_comes_back(
    tmp_path: Path, kind: str, loader: str, rule: Any
) -> None:
    case = make_saved(kind, rule)
    distlion.save_checkpoint(tmp_path, case.model, case.optimizer)
    by_checkpoint, by_state = (make_loader(kind, rule, loader) for _ in range(2))
    distlion.load_checkpoint(tmp_path, by_checkpoint.model, by_checkpoint.optimizer)
    by_state.optimizer.load_state_dict(copy.deepcopy(case.optimizer.state_dict()))
    for found in (by_checkpoint, by_state):
        assert_same(case, found)
    # And is saved from there.
    distlion.save_checkpoint(tmp_path / "again", by_checkpoint.model, by_checkpoint.optimizer)
    again = Case(kind, rule)
    distlion.load_checkpoint(tmp_path / "again", again.model, again.optimizer)
    assert_same(case, again)


@pytest.mark.parametrize("kind", ["virtual", "alone"])
def test_a_parameter_that_was_frozen_at_a_load_goes_on_with_its_bits(
    tmp_path: Path, kind: str
) -> None:
    """Unfreezing takes a new optimizer, as all workers agree on what is trained."""
    rule = distlion.FeedbackVote()
    whole = Case(kind, rule)
    whole.train(0, 3)
    saved = copy.deepcopy(whole.optimizer.state_dict())
    frozen = Case(kind, rule, is_frozen=True)
    frozen.optimizer.load_state_dict(saved)
    frozen.model.load_state_dict(whole.model.state_dict())
    distlion.save_checkpoint(tmp_path, frozen.model, frozen.optimizer)
    unfrozen = Case(kind, rule)
    distlion.load_checkpoint(tmp_path, unfrozen.model, unfrozen.optimizer)
    for case in (whole, unfrozen):
        case.train(3, 5)
    assert_same(whole, unfrozen)
    assert all(map(torch.equal, whole.model.parameters(), unfrozen.model.parameters()))


def test_a_lion_that_loads_beside_a_frozen_parameter_goes_on_with_its_bits() -> None:
    def step(lion: distlion.Lion, model: Body, seed: int) -> None:
        for param in model.parameters():
            generator = torch.Generator().manual_seed(seed)
            if param.requires_grad:
                param.grad = torch.randn(param.shape, generator=generator)
        lion.step()

    model, other = Body(), Body()
    lion = distlion.Lion(model.parameters(), lr=1e-2)
    step(lion, model, 0)
    other.first.requires_grad_(False)
    again = distlion.Lion(other.parameters(), lr=1e-2)
    again.load_state_dict(copy.deepcopy(lion.state_dict()))
    other.load_state_dict(model.state_dict())
    other.first.requires_grad_(True)
    step(lion, model, 1)
    step(again, other, 1)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@EVERY
def test_a_folder_stays_that_of_an_optimizer_that_freezes_a_parameter(
    tmp_path: Path, rule: Any
) -> None:
    case = Case("virtual", rule)
    case.train(0, 3)
    distlion.save_checkpoint(tmp_path, case.model, case.optimizer)
    case.freeze()
    case.train(3, 4)
    distlion.save_checkpoint(tmp_path, case.model, case.optimizer)


@EVERY
@pytest.mark.parametrize("kind", ["virtual", "alone"])
def test_a_parameter_that_never_had_a_momentum_begins_with_zeros(
    tmp_path: Path, kind: str, rule: Any
) -> None:
    case = Case(kind, rule, is_frozen=True)
    case.train(0, 2)
    distlion.save_checkpoint(tmp_path, case.model, case.optimizer)
    other = Case(kind, rule)
    other.train(0, 1)
    distlion.load_checkpoint(tmp_path, other.model, other.optimizer)
    assert not any(kept.any() for kept in other.kept(other.model.first).values())
    found, expected = other.kept(other.model.second), case.kept(case.model.second)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    other.train(2, 3)


@pytest.mark.parametrize("kind", ["virtual", "alone"])
def test_a_state_without_what_a_frozen_parameter_had_is_refused(kind: str) -> None:
    """As torch's ``set_optimizer_state_dict`` hands it over."""
    case = make_saved(kind, distlion.FeedbackVote())
    before = case.kept(case.model.first)
    state = copy.deepcopy(case.optimizer.state_dict())
    del state["state"][0]
    with pytest.raises(
        CheckpointError, match=r"parameter 0 of group 0 has no momentum.*leaves it out"
    ):
        case.optimizer.load_state_dict(state)
    found = case.kept(case.model.first)
    assert all(torch.equal(found[key], before[key]) for key in before)


def test_a_checkpoint_of_format_1_has_momenta_that_it_did_not_list(tmp_path: Path) -> None:
    case = make_saved("virtual", distlion.FeedbackVote())
    path = distlion.save_checkpoint(tmp_path, case.model, case.optimizer).wait()

    def unlist(tree: dict[str, Any]) -> None:
        tree["layout"][0][3] = None
        del tree["division"]
        layout = hashlib.sha256(repr(tree["layout"]).encode()).hexdigest()
        forge_manifest(path, format=1, identity="", layout=layout)

    forge_tree(path, unlist)
    assert PROCESS in read_manifest(path).files
    other = Case("virtual", distlion.FeedbackVote())
    distlion.load_checkpoint(tmp_path, other.model, other.optimizer)
    assert_same(case, other)


def test_a_momentum_of_another_dtype_is_refused_though_the_parameter_is_frozen(
    tmp_path: Path,
) -> None:
    case = make_saved("virtual", distlion.MajorityVote())
    distlion.save_checkpoint(tmp_path, case.model, case.optimizer)
    other = Case("virtual", distlion.MajorityVote(), is_frozen=True)
    other.optimizer._precision = distlion.Precision(exp_avg=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"momentum in torch\.float32"):
        distlion.load_checkpoint(tmp_path, other.model, other.optimizer)


def test_what_is_left_out_is_not_copied_for_a_save_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    copy_all = contents._copy

    def note(tensors: Any) -> Any:
        copied.extend(tensors)
        return copy_all(tensors)

    monkeypatch.setattr(contents, "_copy", note)
    case = Case("virtual", distlion.MajorityVote(), is_frozen=True)
    case.optimizer = distlion.VirtualCluster([case.model.second], workers=2)
    for only_trained in (False, True):
        copied.clear()
        pending = distlion.save_checkpoint(
            tmp_path, case.model, case.optimizer, async_=True, only_trained=only_trained
        )
        pending.wait()
        assert ("first" in copied) != only_trained
        assert "second" in copied
    other = Case("virtual", distlion.MajorityVote(), is_frozen=True)
    other.optimizer = distlion.VirtualCluster([other.model.second], workers=2)
    distlion.load_checkpoint(tmp_path, other.model, other.optimizer)
