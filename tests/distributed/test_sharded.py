"""FSDP2 parameters: bits of whole parameters, whatever the mesh."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import distlion
import matrix
from cluster import run_workers
from distributed.sharded_models import (
    Reference,
    build,
    digest,
    gather_gradients,
    make_mesh,
    make_optimizer,
    run_backward,
    shard,
)
from tiers import in_tiers

pytestmark = pytest.mark.distributed

# The scales of what a shard cuts are others: those rules are compared with themselves only.
WHOLE = {
    name: rule
    for name, rule in matrix.RULES.items()
    if (not isinstance(rule, distlion.QuantizedVote) or rule.bits == 1) and not rule.worker_state
}
EVERY_RULE = tuple(matrix.RULES)
# (voters, shards of each), rules and steps: the first one in the quick tier.
CASES = [
    ((2, 2), ("majority",), 3),
    ((2, 2), EVERY_RULE, 20),
    ((1, 4), EVERY_RULE, 20),
    ((4, 1), EVERY_RULE, 20),
    ((2, 3), EVERY_RULE, 3),
    ((2, 1), ("majority",), 3),
    ((1, 2), ("majority",), 3),
]


def train_beside_whole(
    rank: int, world_size: int, mesh_shape: tuple[int, int], names: tuple[str, ...], steps: int
) -> list[Any]:
    """Return for each rule and with and without overlap: equal to whole, started before step()."""
    mesh = make_mesh(*mesh_shape)
    found = []
    for name in names:
        for overlap in (False, True):
            rule = matrix.RULES[name]
            model = shard(build(), mesh["shard"])
            options = {"aggregation": rule, "overlap": overlap, "bucket_elements": 64}
            optimizer = make_optimizer(model, mesh, **options)
            reference = Reference(mesh_shape[0], aggregation=rule)
            started = 0
            for step in range(steps):
                run_backward(model, step, rank)
                reference.step(gather_gradients(model, mesh))
                if overlap:
                    started += optimizer._session.overlap._n_started
                optimizer.step()
                optimizer.zero_grad()
            found.append((name, overlap, reference.equals(model), started, digest(model)))
    return found


@functools.cache
def trained(mesh_shape: tuple[int, int], names: tuple[str, ...], steps: int) -> list[list[Any]]:
    n_ranks = mesh_shape[0] * mesh_shape[1]
    return run_workers(train_beside_whole, n_ranks, mesh_shape, names, steps, timeout_s=600)


@pytest.mark.parametrize(
    ("mesh_shape", "names", "steps"), in_tiers(CASES, lambda case: case == CASES[0])
)
class TestBits:
    def test_rules_without_scale_blocks_equal_virtual_workers_on_whole_parameters(
        self, mesh_shape, names, steps
    ):
        for rows in trained(mesh_shape, names, steps):
            compared = [
                (name, overlap, equal) for name, overlap, equal, *_ in rows if name in WHOLE
            ]
            assert compared
            assert all(equal for *_, equal in compared), compared

    def test_replicas_are_equal(self, mesh_shape, names, steps):
        _, shards = mesh_shape
        ranks = trained(mesh_shape, names, steps)
        for rank, rows in enumerate(ranks):
            assert [row[-1] for row in rows] == [row[-1] for row in ranks[rank % shards]]

    def test_overlap_has_the_same_bits_and_begins_during_backward(self, mesh_shape, names, steps):
        for rows in trained(mesh_shape, names, steps):
            for without, with_overlap in zip(rows[::2], rows[1::2], strict=True):
                assert without[-1] == with_overlap[-1]
                assert with_overlap[3] > 0


def meet_twice(rank: int, world_size: int, folder: str) -> None:
    """Let all ranks make an optimizer, and again in a default group where two changed places."""
    for number, numbers in enumerate(((0, 1, 2, 3), (1, 0, 2, 3))):
        init = f"file://{folder}/{number}"
        dist.init_process_group("gloo", init_method=init, rank=numbers[rank], world_size=world_size)
        mesh = make_mesh(2, 2)
        limits = distlion.Timeouts(init_s=10, step_s=10)
        make_optimizer(shard(build(), mesh["shard"]), mesh, timeouts=limits)
        dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_that_had_other_numbers_find_each_other(tmp_path: Path) -> None:
    run_workers(meet_twice, 4, str(tmp_path), process_group=False)
