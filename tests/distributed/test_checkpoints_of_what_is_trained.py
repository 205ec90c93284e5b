"""A checkpoint of what is trained only comes back into a model whose rest is the same."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distlion
from cluster import run_workers
from distlion import errors

pytestmark = pytest.mark.distributed

STEPS, SAVED_AT = 6, 3


class Model(nn.Module):
    """Tied weights, a frozen layer, and a buffer that differs between workers."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(70, 9, bias=False)
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.head = nn.Linear(9, 70, bias=False)
        self.head.weight = nn.Parameter(self.embedding.weight.detach().T.clone())
        self.tied = self.head
        self.register_buffer("seen", torch.tensor(rank))


class Worker:
    def __init__(self, rank: int, seed: int = 0) -> None:
        self.rank = rank
        self.model = Model(rank)
        self.loose = nn.Parameter(torch.ones(65))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = distlion.DistributedLion([*trained, self.loose], lr=1e-2, seed=seed)

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(100 * step + self.rank)
            hidden = self.model.frozen(
                self.model.embedding(torch.randn(4, 70, generator=generator))
            )
            (self.model.tied(hidden).square().mean() + (self.loose * step).sum()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, folder: str, **options: Any) -> Path:
        return distlion.save_checkpoint(folder, self.model, self.optimizer, **options).wait()

    def tensors(self) -> list[torch.Tensor]:
        momenta = [state["exp_avg"] for state in self.optimizer.state.values()]
        present = [*self.model.state_dict().values(), self.loose, *momenta]
        return [each.detach().clone() for each in present]


def resume(rank: int, world_size: int, folder: str) -> tuple[bool, bool, list[str]]:
    """Return whether a resumed run equals a straight one, and what the files hold of the model."""
    straight = Worker(rank)
    straight.train(0, SAVED_AT)
    path = straight.save(folder, only_trained=True, async_=True)
    straight.train(SAVED_AT, STEPS)
    again = Worker(rank)
    again.model.seen.fill_(-1)
    distlion.load_checkpoint(folder, again.model, again.optimizer)
    is_own_back = int(again.model.seen) == rank
    again.train(SAVED_AT, STEPS)
    pairs = zip(straight.tensors(), again.tensors(), strict=True)
    is_equal = all(torch.equal(one, other) for one, other in pairs)
    names: list[str] = []
    for file in sorted(path.glob("model-*.safetensors")):
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    return is_equal, is_own_back, names


def test_what_is_not_trained_is_left_out_and_a_run_resumes(tmp_path: Path) -> None:
    for is_equal, is_own_back, names in run_workers(resume, 2, str(tmp_path)):
        assert is_equal and is_own_back
        assert sorted(names) == [
            "embedding.weight",
            "head.weight",
            "parameter outside of the model: 2",
        ]


