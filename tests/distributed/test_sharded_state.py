"""Momenta of sharded parameters: every worker's, through torch's own formats."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Shard

import distlion
from cluster import run_workers
from distlion.errors import CheckpointError, DistlionError
from distlion.integrations.fsdp import disable_all_reduce
from distributed.sharded_models import (
    build,
    digest,
    load,
    make_mesh,
    make_optimizer,
    run_backward,
    save,
    shard,
)
from tiers import in_tiers

pytestmark = pytest.mark.distributed

N_RANKS = 4


def digest_momenta(optimizer: distlion.DistributedLion) -> list[bytes]:
    return [
        kept.numpy().tobytes()
        for group in optimizer.param_groups
        for param in group["params"]
        for kept in optimizer.state[param].values()
    ]


def make(form: str, mesh: Any, seed: int) -> tuple[nn.Module, distlion.DistributedLion]:
    """Make a model on the shard dim alone, or on both dims of a mesh; perhaps error feedback."""
    model = shard(build(seed), mesh["shard"] if form == "1D" else mesh)
    if form == "1D":
        return model, make_optimizer(model, mesh)
    disable_all_reduce(model)
    options = {"aggregation": distlion.FeedbackVote()} if form == "feedback" else {}
    return model, make_optimizer(model, mesh, process_group=None, **options)


def save_and_load(rank: int, world_size: int, form: str, path: str) -> dict[str, Any]:
    mesh = make_mesh(2, world_size // 2)
    model, optimizer = make(form, mesh, seed=0)
    for step in range(3):
        run_backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
    exp_avg = optimizer.state_dict()["state"][0]["exp_avg"]
    found: dict[str, Any] = {"shape": tuple(exp_avg.shape), "placements": str(exp_avg.placements)}
    save(model, optimizer, path)
    saved = digest_momenta(optimizer), digest(model)

    other, loaded = make(form, mesh, seed=1)
    load(other, loaded, path)
    found["back"] = (digest_momenta(loaded), digest(other)) == saved
    found["step"] = loaded.committed_step
    for each, its in ((model, optimizer), (other, loaded)):
        run_backward(each, 3, rank)
        its.step()
        its.zero_grad()
    present = digest_momenta(optimizer)
    found["goes on"] = (digest_momenta(loaded), digest(other)) == (present, digest(model))

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_optimizer_state_dict(model, optimizer, options=whole)
    found["full"] = {
        name: tuple(entry["exp_avg"].shape) for name, entry in full.get("state", {}).items()
    }
    other, loaded = make(form, mesh, seed=2)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, loaded, full, options=from_first)
    found["full is back"] = digest_momenta(loaded) == present

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    other, loaded = make(form, mesh, seed=3)
    state = get_optimizer_state_dict(model, optimizer, options=flat)
    set_optimizer_state_dict(other, loaded, state, options=flat)
    found["flat is back"] = digest_momenta(loaded) == present

    plain = optimizer.state_dict()
    entries = plain["state"].items()
    stacked = {
        key: {name: kept.full_tensor() for name, kept in entry.items()} for key, entry in entries
    }
    other, loaded = make(form, mesh, seed=4)
    loaded.load_state_dict({**plain, "state": stacked})
    found["stacked is back"] = digest_momenta(loaded) == present

    of_three = {
        key: {"exp_avg": torch.zeros(3, *entry["exp_avg"].shape[1:])} for key, entry in entries
    }
    try:
        loaded.load_state_dict({**plain, "state": of_three})
    except CheckpointError as error:
        found["of three"] = str(error)
    found["unchanged"] = digest_momenta(loaded) == present
    return found


@functools.cache
def saved(form: str, folder: str) -> list[dict[str, Any]]:
    return run_workers(save_and_load, N_RANKS, form, f"{folder}/{form}", timeout_s=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("dcp"))


@pytest.mark.parametrize("form", in_tiers(["1D", "2D", "feedback"], lambda form: form == "2D"))
class TestFormats:
    def test_momenta_are_dtensors_with_the_workers_in_front(self, form, folder):
        for found in saved(form, folder):
            assert found["shape"] == (2, 13, 7)
            assert found["placements"] == "(Shard(dim=0), Shard(dim=1))"
        assert saved(form, folder)[0]["full"]["0.weight"] == (2, 13, 7)

    @pytest.mark.parametrize(
        "what", ["back", "goes on", "full is back", "flat is back", "stacked is back"]
    )
    def test_every_worker_has_its_own_momenta_again(self, form, folder, what):
        assert [found[what] for found in saved(form, folder)] == [True] * N_RANKS

    def test_the_step_is_that_of_the_save(self, form, folder):
        assert [found["step"] for found in saved(form, folder)] == [3] * N_RANKS

    def test_momenta_of_another_number_of_workers_are_refused(self, form, folder):
        for found in saved(form, folder):
            assert "saved momentum has shape (3, 13, 7)" in found["of three"]
            assert found["unchanged"]


def load_on_fewer(rank: int, world_size: int, path: str) -> tuple[list[bytes], list[bytes], int]:
    mesh = make_mesh(2, 1)
    model, optimizer = make("2D", mesh, seed=5)
    load(model, optimizer, path)
    return digest_momenta(optimizer), digest(model), optimizer.committed_step


def gather_saved(rank: int, world_size: int, path: str) -> tuple[list[bytes], list[bytes]]:
    """Return this worker's whole momenta and parameters, as they were saved."""
    mesh = make_mesh(2, 2)
    model, optimizer = make("2D", mesh, seed=6)
    load(model, optimizer, path)
    voter = mesh["replicate"].get_local_rank()
    state = optimizer.state_dict()["state"]
    momenta = [entry["exp_avg"].full_tensor()[voter] for entry in state.values()]
    params = [param.full_tensor() for param in model.parameters()]
    return tuple(
        [tensor.detach().numpy().tobytes() for tensor in each] for each in (momenta, params)
    )


