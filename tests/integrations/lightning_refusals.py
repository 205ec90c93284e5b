"""What ranks do that load under Fabric, and under Lightning, what cannot be loaded."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distlion
from distlion import errors
from integrations.exam import tell_place
from integrations.job import Job
from integrations.refusals import catch, decay, flip

Outcome = tuple[str, bool]
"""What was raised, and whether all is as before."""


def meet_damage_under_lightning(rank: int, world_size: int, folder: str) -> dict[str, Outcome]:
    """Load from copies of one checkpoint, each damaged for rank 1."""
    logging.getLogger("lightning").setLevel(logging.ERROR)
    tell_place(rank, world_size)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        outcomes = {**_load_by_fabric(rank, folder), **_fit(rank, folder)}
    told = [str(w.message) for w in seen if w.category is errors.OneWorkersStateWarning]
    return {**outcomes, "told of one worker's state": ("".join(told), True)}


def _copy(saved: Path, name: str, rank: int) -> Path:
    """Copy a file with its momenta into a folder of this rank's own."""
    dist.barrier()
    folder = saved.parent / f"{name} {rank}"
    folder.mkdir()
    shutil.copy(saved, folder)
    shutil.copytree(f"{saved}.distlion", folder / f"{saved.name}.distlion")
    return folder / saved.name


def _spoil_worker(path: Path) -> None:
    flip(next(path.parent.rglob("worker-00001.safetensors")))


def _without(key: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        del saved[key]
        torch.save(saved, path)

    return spoil


def _load_by_fabric(rank: int, folder: str) -> dict[str, Outcome]:
    import lightning

    from distlion.integrations.fabric import VotingStrategy

    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=VotingStrategy())
    fabric.launch()
    bare = Job("", 2).make_model(rank)
    voter = distlion.DistributedLion(bare.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(voter, decay)
    model, optimizer = fabric.setup(bare, voter)
    state = {"step": 0, "model": model, "optimizer": optimizer, "schedule": schedule}

    def picture() -> Any:
        momenta = [voter.state[param]["exp_avg"].tolist() for param in bare.parameters()]
        weights = [param.tolist() for param in bare.parameters()]
        schedules = {**vars(schedule), "lr_lambdas": [*schedule.lr_lambdas]}
        return weights, momenta, schedules, state["step"], voter.committed_step

    saved = Path(folder, "fabric.ckpt")
    fabric.save(saved, state)
    batch = next(Job("", 2).batches(rank))
    fabric.backward(model(**batch)["loss"])
    optimizer.step()
    schedule.step()
    state["step"] = 1
    outcomes: dict[str, Outcome] = {}
    for name, spoil in {
        "a worker's file": _spoil_worker,
        "the schedule": _without("schedule"),
        "no names": _without("distlion"),
        "whole": lambda path: None,
    }.items():
        path = _copy(saved, f"fabric, {name}", rank)
        if rank == 1:
            spoil(path)
        before = picture()
        said = catch(lambda path=path: fabric.load(path, state))  # type: ignore[misc]
        outcomes[f"Fabric, {name}"] = said, picture() == before
    return outcomes


def _fit(rank: int, folder: str) -> dict[str, Outcome]:
    import lightning

    from distlion.integrations.lightning import VotingStrategy
    from integrations import with_lightning

    class OtherSeed(with_lightning.Module):
        def configure_optimizers(self) -> Any:
            return distlion.DistributedLion(self.parameters(), seed=7)

    class Drifting(with_lightning.Module):
        def on_train_batch_end(self, *args: Any) -> None:
            if rank == 1 and self.global_step == 2:
                next(self.parameters()).data += 1

    job = Job(folder, 2, steps=2, save_at=1)
    with_lightning.train(job, rank)
    saved = Path(folder, "step=1.ckpt")
    damaged = _copy(saved, "lightning", rank)
    if rank == 1:
        _spoil_worker(damaged)
    outcomes: dict[str, Outcome] = {}
    for name, kind, path in (
        ("a worker's file", with_lightning.Module, damaged),
        ("another seed", OtherSeed, saved),
        ("drift", Drifting, None),
    ):
        module = kind(job, rank)
        before = [param.tolist() for param in module.parameters()]
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=VotingStrategy(),
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            use_distributed_sampler=False,
            limit_val_batches=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        said = catch(lambda: trainer.fit(module, ckpt_path=path))  # noqa: B023, called here
        now = [param.tolist() for param in module.parameters()]
        outcomes[f"Lightning, {name}"] = said, now == before
    return outcomes
