"""What a checkpoint says in two places must agree, though every sum does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distlion
from checkpoint.forging import Tensors, forge_manifest, forge_tensors, forge_tree
from checkpoint.runs import Run
from distlion.errors import CheckpointError

STEP = 2
WORKER = "worker-00002.safetensors"


def make() -> Run:
    return Run(aggregation=distlion.FeedbackVote())


def list_kept(run: Run) -> list[torch.Tensor]:
    entries = run.optimizer.state.values()
    return [kept.clone() for entry in entries for kept in entry.values()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = make()
    run.train(0, STEP)
    return run.save(tmp_path)


def of_worker(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    return lambda folder: forge_tensors(folder, WORKER, change)


def of_tree(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: forge_tree(folder, change)


def set_in_group(tree: dict[str, Any], key: str, value: Any) -> None:
    pairs = tree["groups"][0]["items"]
    next(pair for pair in pairs if pair[0] == key)[1] = value


def halve(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensors[name].bfloat16()})


FORGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no estimate": (of_worker(lambda tensors: tensors.pop("estimate.1")), "holds no 'estimate.1'"),
    "no momentum": (of_worker(lambda tensors: tensors.pop("exp_avg.1")), "holds no 'exp_avg.1'"),
    "a momentum of another dtype": (of_worker(halve("exp_avg.1")), "momentum 1 is torch.bfloat16"),
    "an estimate of another dtype": (
        of_worker(halve("estimate.1")),
        "estimate.1 is torch.bfloat16; expected torch.float32",
    ),
    "a step of the manifest": (
        lambda folder: forge_manifest(folder, step=STEP + 5),
        f"is at step {STEP}, and the manifest of .* at step {STEP + 5}",
    ),
    "a step of the groups": (of_tree(lambda tree: set_in_group(tree, "step", 9)), "is at step 9"),
    "parameters of the manifest": (
        lambda folder: forge_manifest(folder, layout="0" * 64),
        "lists other parameters than the manifest",
    ),
    "a parameter without a momentum": (
        of_tree(lambda tree: tree["layout"][1].__setitem__(3, None)),
        "lists other parameters than the manifest",
    ),
    "sizes of groups": (of_tree(lambda tree: tree.update(division=[2, 3])), "1 groups of .2, 3."),
    "no sizes of groups": (of_tree(lambda tree: tree.pop("division")), "malformed.*division"),
} | {
    f"step {number!r}": (
        of_tree(lambda tree, number=number: set_in_group(tree, "step", number)),
        "step",
    )
    for number in ("abc", None, -3, 2.5, 2**70)
}


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("on_world_change", ["raise", "mean"])
def test_what_disagrees_is_refused_and_nothing_is_changed(
    folder: Path, name: str, on_world_change: Any
) -> None:
    spoil, match = FORGED[name]
    spoil(folder)
    run = Run(4 if on_world_change == "raise" else 3, aggregation=distlion.FeedbackVote())
    run.train(0, 1)
    before, kept = run.tensors(), list_kept(run)
    with pytest.raises(CheckpointError, match=match):
        run.load(folder, on_world_change=on_world_change)
    assert run.equals(before) and all(map(torch.equal, kept, list_kept(run)))


def test_a_parameter_outside_of_the_model_must_have_the_shape_that_is_listed(
    tmp_path: Path,
) -> None:
    model, loose = nn.Linear(3, 2), nn.Parameter(torch.full((4,), 7.0))
    cluster = distlion.VirtualCluster([*model.parameters(), loose], workers=2)
    path = distlion.save_checkpoint(tmp_path, model, cluster).wait()

    def widen(tensors: Tensors) -> None:
        tensors["parameter outside of the model: 2"] = torch.ones(1)

    forge_tensors(path, "model-00000.safetensors", widen)
    with pytest.raises(
        CheckpointError, match=r"outside of the model: 2 is \(1,\).*expected \(4,\)"
    ):
        distlion.load_checkpoint(path, model, cluster)
    assert torch.equal(loose.detach(), torch.full((4,), 7.0))
