"""What ranks do that load under a framework what cannot be loaded: Accelerate's, in one program."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import distlion
from distlion import errors
from integrations.exam import tell_place

Facts = dict[str, Any]


class Counter:
    """An object of the user's own, saved and loaded with the rest."""

    def __init__(self) -> None:
        self.counts = [0]

    def state_dict(self) -> dict[str, Any]:
        return {"counts": list(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts[:] = state["counts"]


def decay(step: int) -> float:
    """Return the schedule's factor."""
    return 0.9**step  # type: ignore[no-any-return]


class Program:
    """A script under Accelerate: two optimizers, a schedule, an object of its own."""

    def __init__(self, **options: Any) -> None:
        from accelerate.state import AcceleratorState, GradientState

        from distlion.integrations.accelerate import VotingAccelerator

        AcceleratorState._reset_state()
        GradientState._reset_state()
        torch.manual_seed(0)
        self.accelerator = VotingAccelerator(cpu=True, **options)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        parts = [distlion.DistributedLion(part.parameters(), lr=0.1) for part in self.model]
        schedule = LambdaLR(parts[0], decay)
        loader = DataLoader(list(range(8)), batch_size=2)
        self.accelerator.prepare(self.model, *parts, schedule, loader)
        self.voters, self.schedule, self.counter = parts, schedule, Counter()
        self.hooked: list[str] = []
        self.accelerator.register_load_state_pre_hook(
            lambda models, folder: self.hooked.append(folder)
        )
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(8, 4) + dist.get_rank()).square().sum().backward()
            for voter in self.voters:
                voter.step()
                voter.zero_grad()
            self.schedule.step()
            self.counter.counts[0] += 1
            self.accelerator.step += 1

    def picture(self) -> Any:
        """Copy all that a load may change into something that compares with ==."""
        place = np.random.get_state()[2]  # noqa: NPY002, what Accelerate loads
        states = [voter.state for voter in self.voters]
        momenta = [entry["exp_avg"].tolist() for state in states for entry in state.values()]
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for voter in self.voters
            for group in voter.param_groups
        ]
        schedule = {key: value for key, value in vars(self.schedule).items() if key != "optimizer"}
        return (
            {name: value.tolist() for name, value in self.model.state_dict().items()},
            momenta,
            [dict(group) for group in groups],
            {key: list(each) if isinstance(each, list) else each for key, each in schedule.items()},
            list(self.counter.counts),
            self.accelerator.step,
            (random.getstate(), place, torch.get_rng_state().tolist()),
        )


def catch(call: Callable[[], Any]) -> str:
    """Return what a call raises, as kind and text."""
    try:
        call()
    except errors.DistlionError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def find_second(folder: Path, name: str) -> Path:
    (path,) = (folder / "distlion-1").rglob(name)
    return path


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a worker's file": lambda folder: flip(find_second(folder, "worker-00001.safetensors")),
    "no file of a worker": lambda folder: find_second(folder, "worker-00001.safetensors").unlink(),
    "no momenta": lambda folder: shutil.rmtree(folder / "distlion"),
    "the schedule": lambda folder: (folder / "scheduler.bin").write_bytes(b"no schedule"),
    "the custom object": lambda folder: (folder / "custom_checkpoint_0.pkl").write_bytes(b"0"),
    "no custom object": lambda folder: (folder / "custom_checkpoint_0.pkl").unlink(),
    "a model of its own": lambda folder: (folder / "model.safetensors").unlink(),
    "optimizers swapped": lambda folder: swap(folder / "distlion", folder / "distlion-1"),
}


def swap(one: Path, other: Path) -> None:
    one.rename(one.with_name("between"))
    other.rename(one)
    one.with_name("between").rename(other)


def meet_damage(rank: int, world_size: int, folder: str) -> dict[str, Facts]:
    """Load from copies of one checkpoint, each damaged for one rank or for both."""
    tell_place(rank, world_size)
    saved = Program()
    saved.train(3)
    saved.accelerator.save_state(f"{folder}/saved")
    program = Program()
    program.train(1)
    facts: dict[str, Facts] = {}
    for name, damage in DAMAGES.items():
        # A folder for each rank, as on hosts without a shared one; rank 0's is whole.
        copy = Path(folder, f"{name} {rank}")
        shutil.copytree(f"{folder}/saved", copy)
        if rank == 1 or name == "optimizers swapped":
            damage(copy)
        before = program.picture()
        said = catch(functools.partial(program.accelerator.load_state, str(copy)))
        facts[name] = {"said": said, "is as before": program.picture() == before}
        facts[name]["hooked"] = bool(program.hooked)
    facts["a missing folder"] = {
        "said": catch(lambda: program.accelerator.load_state(f"{folder}/saved{'x' * rank}")),
        "is as before": program.picture() == before,
    }
    return {**facts, "after": _go_on(program, saved, folder)}


def _go_on(program: Program, saved: Program, folder: str) -> Facts:
    """Load what is whole, in both ways, after all the refusals."""
    optimizers = program.accelerator._optimizers
    for optimizer in optimizers:
        own = optimizer.state_dict()
        own["param_groups"][0]["lr"] = 0.025
        optimizer.load_state_dict(own)
    facts: Facts = {
        "lrs": [optimizer.param_groups[0]["lr"] for optimizer in optimizers],
        "steps": [voter.committed_step for voter in program.voters],
        "hooks": len(program.accelerator._load_model_state_pre_hook),
    }
    program.train(1)
    expected = saved.picture()[:-2]
    program.accelerator.load_state(f"{folder}/saved")
    return {**facts, "loads": program.picture()[:-2] == expected}
