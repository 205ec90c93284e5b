"""States of local steps of FSDP2 models that do not fit, or would lose a part, are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import distlion
from cluster import run_workers
from distlion.errors import DistlionError
from distlion.local.write_check import WriteCheck
from distlion.step.param import local_tensor
from distributed.sharded_local import AT, EVERY, N_RANKS, list_bits, make, train, train_unevenly
from distributed.sharded_models import build, digest, make_mesh, save, shard

pytestmark = pytest.mark.distributed


def change(state: dict[str, Any], **numbers: Any) -> dict[str, Any]:
    groups = [
        {**group, "local_steps": {**group["local_steps"], **numbers}}
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


def change_kinds(state: dict[str, Any]) -> dict[str, Any]:
    """Describe the inner state as a worker does that has none in the whole group."""
    entries = {index: {**entry, "inner_state": "{}"} for index, entry in state["state"].items()}
    return {**state, "state": entries}


def drop(state: dict[str, Any], key: str) -> dict[str, Any]:
    entries = {
        index: {name: value for name, value in entry.items() if name != key}
        for index, entry in state["state"].items()
    }
    return {**state, "state": entries}


def drop_numbers(state: dict[str, Any]) -> dict[str, Any]:
    groups = [
        {key: value for key, value in group.items() if key != "local_steps"}
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


REFUSED = {
    "workers": (lambda state: change(state, workers=3), "workers was 3 .* is 2 here"),
    "every": (lambda state: change(state, every=5), "votes every 5 steps"),
    "parts": (lambda state: change(state, parts=2), "was saved with parts=2"),
    "outer": (lambda state: change(state, outer=["outer_lr: 0.5"]), "outer was"),
    "rule": (lambda state: change(state, aggregation="ScaledVote()"), "aggregation was"),
    "version": (lambda state: change(state, format=2), "format was 2"),
    "late": (lambda state: change(state, late_part=0), "while a vote with delay= was under way"),
    "lost row": (lambda state: drop(state, "worker_param"), "'worker_param' was saved with"),
    "lost inner": (lambda state: drop(state, "exp_avg"), "call zero_grad.. before"),
    "lost count": (lambda state: change(state, committed_step=None), "committed_step was None"),
    "lost kinds": (change_kinds, "does not describe .*exp_avg"),
    "lost numbers": (drop_numbers, "the groups have lost 'local_steps'"),
}


def load_refused(rank: int, world_size: int) -> dict[str, Any]:
    """Load states that do not fit on rank 1, one after the other; then the good one."""
    model, optimizer = make("momentum", seed=0)
    train(model, optimizer, rank, 0, AT)
    good = optimizer.state_dict()
    other, fresh = make("momentum", seed=1)
    before, found = list_bits(other, fresh), {}
    for name, (spoil, _) in REFUSED.items():
        state = spoil(good) if rank == 1 else good
        try:
            fresh.load_state_dict(state)
        except DistlionError as error:
            unchanged = list_bits(other, fresh) == before
            found[name] = type(error).__name__, str(error), unchanged
    fresh.load_state_dict(good)
    found["good"] = list_bits(other, fresh) == list_bits(model, optimizer)
    return found


@pytest.mark.slow
def test_a_state_that_does_not_fit_on_one_rank_is_refused_on_all():
    ended = run_workers(load_refused, N_RANKS, timeout_s=120)
    for found in ended:
        for name, (_, words) in REFUSED.items():
            kind, text, unchanged = found[name]
            assert (kind, unchanged) == ("CheckpointError", True), (name, text)
            assert "refused on rank 1" in text
            assert re.search(words, text), (name, text)
        assert found["good"]


class Factored(torch.optim.SGD):
    """An inner optimizer whose state is not cut like the parameter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["row"] = torch.zeros(3, 2, 1)


