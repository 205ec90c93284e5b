"""Checkpoints of local steps whose inner optimizers orthogonalize: resumed, remapped, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
from checkpoint.test_local_steps_saved import AT, STEPS, LocalWorker, make_adamw
from cluster import run_workers
from distlion.errors import CheckpointError
from local_runs import EVERY, are_equal, needs_muon
from tiers import in_tiers

pytestmark = [pytest.mark.distributed, needs_muon]


def split(model: nn.Module) -> tuple[list[Any], list[Any]]:
    named = [*model.named_parameters()]
    return [each for each in named if each[1].ndim == 2], [e for e in named if e[1].ndim != 2]


def make_lion(model: nn.Module) -> distlion.Lion:
    matrices, others = split(model)
    groups = [{"params": matrices, "orthogonalize": True}, {"params": others, "cautious": True}]
    return distlion.Lion(groups, lr=1e-3)


def make_muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = split(model)
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


def make_muon_and_lion(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = split(model)
    return [torch.optim.Muon(matrices, lr=1e-2), distlion.Lion(others, lr=1e-2)]


def make_swapped(model: nn.Module) -> list[torch.optim.Optimizer]:
    return make_muon_and_adamw(model)[::-1]


INNERS = {"orthogonalizing lion": make_lion, "muon and adamw": make_muon_and_adamw}
KINDS: dict[str, dict[str, Any]] = {
    "residuals": {"aggregation": distlion.ResidualVote(2), "outer_momentum": 0.9},
    "scales": {},
}


def resume(rank: int, world_size: int, folder: str) -> list[str]:
    """Interrupt runs, one of them before its first step; return those that end differently."""
    wrong = []
    # Each inner optimizer once, and each kind of votes.
    for (name, make_inner), (kind, options) in zip(INNERS.items(), KINDS.items(), strict=True):
        whole = LocalWorker(rank, make_inner=make_inner, **options).train(0, STEPS)
        for at in (0, AT):
            first = LocalWorker(rank, make_inner=make_inner, **options).train(0, at)
            path = first.save(f"{folder}/{name}-{kind}-{at}".replace(" ", "-"))
            second = LocalWorker(rank, make_inner=make_inner, **options).train(0, 1)
            second.load(path)
            if not are_equal(second.train(at, STEPS).tensors(), whole.tensors()):
                wrong.append(f"{name}, {kind}, at {at}")
    return wrong


def test_runs_resume_to_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    assert run_workers(resume, 3, str(tmp_path)) == [[]] * 3


Found = dict[str, tuple[list[Tensor], list[Tensor], list[Tensor]]]


def list_momenta(worker: LocalWorker) -> list[Tensor]:
    """List the momentum of each parameter, whatever its optimizer calls it."""
    keys = ("momentum_buffer", "exp_avg")
    entries = [worker.optimizer.state.get(each, {}) for each in worker.model.parameters()]
    return [entry[key].clone() for entry in entries for key in keys if key in entry]


def save(rank: int, world_size: int, folder: str) -> Found:
    found = {}
    for name, make_inner in INNERS.items():
        worker = LocalWorker(rank, make_inner=make_inner).train(0, AT)
        worker.save(f"{folder}/{name[:4]}")
        found[name] = worker.own(), worker.optimizer.common_point, list_momenta(worker)
    return found


def load(rank: int, world_size: int, folder: str, rule: Any) -> Found:
    found = {}
    for name, make_inner in INNERS.items():
        worker = LocalWorker(rank, make_inner=make_inner)
        worker.load(f"{folder}/{name[:4]}", on_world_change=rule)
        common = [each.clone() for each in worker.optimizer.common_point]
        found[name] = worker.own(), common, list_momenta(worker)
        worker.train(AT, STEPS)
        worker.optimizer.verify_replicas()
    return found


@pytest.mark.parametrize("rule", in_tiers(["map", "mean", "reset"], lambda rule: rule == "mean"))
def test_another_number_of_workers_begins_by_the_rule_of_momenta(tmp_path: Path, rule: str) -> None:
    saved = run_workers(save, 4, str(tmp_path))
    for rank, loaded in enumerate(run_workers(load, 2, str(tmp_path), rule)):
        for name, (own, common, momenta) in loaded.items():
            chosen = {"map": saved[2 * rank : 2 * rank + 2], "mean": saved}.get(rule)
            assert are_equal(common, saved[0][name][1])
            if chosen is None:
                # Lion's momenta are made with it; others have none before a step.
                assert not any(each.any() for each in momenta)
                continue
            assert len(momenta) == len(saved[0][name][2]) > 0
            for place, values in ((0, own), (2, momenta)):
                for index, value in enumerate(values):
                    rows = [each[name][place][index].double() for each in chosen]
                    expected = torch.stack(rows).mean(0)
                    # Sums of at most four float32 numbers in float64, rounded once.
                    assert torch.allclose(value.double(), expected, rtol=1e-6, atol=1e-7)


CHANGED: dict[str, tuple[Any, Any, str]] = {
    "another order": (make_muon_and_adamw, make_swapped, "parameter 0 of the optimizer was"),
    "another optimizer": (
        make_muon_and_adamw,
        make_muon_and_lion,
        r"belong to inner optimizers 0 \(Muon\), 1 \(AdamW\), and this optimizer's to inner opt",
    ),
    "one": (make_muon_and_adamw, make_adamw, "and this optimizer's to one inner optimizer"),
    "several": (make_adamw, make_muon_and_adamw, "belong to one inner optimizer with 1 groups"),
}


@pytest.mark.parametrize(("make_first", "make_second", "words"), CHANGED.values(), ids=CHANGED)
def test_a_checkpoint_of_other_inner_optimizers_changes_nothing(
    tmp_path: Path, make_first: Any, make_second: Any, words: str
) -> None:
    path = LocalWorker(0, make_inner=make_first).train(0, AT).save(tmp_path)
    worker = LocalWorker(0, make_inner=make_second).train(0, 2)
    before = worker.tensors()
    with pytest.raises(CheckpointError, match=words):
        worker.load(path)
    assert are_equal(worker.tensors(), before)


def test_what_the_second_optimizer_cannot_load_puts_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = LocalWorker(0, make_inner=make_muon_and_adamw).train(0, AT).save(tmp_path)
    worker = LocalWorker(0, make_inner=make_muon_and_adamw).train(0, EVERY + 2)
    before = worker.tensors()

    def fail(state: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(worker.optimizer.outer_optimizer, "load_state_dict", fail)
    with pytest.raises(RuntimeError, match="no room"):
        worker.load(path)
    monkeypatch.undo()
    assert are_equal(worker.tensors(), before)
    whole = LocalWorker(0, make_inner=make_muon_and_adamw).train(0, STEPS)
    assert are_equal(worker.train(EVERY + 2, STEPS).tensors(), whole.tensors())
