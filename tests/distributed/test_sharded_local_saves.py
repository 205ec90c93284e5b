"""Local steps of FSDP2 models, saved by torch's own formats in the middle of a period."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from cluster import run_workers
from distributed.sharded_local import (
    AT,
    CASES,
    N_RANKS,
    STEPS,
    list_bits,
    make,
    train,
    train_unevenly,
)
from distributed.sharded_models import digest, load, save
from tiers import in_tiers

pytestmark = pytest.mark.distributed


QUICK = ("momentum",)
"""A vote's residuals with outer momentum."""


def tier_of(case: str) -> tuple[str, ...]:
    return QUICK if case in QUICK else tuple(name for name in CASES if name not in QUICK)


def save_and_go_on(
    rank: int, world_size: int, folder: str, cases: tuple[str, ...]
) -> dict[str, Any]:
    found = {}
    for case in cases:
        model, optimizer = make(case, seed=0)
        train(model, optimizer, rank, 0, AT)
        before = list_bits(model, optimizer)
        save(model, optimizer, f"{folder}/{case}")
        is_unchanged = list_bits(model, optimizer) == before
        train(model, optimizer, rank, AT, STEPS)
        found[case] = {
            "saved": before,
            "unchanged": is_unchanged,
            "end": list_bits(model, optimizer),
        }
    return found


def load_and_go_on(
    rank: int, world_size: int, folder: str, cases: tuple[str, ...]
) -> dict[str, Any]:
    found = {}
    for case in cases:
        model, optimizer = make(case, seed=1)
        load(model, optimizer, f"{folder}/{case}")
        loaded = list_bits(model, optimizer)
        train(model, optimizer, rank, AT, STEPS)
        found[case] = {"saved": loaded, "end": list_bits(model, optimizer)}
    return found


@functools.cache
def saved(folder: str, cases: tuple[str, ...]) -> list[dict[str, Any]]:
    return run_workers(save_and_go_on, N_RANKS, folder, cases, timeout_s=120)


@functools.cache
def resumed(folder: str, cases: tuple[str, ...]) -> list[dict[str, Any]]:
    saved(folder, cases)
    return run_workers(load_and_go_on, N_RANKS, folder, cases, timeout_s=120)


def both(folder: str, case: str) -> zip[tuple[dict[str, Any], dict[str, Any]]]:
    cases = tier_of(case)
    return zip(saved(folder, cases), resumed(folder, cases), strict=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("dcp"))


@pytest.mark.parametrize("case", in_tiers(CASES, lambda case: case in QUICK))
class TestResumed:
    def test_a_save_changes_nothing(self, case, folder):
        assert [found[case]["unchanged"] for found in saved(folder, tier_of(case))] == [
            True
        ] * N_RANKS

    def test_workers_are_apart_when_they_are_saved(self, case, folder):
        rows = [found[case]["saved"] for found in saved(folder, tier_of(case))]
        assert rows[0][1] != rows[2][1]

    def test_every_worker_has_all_of_its_own_state_again(self, case, folder):
        for before, after in both(folder, case):
            assert after[case]["saved"] == before[case]["saved"]

    def test_training_goes_on_to_the_same_bits(self, case, folder):
        for before, after in both(folder, case):
            assert after[case]["end"] == before[case]["end"]


def gather_whole(model: nn.Module, optimizer: Any, worker: int) -> dict[str, Any]:
    """Gather this worker's whole tensors, from the saved form."""
    state = optimizer.state_dict()["state"]
    found = {}
    for index, (_, param) in enumerate(model.named_parameters()):
        for key, value in state[index].items():
            if hasattr(value, "full_tensor"):
                whole = value.full_tensor()
                found[index, key] = (whole if whole.shape == param.shape else whole[worker]).clone()
    return found


def gather_loaded(rank: int, world_size: int, path: str) -> tuple[dict[str, Any], Any]:
    shards = world_size // 2
    model, optimizer = make("momentum", seed=2, shards=shards)
    load(model, optimizer, path)
    return gather_whole(model, optimizer, rank // shards), optimizer.progress.calls


@pytest.mark.slow
def test_two_shards_are_loaded_as_one(folder):
    saved(folder, QUICK)
    two = run_workers(gather_loaded, N_RANKS, f"{folder}/momentum")
    one = run_workers(gather_loaded, 2, f"{folder}/momentum")
    for worker in range(2):
        whole, calls = one[worker]
        expected, _ = two[2 * worker]
        assert calls == AT
        assert whole.keys() == expected.keys()
        assert all(torch.equal(whole[key], expected[key]) for key in expected)
    for key in ("exp_avg", "exp_avg_sq", "worker_param", "vote_residual"):
        assert not torch.equal(one[0][0][2, key], one[1][0][2, key])


def load_otherwise(rank: int, world_size: int) -> dict[str, bool]:
    """Load a state in memory, whole, or with other cuts than those of the optimizer."""
    model, optimizer = make("momentum", seed=0)
    train(model, optimizer, rank, 0, AT)
    expected, found = list_bits(model, optimizer), {}
    state = optimizer.state_dict()

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_optimizer_state_dict(model, optimizer, options=whole)
    other, fresh = make("momentum", seed=1)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, fresh, full, options=from_first)
    found["full"] = list_bits(other, fresh) == expected

    plain = {
        key: {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in entry.items()
        }
        for key, entry in state["state"].items()
    }
    other, fresh = make("momentum", seed=2)
    fresh.load_state_dict({**state, "state": plain})
    found["plain"] = list_bits(other, fresh) == expected

    mirrored = {key: dict(entry) for key, entry in state["state"].items()}
    for entry in mirrored.values():
        for name in ("exp_avg", "step", "vote_residual", "worker_param", "common_point"):
            value = entry[name]
            cut = [torch.distributed.tensor.Replicate()] * value.device_mesh.ndim
            entry[name] = value.redistribute(value.device_mesh, cut)
    other, fresh = make("momentum", seed=3)
    fresh.load_state_dict({**state, "state": mirrored})
    found["replicated"] = list_bits(other, fresh) == expected
    # A load copies: the optimizer does not train the tensors of the state that it was given.
    train(other, fresh, rank, AT, AT + 1)
    train(model, optimizer, rank, AT, AT + 1)
    found["goes on"] = list_bits(other, fresh) == list_bits(model, optimizer)
    # torch's formats load in place; the weights in a state are not those of the model.
    for entry in fresh.state_dict()["state"].values():
        entry["worker_param"].to_local().zero_()
    found["copied"] = digest(other) == digest(model)
    return found


def test_a_state_is_loaded_from_whole_tensors_and_from_other_cuts():
    for found in run_workers(load_otherwise, N_RANKS, timeout_s=120):
        assert found == dict.fromkeys(found, True)
        assert len(found) == 5


def resume_unevenly(rank: int, world_size: int, path: str) -> list[Any]:
    """Worker 1 has no state of one parameter, whose gradient it never has."""
    found = []
    model, optimizer = make("adamw", seed=0)
    train_unevenly(model, optimizer, rank)
    found.append(list_bits(model, optimizer))
    save(model, optimizer, path)
    other, fresh = make("adamw", seed=1)
    load(other, fresh, path)
    found += [list_bits(other, fresh), bool(fresh.state[next(other.parameters())])]
    return found


def test_a_worker_without_state_of_a_parameter_has_none_again(tmp_path):
    ended = run_workers(resume_unevenly, N_RANKS, str(tmp_path / "uneven"))
    assert all(before == after for before, after, _ in ended)
    assert [has_state for *_, has_state in ended] == [True, True, False, False]
