"""Crews whose members are machines of several processes, over which FSDP2 shards the parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import distlion
from crews import await_members, collect_log, make_crew, make_model
from distlion.crew import CrewLion

LANES = 2
TIMEOUTS = distlion.Timeouts(step_s=10)


def connect_machine(port: int, name: str, lane: int, *, lanes: int = LANES) -> DeviceMesh:
    """Make the group of a machine's processes, and its mesh."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"machine {name}", store),  # type: ignore[attr-defined]
        rank=lane,
        world_size=lanes,
        timeout=timedelta(seconds=40),
    )
    return init_device_mesh("cpu", (lanes,))


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for module in model.children():
        if list(module.parameters(recurse=False)):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def backward(model: nn.Module, step: int, member: int, lane: int) -> None:
    """Each process has its own batch; FSDP averages the gradients of a machine."""
    generator = torch.Generator().manual_seed(100_000 * step + 100 * member + lane)
    inputs = torch.randn(4, 8, generator=generator)
    nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()


def digest(model: nn.Module) -> bytes:
    """Return the bytes of whole parameters; all processes of a machine must call it."""
    params = list(model.parameters())
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in params]
    return b"".join(bytes(each.detach().numpy()) for each in whole)


def train_machine(
    crew: distlion.Crew,
    mesh: DeviceMesh,
    options: dict[str, Any],
    *,
    seed: int,
    goal: int,
    size: int = 2,
    each: Callable[[CrewLion], None] = lambda optimizer: None,
    carry: bool = True,
    is_sharded: bool = True,
) -> dict[str, Any]:
    """Train to the goal; return digests and epochs by step, and what there is at the end.

    Args:
        crew: The crew.
        mesh: The mesh of this machine.
        options: Of the optimizer.
        seed: Of the weights.
        goal: Steps.
        size: Members with whom the second step is taken.
        each: Called before each backward pass.
        carry: Whether a scheduler travels with the parameters.
        is_sharded: Whether FSDP2 shards them; else each process has all. Where it does, machines
            are let in before the backward pass, else as a step begins.
    """
    model = shard(make_model(seed), mesh) if is_sharded else make_model(seed)
    digests, epochs, said = {}, {}, collect_log()
    with crew:
        settings = {
            "lr": 1e-2,
            "timeouts": TIMEOUTS,
            "exchange": distlion.AllReduce(),
            "replicas": distlion.Replicas(check_every=5),
            **options,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = crew.optimizer(model.named_parameters(), **settings)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        if carry:
            crew.carry(scheduler=scheduler)
        while optimizer.committed_step < goal:
            if is_sharded:
                crew.admit()
            each(optimizer)
            backward(model, optimizer.committed_step, crew.id, crew.lane)
            if optimizer.step():
                scheduler.step()
                step = optimizer.committed_step
                epochs[step] = (crew.epoch.number, crew.epoch.roster.ids)
                digests[step] = digest(model)
            optimizer.zero_grad()
            await_members(crew, size if optimizer.committed_step == 1 else 0)
    momenta = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
    return {
        "digests": digests,
        "epochs": epochs,
        "rates": [group["lr"] for group in optimizer.param_groups],
        "id": crew.id,
        "lane": crew.lane,
        "seed": seed,
        "momenta": momenta,
        "formed": [line for line in said if line.startswith("epoch ")],
    }


def replay(results: list[dict[str, Any]], seed: int, goal: int, **options: Any) -> None:
    """Do all steps again in this process with whole parameters, and compare after each.

    Momenta are compared at the end: each process has its part of those of its machine. Newcomers
    begin them with zeros here as in the crew, whose default that is. A machine that comes back
    after steps without it keeps its own, which the cluster has dropped; such runs are not done
    again.
    """
    epochs, digests = {}, {}
    for result in results:
        epochs.update(result["epochs"])
        digests.update(result["digests"])
    model, members = make_model(seed), epochs[1][1]
    cluster = distlion.VirtualCluster(
        model.named_parameters(), workers=len(members), lr=1e-2, **options
    )
    cluster.change_workers(members)
    scheduler = torch.optim.lr_scheduler.LambdaLR(cluster, lambda step: 0.99**step)
    for step in range(goal):
        if epochs[step + 1][1] != members:
            members = epochs[step + 1][1]
            cluster.change_workers(members)
        for place, member in enumerate(members):
            for lane in range(LANES):
                backward(model, step, member, lane)
            for param in model.parameters():
                param.grad /= LANES
            cluster.collect(place)
        cluster.step()
        scheduler.step()
        here = b"".join(bytes(param.detach().numpy()) for param in model.parameters())
        assert here == digests[step + 1], step + 1
    for place, member in enumerate(members):
        check_momenta(cluster.exp_avg(place), [each for each in results if each["id"] == member])


def check_momenta(expected: list[Tensor], lanes: list[dict[str, Any]]) -> None:
    """Check that the parts of a machine's processes, in their order, are these whole momenta."""
    parts = [each["momenta"] for each in sorted(lanes, key=lambda each: int(each["lane"]))]
    assert len(parts) == LANES
    for whole, *cut in zip(expected, *parts, strict=True):
        assert torch.equal(whole.flatten(), torch.cat([part.flatten() for part in cut]))


__all__ = ["LANES", "connect_machine", "make_crew", "replay", "train_machine"]
