"""FSDP2 parameters: bits of whole parameters, whatever the mesh."""

from __future__ import annotations

import functools
from typing import Any

import pytest

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

STEPS = 3
# Scale blocks that a shard cuts are others: those rules are compared with themselves only.
WHOLE = {
    name: rule
    for name, rule in matrix.RULES.items()
    if not isinstance(rule, distlion.QuantizedVote) or rule.bits == 1
}
MESHES = [(2, 2), (1, 4), (4, 1), (2, 3), (2, 1), (1, 2)]


def train_beside_whole(
    rank: int, world_size: int, mesh_shape: tuple[int, int], names: list[str]
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
            for step in range(STEPS):
                run_backward(model, step, rank)
                reference.step(gather_gradients(model, mesh))
                if overlap:
                    started += optimizer._peers.overlap._n_started
                optimizer.step()
                optimizer.zero_grad()
            found.append((name, overlap, reference.equals(model), started, digest(model)))
    return found


@functools.cache
def trained(mesh_shape: tuple[int, int]) -> list[list[Any]]:
    voters, shards = mesh_shape
    names = list(matrix.RULES) if mesh_shape == (2, 3) else ["majority"]
    return run_workers(train_beside_whole, voters * shards, mesh_shape, names, timeout_s=300)


@pytest.mark.parametrize(
    "mesh_shape", in_tiers([(each,) for each in MESHES], lambda case: case[0] == (2, 2))
)
class TestBits:
    def test_rules_without_scale_blocks_equal_virtual_workers_on_whole_parameters(self, mesh_shape):
        for rows in trained(mesh_shape):
            compared = [
                (name, overlap, equal) for name, overlap, equal, *_ in rows if name in WHOLE
            ]
            assert compared
            assert all(equal for *_, equal in compared), compared

    def test_replicas_are_equal(self, mesh_shape):
        _, shards = mesh_shape
        ranks = trained(mesh_shape)
        for rank, rows in enumerate(ranks):
            assert [row[-1] for row in rows] == [row[-1] for row in ranks[rank % shards]]

    def test_overlap_has_the_same_bits_and_begins_during_backward(self, mesh_shape):
        for rows in trained(mesh_shape):
            for without, with_overlap in zip(rows[::2], rows[1::2], strict=True):
                assert without[-1] == with_overlap[-1]
                assert with_overlap[3] > 0