def save_what_differs(rank: int, world_size: int, folder: str) -> dict[str, list[str]]:
    """Save models whose rest differs between workers, and return the warnings."""
    heard: dict[str, list[str]] = {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")

        def collect(case: str) -> None:
            heard[case] = [str(w.message) for w in seen if w.category is DIFFERING]
            seen.clear()

        worker = Worker(rank)
        worker.save(f"{folder}/a")
        collect("buffer")
        worker.save(f"{folder}/a")
        collect("again")
        worker = Worker(rank)
        distlion.average_buffers(worker.model)
        worker.save(f"{folder}/b")
        collect("equal")
        worker.model.frozen.bias.data += rank
        worker.save(f"{folder}/b")
        collect("frozen")
    return heard


def copy_states(rank: int, world_size: int, folder: str) -> dict[str, list[str]]:
    """Ask optimizers for their state in several ways, and return the warnings."""
    heard: dict[str, list[str]] = {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")

        def collect(case: str) -> None:
            found = [w for w in seen if w.category is errors.OneWorkersStateWarning]
            heard[case] = [f"{w.message} {w.filename}" for w in found]
            seen.clear()

        for name, local in (("votes", False), ("local", True)):
            worker = Worker(rank)
            optimizer: Any = worker.optimizer
            if local:
                inner = torch.optim.AdamW([p for p in worker.model.parameters() if p.requires_grad])
                optimizer = distlion.LocalSteps(inner, every=2)
            distlion.save_checkpoint(f"{folder}/{name}", worker.model, optimizer)
            distlion.load_checkpoint(f"{folder}/{name}", worker.model, optimizer)
            collect(f"{name}, checkpoint")
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.state_dict()
            collect(name)
        sharded = nn.Linear(8, 8)
        mesh_dims = {"mesh_dim_names": ("replicate", "shard")}
        fully_shard(sharded, mesh=init_device_mesh("cpu", (world_size, 1), **mesh_dims))
        distlion.DistributedLion(sharded.parameters()).state_dict()
        collect("sharded")
    return heard


def test_a_state_of_one_worker_says_so_once_and_checkpoints_do_not(tmp_path: Path) -> None:
    for heard in run_workers(copy_states, 2, str(tmp_path)):
        for case in ("votes", "local"):
            assert heard.pop(f"{case}, checkpoint") == []
            (said,) = heard.pop(case)
            assert "one of 2 workers" in said and "save_checkpoint" in said
            assert said.endswith(__file__)
        assert heard == {"sharded": []}


DIFFERING = errors.DifferingModelsWarning


def test_a_save_of_differing_buffers_warns_once_and_names_one(tmp_path: Path) -> None:
    for heard in run_workers(save_what_differs, 2, str(tmp_path)):
        assert "1 buffer" in heard["buffer"][0] and "'seen'" in heard["buffer"][0]
        assert "average_buffers(model)" in heard["buffer"][0]
        assert "1 frozen parameter" in heard["frozen"][0]
        assert "'frozen.bias'" in heard["frozen"][0]
        assert "average_buffers" not in heard["frozen"][0]
        counts = {case: len(texts) for case, texts in heard.items()}
        assert counts == {"buffer": 1, "again": 0, "equal": 0, "frozen": 1}


def save_unlike(rank: int, world_size: int, folder: str) -> list[str]:
    worker = Worker(rank)
    worker.train(0, 1)
    texts = []
    for option in ("only_trained", "async_"):
        with pytest.raises(errors.CheckpointError) as caught:
            worker.save(folder, **{option: rank == 1})
        texts.append(str(caught.value))
    worker.train(1, 2)
    worker.save(folder)
    return texts


def test_ranks_that_save_with_other_options_all_raise_and_go_on(tmp_path: Path) -> None:
    for trained, in_background in run_workers(save_unlike, 2, str(tmp_path)):
        assert "only_trained=False on rank 0" in trained
        assert "only_trained=True on rank 1" in trained
        assert "async_=True" in in_background


def load_beside_another(rank: int, world_size: int, folder: str, changed: str) -> tuple[str, bool]:
    worker = Worker(rank)
    worker.train(0, SAVED_AT)
    worker.save(folder, only_trained=True)
    with torch.no_grad():
        if rank == 1:
            worker.model.state_dict()[changed].reshape(-1)[0].add_(1)
    before = worker.tensors()
    worker.optimizer.state[worker.loose]["exp_avg"].zero_()
    with pytest.raises(errors.CheckpointError) as caught:
        distlion.load_checkpoint(folder, worker.model, worker.optimizer)
    momenta_are_kept = not worker.optimizer.state[worker.loose]["exp_avg"].any()
    rest = zip(before[:-1], worker.tensors()[:-1], strict=True)
    return str(caught.value), momenta_are_kept and all(torch.equal(a, b) for a, b in rest)


def test_a_model_with_another_rest_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for said, is_unchanged in run_workers(load_beside_another, 2, str(tmp_path), "frozen.bias"):
        assert "failed on rank 1" in said and "frozen.bias" in said and "same model" in said
        assert is_unchanged


def save_torn(rank: int, world_size: int, folder: str, name: str) -> str:
    worker = Worker(rank)
    with torch.no_grad():
        if rank == 1:
            worker.model.state_dict()[name].add_(1)
    with pytest.raises(errors.ReplicaMismatchError) as caught:
        worker.save(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_replicas_that_differ_in_a_tied_weight_are_not_saved(tmp_path: Path, name: str) -> None:
    for said in run_workers(save_torn, 2, str(tmp_path), name):
        assert name in said
