"""What every rank must do with the state of all: calls, folders, frozen parameters, estimates."""

from __future__ import annotations

import copy
import functools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distlion
from checkpoint.forging import forge_tensors
from checkpoint.runs import Worker
from cluster import run_workers
from distlion import errors
from failures import Caught, assert_all_raised, assert_raised, caught

pytestmark = pytest.mark.distributed

N_RANKS = 4
RULE = distlion.FeedbackVote()
NODES = distlion.Nodes(ranks_per_node=2)


def copy_kept(worker: Worker) -> list[torch.Tensor]:
    params = worker.model.parameters()
    return [kept.clone() for param in params for kept in worker.optimizer.state[param].values()]


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def freeze(worker: Worker) -> torch.nn.Parameter:
    param: torch.nn.Parameter = worker.model[0].weight
    param.requires_grad_(False)
    param.grad = None
    return param


def make_frozen(rank: int, **settings: Any) -> Worker:
    """Make a worker whose first parameter was frozen from the start."""
    worker = Worker(rank, **settings)
    freeze(worker)
    worker.optimizer = distlion.DistributedLion(
        worker.model.named_parameters(), lr=1e-2, **settings
    )
    worker.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(worker.optimizer, T_max=6)
    return worker


def save_into_one_folder(rank: int, folder: str) -> dict[str, Any]:
    first, second = Worker(rank, aggregation=RULE), Worker(rank, aggregation=RULE)
    for worker in (first, second):
        worker.train(0, 2)
    first.save(folder)
    found: dict[str, Any] = {"folder": caught(second.optimizer, lambda: second.save(folder))}
    second.load(folder)
    second.train(2, 3)
    second.save(folder)
    return found


def load_without_an_estimate(rank: int, folder: str) -> dict[str, Any]:
    worker = Worker(rank, aggregation=RULE)
    worker.train(0, 2)
    path = worker.save(folder)
    dist.barrier()
    if rank == 1:
        name = "worker-00001.safetensors"
        forge_tensors(path, name, lambda tensors: tensors.pop("estimate.1"))
    dist.barrier()
    return {"estimate": caught(worker.optimizer, lambda: worker.load(folder))}


def load_frozen(rank: int, folder: str, nodes: distlion.Nodes | None) -> dict[str, Any]:
    """Freeze, save, and load into optimizers that never trained the parameter, and back."""
    settings = {"aggregation": RULE, "nodes": nodes}
    worker = Worker(rank, **settings)
    worker.train(0, 2)
    freeze(worker)
    worker.train(2, 3)
    kept = copy_kept(worker)
    worker.save(folder)
    other = make_frozen(rank, **settings)
    other.load(folder)
    other.save(f"{folder}/again")
    back = Worker(rank, **settings)
    back.load(f"{folder}/again")
    found = {"checkpoint": are_equal(copy_kept(back), kept)}
    if nodes is None:
        found["frozen"] = are_equal(copy_kept(other), kept)
        state = make_frozen(rank, **settings)
        state.optimizer.load_state_dict(copy.deepcopy(worker.optimizer.state_dict()))
        found["state"] = are_equal(copy_kept(state), kept)
    back.optimizer.verify_replicas()
    return found


def hand_over_frozen(rank: int) -> dict[str, Any]:
    """Hand over by torch's functions, which leave out what is frozen where they load."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    warnings.simplefilter("ignore")
    worker = Worker(rank, aggregation=RULE)
    worker.train(0, 2)
    freeze(worker)
    kept = copy_kept(worker)
    state = get_optimizer_state_dict(worker.model, worker.optimizer)
    trained, frozen = (Worker(rank, aggregation=RULE) for _ in range(2))
    set_optimizer_state_dict(trained.model, trained.optimizer, copy.deepcopy(state))
    freeze(frozen)
    refused = caught(
        frozen.optimizer,
        lambda: set_optimizer_state_dict(frozen.model, frozen.optimizer, copy.deepcopy(state)),
    )
    return {"by torch": are_equal(copy_kept(trained), kept), "withheld": refused}


def use_state(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found = save_into_one_folder(rank, f"{folder}/one")
    found |= load_without_an_estimate(rank, f"{folder}/estimate")
    found |= load_frozen(rank, f"{folder}/frozen", None)
    found["nodes"] = load_frozen(rank, f"{folder}/nodes", NODES)["checkpoint"]
    return found | hand_over_frozen(rank)


@functools.cache
def used() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_workers(use_state, N_RANKS, folder, timeout_s=120)


def outcomes(name: str) -> list[Any]:
    return [found[name] for found in used()]


def test_the_folder_of_another_optimizer_is_refused_on_every_rank_until_it_is_loaded() -> None:
    assert_all_raised(outcomes("folder"), errors.CheckpointError, "another optimizer")


def test_an_estimate_that_one_workers_file_lacks_is_refused_on_every_rank() -> None:
    found = outcomes("estimate")
    assert_all_raised(found, errors.CheckpointError, "failed on rank 1: .*holds no 'estimate.1'")


@pytest.mark.parametrize("name", ["checkpoint", "frozen", "state", "nodes", "by torch"])
def test_what_a_frozen_parameter_had_comes_back_on_every_rank(name: str) -> None:
    assert outcomes(name) == [True] * N_RANKS


def test_what_torch_withholds_of_a_frozen_parameter_is_missed_on_every_rank() -> None:
    assert_all_raised(outcomes("withheld"), errors.CheckpointError, "leaves it out")


CALLS = {
    "save_checkpoint()": lambda worker, folder: worker.save(folder),
    "load_checkpoint()": lambda worker, folder: worker.load(folder),
    "verify_replicas()": lambda worker, folder: worker.optimizer.verify_replicas(),
    "load_state_dict()": lambda worker, folder: worker.optimizer.load_state_dict(
        worker.optimizer.state_dict()
    ),
}


def call_on_one(rank: int, world_size: int, folder: str) -> dict[str, Caught | None]:
    """Call on rank 0 alone, while the others are at a step; and once the others have left."""
    found = {}
    for name, call in CALLS.items():
        # Of its own, as the error ends all optimizers of a group.
        group = dist.new_group(list(range(world_size)))
        worker = Worker(rank, timeouts=distlion.Timeouts(step_s=20), process_group=group)
        act = functools.partial(call, worker, folder)
        found[name] = caught(None, act if rank == 0 else functools.partial(worker.train, 0, 1))
    worker = Worker(rank, timeouts=distlion.Timeouts(step_s=20))
    found["at the end"] = None if rank else caught(None, lambda: worker.save(folder))
    return found


def test_a_call_on_one_rank_alone_is_said_to_be_every_ranks(tmp_path: Path) -> None:
    for rank, found in enumerate(run_workers(call_on_one, 2, str(tmp_path / "never"))):
        for name in CALLS:
            said = f"{name} must be called by every rank".replace("(", r"\(").replace(")", r"\)")
            assert_raised(found[name], errors.ConfigMismatchError, "workers disagree: ", said)
        if rank == 0:
            said = r"save_checkpoint\(\) must be called by every rank"
            assert_raised(found["at the end"], errors.PeerLostError, said)
