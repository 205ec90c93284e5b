"""A run whose members change, done again in one process: the same bits."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distlion
from cluster import WorkerDiedError
from crews import OPTIONS, await_members, draw_loss, host_store, make_crew, make_model, start, train
from distlion import faults
from distlion.crew import CrewLion
from tiers import in_tiers

STRUCK_AT = 6
CALLED_AT = 12
COME_BY = 18
GOAL = 30


def lose_and_join(rank: int, size: int, port: int, name: str, newcomers: Any) -> dict[str, Any]:
    """The first of four is killed before it votes; the last one comes later."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    if rank == size - 1:
        store.wait(["come"])
    crew = make_crew(port, min_workers=2, newcomers=newcomers)
    n_calls = -1  # one is before the first step

    def act(optimizer: CrewLion) -> None:
        nonlocal n_calls
        n_calls += 1
        if rank == 0 and optimizer.committed_step == STRUCK_AT and not faults.armed:
            faults.arm(
                rank=crew.rank,
                step=STRUCK_AT,
                point="before_step",
                action=lambda _: os.kill(os.getpid(), signal.SIGKILL),
            )
        if optimizer.committed_step == CALLED_AT:
            store.set("come", "")
        await_members(crew, size - 1 if optimizer.committed_step == COME_BY else 0)

    options = {**OPTIONS[name], "weight": weigh(name, crew.id)}
    result = train(crew, options, seed=rank, size=size - 1, goal=GOAL, each=act)
    return {**result, "seed": rank, "calls": n_calls}


def weigh(name: str, member: int) -> int:
    """Return the weight of a member, in one of the cases."""
    return 1 + member if name == "server" else 1


def replay(results: list[dict[str, Any]], name: str, newcomers: Any) -> None:
    """Do all steps again, with the members that each of them had; compare after each."""
    epochs, digests = {}, {}
    for result in results:
        epochs.update(result["epochs"])
        digests.update(result["digests"])
    first, seeds = epochs[1][1], {result["id"]: result["seed"] for result in results}
    # The first member's parameters count; the one that was killed is the only one not to say.
    model = make_model(seeds.get(first[0], 0))
    options = {
        key: value for key, value in OPTIONS[name].items() if key not in ("overlap", "retry")
    }
    weights = [weigh(name, member) for member in range(3)]
    cluster = distlion.VirtualCluster(
        model.named_parameters(), workers=3, weights=weights, lr=1e-2, **options
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(cluster, lambda step: 0.99**step)
    members = tuple(range(3))
    for step in range(GOAL):
        if epochs[step + 1][1] != members:
            members = epochs[step + 1][1]
            weights = [weigh(name, member) for member in members]
            cluster.change_workers(members, newcomers=newcomers, weights=weights)
        for place, member in enumerate(members):
            draw_loss(model, step, member).backward()
            cluster.collect(place)
        cluster.step()
        scheduler.step()
        here = b"".join(bytes(param.detach().numpy()) for param in model.parameters())
        assert here == digests[step + 1], step
    for result in results:
        momenta = cluster.exp_avg(members.index(result["id"]))
        assert all(map(torch.equal, momenta, result["momenta"]))
    assert [len(epochs[step][1]) for step in (STRUCK_AT, STRUCK_AT + 1, GOAL)] == [3, 2, 3]


@pytest.mark.parametrize(
    ("name", "newcomers"),
    in_tiers(
        [("majority", "zeros"), ("feedback", "donor"), ("overlap", "mean"), ("server", "zeros")],
        lambda case: case[0] == "feedback",
    ),
)
def test_a_run_whose_members_changed_is_replayed_bit_for_bit(name: str, newcomers: str) -> None:
    store = host_store()
    dead, *results = start(lose_and_join, 4, store.port, name, newcomers, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    replay(results, name, newcomers)


def test_steps_are_tried_again_with_the_same_gradients() -> None:
    store = host_store()
    dead, *results = start(lose_and_join, 4, store.port, "retry", "zeros", may_die=True)
    assert isinstance(dead, WorkerDiedError)
    replay(results, "retry", "zeros")
    for result in results:
        assert result["calls"] == len(result["digests"])  # none has returned without a step
    assert [result["traffic"]["epochs_formed"] > 1 for result in results] == [True, True, False]