@pytest.mark.slow
def test_two_shards_are_loaded_as_one(folder):
    path = f"{folder}/2D"
    if not Path(path).exists():
        saved("2D", folder)
    whole = run_workers(gather_saved, N_RANKS, path)
    one = run_workers(load_on_fewer, 2, path)
    for worker in range(2):
        momenta, params, step = one[worker]
        assert (momenta, params) == whole[2 * worker]
        assert step == 3
    assert one[0][0] != one[1][0]


def load_with_a_fault(rank: int, world_size: int, fault: str) -> tuple[str, str, bool, bool]:
    """Load momenta that take all ranks to cut anew, after a try in which rank 1's did not fit."""
    mesh = make_mesh(2, 2)
    model, optimizer = make("1D", mesh, seed=0)
    run_backward(model, 0, rank)
    optimizer.step()
    saved, state = digest_momenta(optimizer), optimizer.state_dict()
    anew = {key: {"exp_avg": cut_anew(entry)} for key, entry in state["state"].items()}
    good = {**state, "state": anew}
    bad = copy.deepcopy(good)
    if rank == 1:
        FAULTS[fault](bad)

    _, fresh = make("1D", mesh, seed=1)
    before = digest_momenta(fresh), fresh.committed_step
    kind = text = ""
    try:
        fresh.load_state_dict(bad)
    except DistlionError as error:
        kind, text = type(error).__name__, str(error)
    is_unchanged = (digest_momenta(fresh), fresh.committed_step) == before
    if kind == "CheckpointError":
        fresh.load_state_dict(good)
    return kind, text, is_unchanged, digest_momenta(fresh) == saved


def cut_anew(entry: dict[str, Any]) -> torch.Tensor:
    exp_avg = entry["exp_avg"]
    return exp_avg.redistribute(exp_avg.device_mesh, [Shard(1), Shard(0)])


FAULTS = {
    "a rule": lambda state: state["param_groups"][0].update(aggregation="Nonsense()"),
    "a shape": lambda state: state["state"][3].update(exp_avg=torch.zeros(99)),
    "a whole momentum": lambda state: state["state"][3].update(exp_avg=torch.zeros(5)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "text", "goes_on"),
    [
        ("a rule", "CheckpointError", "refused on rank 1", True),
        ("a shape", "CheckpointError", "refused on rank 1", True),
        ("a whole momentum", "ConfigMismatchError", "momentum of parameter 3 of group 0", False),
    ],
)
def test_a_state_that_does_not_fit_on_one_rank_is_refused_on_all_before_any_is_cut_anew(
    fault, kind, text, goes_on
):
    for found in run_workers(load_with_a_fault, N_RANKS, fault, timeout_s=60):
        assert found[0] == kind
        assert text in found[1]
        assert found[2:] == (True, goes_on)
