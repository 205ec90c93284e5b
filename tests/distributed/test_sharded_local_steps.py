"""Local steps of FSDP2 models: the ranks that hold a worker's shards vote for it together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distlion
import matrix
from cluster import run_workers
from distributed.sharded_models import build, digest, make_mesh, run_backward, shard
from tiers import in_tiers

pytestmark = pytest.mark.distributed

EVERY, VOTES = 2, 2


def train_shards(rank: int, world_size: int, options: list[dict[str, Any]]) -> list[Any]:
    mesh = make_mesh(2, 2)
    found = []
    for chosen in options:
        model = shard(build(), mesh["shard"])
        begun = digest(model)
        inner = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
        optimizer = distlion.LocalSteps(
            inner, every=EVERY, process_group=mesh["replicate"].get_group(), **chosen
        )
        apart = []
        for step in range(EVERY * VOTES):
            run_backward(model, step, rank // 2)
            optimizer.step()
            optimizer.zero_grad()
            apart.append(digest(model))
        optimizer.verify_replicas()
        found.append((begun, apart, digest(model)))
        assert optimizer.committed_step == VOTES
    return found


RULES = {type(rule): rule for rule in matrix.DELTA_RULES.values()}
OUTER = {"outer_momentum": 0.9, "outer_lr": 0.5, "nesterov": True}
OPTIONS: list[list[dict[str, Any]]] = [
    [{"aggregation": distlion.ResidualVote()}, OUTER],
    [{"aggregation": rule} for rule in RULES.values()],
]


@pytest.mark.parametrize(
    "options", in_tiers(OPTIONS, lambda each: OUTER in each), ids=["some", "all"]
)
def test_workers_whose_parameters_are_sharded_meet_at_every_vote(
    options: list[dict[str, Any]],
) -> None:
    ended = run_workers(train_shards, 4, options)
    for number in range(len(options)):
        rows = [ended[rank][number] for rank in range(4)]
        for rank in range(2):  # ranks 0 and 2 hold one shard, 1 and 3 the other
            begun, apart, end = rows[rank]
            _, others_apart, others_end = rows[rank + 2]
            assert begun != end
            for step in range(EVERY * VOTES):
                met = (step + 1) % EVERY == 0
                assert (apart[step] == others_apart[step]) == met
            assert end == others_end


def refuse(rank: int, world_size: int) -> list[str]:
    found = []
    for shape, options in (((1, 2), {}), ((2, 1), {"common_device": "cuda"})):
        mesh = make_mesh(*shape)
        model = shard(build(), mesh["shard"])
        inner = torch.optim.AdamW(model.named_parameters())
        try:
            distlion.LocalSteps(inner, process_group=mesh["replicate"].get_group(), **options)
        except distlion.errors.DistlionError as error:
            found.append(str(error))
    return found


def test_what_cannot_vote_is_refused() -> None:
    for alone, elsewhere in run_workers(refuse, 2):
        assert "act as one worker" in alone
        assert "Leave it out" in elsewhere
