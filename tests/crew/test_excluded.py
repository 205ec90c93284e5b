"""A crew leaves out the votes of a member that disagrees, and a newcomer knows who that is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from crews import await_members, host_store, make_crew, start
from distlion import Agreement

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FLIPPER, GOAL, COME = 1, 60, 25


def draw(member: int, step: int) -> Tensor:
    """Draw the gradient of a member: around a common one; one member hands in the negative."""
    common = torch.Generator().manual_seed(step)
    own = torch.Generator().manual_seed(1000 * (member + 1) + step)
    grad = 2 * torch.randn(200, generator=common) + torch.randn(200, generator=own)
    return -grad if member == FLIPPER else grad


def train(rank: int, world_size: int, port: int) -> dict[str, Any]:
    """Train; the last worker comes later than the others."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    if rank == world_size - 1:
        store.wait(["come"])
    param = nn.Parameter(torch.zeros(200))
    with make_crew(port, min_workers=3) as crew:
        optimizer = crew.optimizer(
            [("w", param)], lr=0.01, agreement=Agreement(every=1, on_disagreement="exclude")
        )
        began = optimizer.committed_step
        while optimizer.committed_step < GOAL:
            step = optimizer.committed_step
            await_members(crew, 3)
            if step == COME and rank == 0:
                store.set("come", "")
            if step == GOAL - 10:
                await_members(crew, world_size)
            param.grad = draw(rank, step)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.verify_replicas()
        found = optimizer.diagnostics()[-1]
        saved = optimizer.state_dict()["param_groups"][0]["agreement"]
        named = [crew.epoch.roster.ids[place] for place in found.excluded]
        return {
            "id": crew.id,
            "flips": rank == FLIPPER,
            "began": began,
            "named": named,
            "agreement": dict(optimizer.param_groups[0]["agreement"]),
            "saved": saved,
            "ids": crew.epoch.roster.ids,
        }


def test_a_newcomer_knows_whose_votes_do_not_count() -> None:
    store = host_store()
    outcomes = start(train, 4, store.port, timeout_s=90)

    (flipper,) = [each["id"] for each in outcomes if each["flips"]]
    assert max(each["began"] for each in outcomes) >= COME
    for each in outcomes:
        assert each["named"] == [flipper]
        assert each["agreement"] == outcomes[0]["agreement"]
        assert list(each["agreement"]) == list(map(str, each["ids"]))
        assert each["saved"] == list(each["agreement"].values())