def refuse_otherwise(rank: int, world_size: int) -> list[str]:
    texts = []
    model, optimizer = make("adamw", seed=0)
    try:
        distlion.save_checkpoint("/nonexistent", model, optimizer)
    except DistlionError as error:
        texts.append(f"{type(error).__name__}: {error}")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    train(model, optimizer, rank, 0, 1)
    try:
        get_optimizer_state_dict(model, optimizer, options=flat)
    except NotImplementedError as error:
        texts.append(str(error))
    mesh = make_mesh(2, 2)
    inner = Factored(model.parameters(), lr=1e-2)
    factored = distlion.LocalSteps(inner, process_group=mesh["replicate"].get_group())
    factored.step()
    try:
        factored.state_dict()
    except DistlionError as error:
        texts.append(f"{type(error).__name__}: {error}")
    # A model's weights that are loaded last are one worker's, which would be lost for the other.
    state = get_optimizer_state_dict(model, optimizer)
    weights = {key: value * 1 for key, value in model.state_dict().items()}
    if rank >= 2:
        weights = {key: value + 1 for key, value in weights.items()}
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    try:
        train(model, optimizer, rank, 1, EVERY)
    except DistlionError as error:
        texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_what_would_lose_state_is_refused():
    for saved_here, flat, factored, written in run_workers(refuse_otherwise, N_RANKS):
        assert saved_here.startswith("UnsupportedTypeError")
        assert "holds the state of all workers" in saved_here
        assert "only supports" in flat
        assert factored.startswith("UnsupportedTypeError")
        assert "'row' is a tensor of shape (3, 2, 1)" in factored
        assert written.startswith("StepInputError")
        assert "was written to" in written


def write_to_one_element(rank: int, world_size: int) -> tuple[int, list[bool]]:
    """Write beside the sample of a sharded parameter, as loading weights does, and then not."""
    mesh = init_device_mesh("cpu", (world_size,))
    param = nn.Parameter(distribute_tensor(torch.randn(40, 70), mesh, [Shard(0)]))
    before = param.detach().clone()
    changed = before.clone()
    changed.to_local()[0, 1] += 1
    found = []
    for values in (before, changed):
        start = WriteCheck([param], [before])
        with torch.no_grad():
            param.copy_(values)
        found.append(bool(start.list_written()))
    return local_tensor(param)._version, found


def test_a_counted_write_to_one_element_of_a_shard_is_found():
    for shard_version, found in run_workers(write_to_one_element, 2):
        assert shard_version == 0  # so that only the DTensor's own count shows it
        assert found == [False, True]


def make_groups(seed: int) -> tuple[nn.Module, Any]:
    """A model whose first parameter has a param group of its own."""
    mesh = make_mesh(2, 2)
    model = shard(build(seed), mesh["shard"])
    first, *others = model.parameters()
    inner = torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=1e-2)
    return model, distlion.LocalSteps(inner, process_group=mesh["replicate"].get_group())


def save_a_group_that_a_worker_never_trained(rank: int, world_size: int, path: str) -> str:
    model, optimizer = make_groups(seed=0)
    train_unevenly(model, optimizer, rank)
    try:
        save(model, optimizer, path)
    except CheckpointException as error:
        return str(error)
    return "saved"


@pytest.mark.slow
def test_inner_state_that_one_worker_cannot_describe_is_not_saved(tmp_path):
    for text in run_workers(save_a_group_that_a_worker_never_trained, N_RANKS, str(tmp_path)):
        assert "optim.state.0.weight.exp_avg invalid fill" in text


def count_steps(rank: int, world_size: int) -> list[Any]:
    """torch takes steps of an optimizer without state, to create it."""
    found = []
    for case in ("adamw", "sgd"):
        model, optimizer = make(case, seed=0, every=1)
        weights = digest(model)
        for _ in range(2):
            get_optimizer_state_dict(model, optimizer)
        found.append((optimizer.local_step, optimizer.committed_step, digest(model) == weights))
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # the first step of a warmup
        train(model, optimizer, rank, 0, 1)
        found.append((optimizer.local_step, optimizer.committed_step))
    return found


def test_steps_by_which_torch_creates_state_do_not_count():
    for found in run_workers(count_steps, N_RANKS):
        assert found == [(0, 0, True), (1, 1)] * 2
