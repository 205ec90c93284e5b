"""What the bridges refuse, and what they do beyond the exam; every rank hears the same error."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.two_tensor import TwoTensor

import distlion
from cluster import run_workers
from distlion import errors
from distlion.integrations import frameworks
from distlion.integrations.companion import check_names, find_votes, name_companion
from integrations.exam import tell_place
from integrations.job import Job

pytestmark = pytest.mark.distributed

BRIDGES = {"accelerate": "accelerate", "lightning": "lightning", "fabric": "lightning"}
"""Modules of distlion.integrations, and the package that each is for."""

TRAIN = {
    "accelerate": "integrations.with_accelerate",
    "lightning": "integrations.with_lightning",
    "fabric": "integrations.with_fabric",
}


@pytest.mark.parametrize("bridge", BRIDGES)
def test_another_major_version_is_refused_by_name(
    bridge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frameworks, "version", lambda package: "99.1")
    monkeypatch.delitem(sys.modules, f"distlion.integrations.{bridge}", raising=False)
    with pytest.raises(errors.MissingDependencyError) as caught:
        importlib.import_module(f"distlion.integrations.{bridge}")
    package = BRIDGES[bridge]
    assert f"{package} 99.1 is installed" in str(caught.value)
    assert f"distlion[{package}]" in str(caught.value)


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(frameworks, "version", find)
    with pytest.raises(errors.MissingDependencyError, match=r"distlion\[lightning\]"):
        frameworks.check_version("lightning", major=2, extra="lightning")


def test_an_optimizer_that_does_not_vote_is_refused() -> None:
    adamw = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(errors.UnsupportedTypeError, match="AdamW, which does not vote"):
        frameworks.check_votes(adamw, "VotingStrategy")


def test_local_steps_vote() -> None:
    optimizer = distlion.LocalSteps(torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()))
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
    assert frameworks.check_votes(wrapped, "VotingStrategy") is optimizer
    with frameworks.hold_back(optimizer):
        pass


@pytest.mark.slow
def test_local_steps_are_the_voter_of_a_trainer() -> None:
    optimizer = distlion.LocalSteps(torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()))
    transformers = importlib.import_module("distlion.integrations.transformers")
    trainer = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
    assert transformers.VotingMixin.voter.fget(trainer) is optimizer


def test_only_local_steps_vote_out_of_turn() -> None:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    local = distlion.LocalSteps(torch.optim.SGD([params[0]], 0.1), every=4)
    voting = distlion.DistributedLion([params[1]], lr=0.1)
    params[0].grad = torch.ones(3)
    local.step()
    frameworks.vote_on_deltas([local, voting])
    assert (local.committed_step, voting.committed_step) == (1, 0)


def copy_rest(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(rank + 1)
    model[0].weight.requires_grad_(False)
    model[0].weight = torch.nn.Parameter(model[0].weight.T.clone().T, requires_grad=False)
    parts = [torch.full((3,), rank + 1.0) for _ in range(2)]
    model.wrapper = torch.nn.Parameter(TwoTensor(*parts), requires_grad=False)
    model.register_buffer("column", torch.full((2, 4), rank + 1.0)[:1, 0])
    frameworks.broadcast_rest(model)
    rest = [model[0].weight, *model.buffers(), model.wrapper.a, model.wrapper.b]
    trained = [model[0].bias, *model[1].parameters()]
    return [float(t.float().mean()) for t in rest], [float(t.detach().mean()) for t in trained]


def test_buffers_and_frozen_parameters_begin_as_those_of_rank_0() -> None:
    for rank, (rest, trained) in enumerate(run_workers(copy_rest, 2)):
        assert rest == [1.0] * 7
        assert trained == [rank + 1.0] * 3  # DistributedLion's own business


def catch(call: Callable[[], Any]) -> str:
    """Return what a call raises, as kind and text; all ranks go on together."""
    try:
        call()
    except errors.DistlionError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
    return "nothing"


def meet_refusals(rank: int, world_size: int, folder: str, bridge: str) -> dict[str, str]:
    """Resume from what is not whole, each time with a copy of one checkpoint."""
    tell_place(rank, world_size)
    train = importlib.import_module(TRAIN[bridge]).train
    saved = os.path.join(folder, "saved")
    train(Job(saved, world_size, steps=2, save_at=1), rank)
    dist.barrier()
    said = {}
    for name, damage in DAMAGES.items():
        copy = os.path.join(folder, name)
        if rank == 0:
            shutil.copytree(saved, copy)
            damage(Path(copy))
        dist.barrier()
        job = Job(copy, world_size, steps=2, resume=copy, first_step=1)
        said[name] = catch(lambda job=job: train(job, rank))
    return said


def remove_momenta(folder: Path) -> None:
    for path in list(folder.rglob("latest")):
        shutil.rmtree(path.parent)


def remove_one_momentum(folder: Path) -> None:
    for path in folder.rglob("worker-00001.safetensors"):
        path.unlink()


def exchange_momenta(folder: Path) -> None:
    for one in folder.rglob("worker-00000.safetensors"):
        other = one.with_name("worker-00001.safetensors")
        shutil.copy(one, other)


DAMAGES = {
    "without momenta": remove_momenta,
    "without one momentum": remove_one_momentum,
    "rank 0's momentum for all": exchange_momenta,
}


@pytest.mark.slow
@pytest.mark.parametrize("bridge", BRIDGES)
def test_a_checkpoint_that_lacks_momenta_is_refused_on_all_ranks(
    bridge: str, tmp_path: Path
) -> None:
    pytest.importorskip(BRIDGES[bridge])
    said = run_workers(meet_refusals, 2, str(tmp_path), bridge, timeout_s=240)
    for answers in said:
        assert answers.keys() == DAMAGES.keys()
        for name, answer in answers.items():
            assert answer.startswith("CheckpointError"), (name, answer)


def resume_on_three(rank: int, world_size: int, folder: str, bridge: str) -> str:
    tell_place(rank, world_size)
    train = importlib.import_module(TRAIN[bridge]).train
    job = Job(folder, world_size, steps=2, resume=folder, first_step=1)
    return catch(lambda: train(job, rank))


def save_on_two(rank: int, world_size: int, folder: str, bridge: str) -> None:
    tell_place(rank, world_size)
    importlib.import_module(TRAIN[bridge]).train(Job(folder, world_size, steps=2, save_at=1), rank)


@pytest.mark.slow
@pytest.mark.parametrize("bridge", BRIDGES)
def test_another_number_of_workers_is_refused_with_what_to_say(bridge: str, tmp_path: Path) -> None:
    pytest.importorskip(BRIDGES[bridge])
    run_workers(save_on_two, 2, str(tmp_path), bridge, timeout_s=240)
    for said in run_workers(resume_on_three, 3, str(tmp_path), bridge, timeout_s=240):
        assert said.startswith("CheckpointError")
        assert "momenta of 2 workers, and now there are 3" in said and "on_world_change" in said


def misuse_accelerate(rank: int, world_size: int) -> dict[str, str]:
    from accelerate.state import AcceleratorState

    from distlion.integrations.accelerate import VotingAccelerator

    tell_place(rank, world_size)
    model = torch.nn.Linear(2, 2)
    said = {"processes": catch(VotingAccelerator)}
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = VotingAccelerator(cpu=True)
    adamw = torch.optim.AdamW(model.parameters())
    said["optimizer"] = catch(lambda: accelerator.prepare(model, adamw))
    voter = distlion.DistributedLion(model.parameters())
    prepared = accelerator.prepare(voter)
    assert accelerator.prepare(prepared) is prepared
    said["no_sync"] = type(accelerator.prepare(model)).__name__
    return said


@pytest.mark.slow
def test_accelerate_that_would_not_vote_is_refused() -> None:
    pytest.importorskip("accelerate")
    for said in run_workers(misuse_accelerate, 2, timeout_s=120):
        if not torch.cuda.is_available():
            assert (
                said["processes"].startswith("ProcessGroupError")
                and "cpu=True" in said["processes"]
            )
        assert said["optimizer"].startswith("UnsupportedTypeError")
        assert said["no_sync"] == "Linear"


def test_a_file_that_names_no_momenta_is_refused() -> None:
    with pytest.raises(
        errors.CheckpointError, match=r"does not name the folder .* load them into the model"
    ):
        find_votes({}, "run.ckpt")


def test_momenta_of_other_optimizers_are_refused() -> None:
    voter = distlion.DistributedLion(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(errors.CheckpointError, match=r"optimizers \['a'\].* are \['b'\]"):
        check_names({"a": Path("0")}, {"b": voter})


def test_momenta_beside_an_address_are_refused() -> None:
    with pytest.raises(errors.CheckpointError, match="must be on a file system"):
        name_companion("s3://bucket/run.ckpt")


def test_a_link_has_the_momenta_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to("step=3.ckpt")
    assert name_companion(tmp_path / "last.ckpt").name == "step=3.ckpt.distlion"


def keep_the_last(rank: int, world_size: int, folder: str) -> str:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from distlion.integrations.lightning import VotingStrategy
    from integrations.with_lightning import Module

    tell_place(rank, world_size)
    said = catch(lambda: VotingStrategy(ddp_comm_hook=print))
    saves = ModelCheckpoint(folder, filename="{step}", save_top_k=1, every_n_train_steps=2)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=VotingStrategy(),
        max_steps=6,
        callbacks=[saves],
        logger=False,
        limit_val_batches=0,
        enable_progress_bar=False,
    )
    trainer.fit(Module(Job(folder, 1), rank))
    return said


@pytest.mark.slow
def test_lightning_removes_momenta_with_their_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    (said,) = run_workers(keep_the_last, 1, str(tmp_path), timeout_s=120)
    assert said.startswith("InvalidArgumentError") and "ddp_comm_hook" in said
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step=6.ckpt", "step=6.ckpt.distlion"]


def average_under_fabric(rank: int, world_size: int) -> bool:
    import lightning
    from torch.optim.swa_utils import AveragedModel

    from distlion.integrations.fabric import VotingStrategy

    tell_place(rank, world_size)
    fabric = lightning.Fabric(accelerator="cpu", strategy=VotingStrategy(), devices=1)
    fabric.launch()
    model = torch.nn.Linear(2, 2)
    module, optimizer = fabric.setup(model, distlion.DistributedLion(model.parameters()))
    mean = AveragedModel(module)
    fabric.backward(module(torch.ones(1, 2)).sum())
    optimizer.step()
    mean.update_parameters(module)
    return torch.equal(mean.module.module.weight, model.weight)


@pytest.mark.slow
def test_a_module_of_fabric_can_be_copied_for_averages() -> None:
    pytest.importorskip("lightning")
    assert run_workers(average_under_fabric, 1, timeout_s=120) == [True]


def save_and_note(rank: int, world_size: int, folder: str) -> list[str]:
    """Return what a process does in ``save_state``, in order."""
    import accelerate.accelerator as module

    from distlion.integrations.accelerate import VotingAccelerator

    tell_place(rank, world_size)
    accelerator, model = VotingAccelerator(cpu=True), torch.nn.Linear(4, 2)
    accelerator.prepare(model, distlion.DistributedLion(model.parameters()))
    done: list[str] = []
    write, wait = module.save_accelerator_state, accelerator.wait_for_everyone

    def note_write(*args: Any, **kwargs: Any) -> Any:
        path = write(*args, **kwargs)
        done.append("wrote")
        return path

    def note_wait() -> None:
        done.append("waited")
        wait()

    with (
        mock.patch.object(module, "save_accelerator_state", note_write),
        mock.patch.object(accelerator, "wait_for_everyone", note_wait),
    ):
        accelerator.save_state(folder)
    return done


@pytest.mark.slow
def test_accelerates_files_are_there_when_save_state_returns(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for done in run_workers(save_and_note, 2, str(tmp_path / "saved"), timeout_s=60):
        assert done[-2:] == ["wrote", "waited"]
