"""The parts of a bucket with nodes: their patterns, their replies, their place in a parameter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import distlion
import distlion.wire
from cluster import run_workers
from distlion.peers import routing
from distlion.wire import gloo
from drawn import set_grads
from failures import params_of
from replay import run_backward

pytestmark = pytest.mark.distributed

UNIT = 4096
N_BUCKETS = 4
"""In the fourth one a node's gradients are averaged, which may be before replies on the first."""


def measure_differently(rank: int, world_size: int) -> tuple[int, int]:
    """Let each part of the nodes measure another link: buckets must be the same all the same."""
    models = [distlion.wire.LinkModel(1e-5, 1e6), distlion.wire.LinkModel(1e-2, 1e9)]
    routing.probe_link = lambda link, step: models[rank % 2]
    params = [torch.nn.Parameter(torch.zeros(UNIT)) for _ in range(2)]
    optimizer = distlion.DistributedLion(
        params, nodes=distlion.Nodes(ranks_per_node=2), overlap=True
    )
    run_backward(optimizer, [np.ones(p.numel(), np.float32) for p in params_of(optimizer)])
    optimizer.step()
    return len(optimizer._session.routing.buckets), optimizer.committed_step


def test_parts_that_measure_different_links_choose_the_same_buckets() -> None:
    outcomes = run_workers(measure_differently, 4)
    assert len(set(outcomes)) == 1
    assert outcomes[0][1] == 1


def diagnose(rank: int, world_size: int) -> list[float]:
    """Diagnose a vote of whole directions, which agrees with global Lion wherever it is read."""
    params = [("first", torch.nn.Parameter(torch.zeros(2 * UNIT)))]
    optimizer = distlion.DistributedLion(
        params,
        lr=1e-3,
        aggregation=distlion.FullPrecision(),
        nodes=distlion.Nodes(ranks_per_node=2),
        agreement=distlion.Agreement(every=1),
    )
    set_grads([params[0][1]], rank, 0)
    optimizer.step()
    return [found.agreement for found in optimizer.diagnostics()]


def test_each_rank_of_a_node_reads_the_reply_on_its_own_piece() -> None:
    assert run_workers(diagnose, 4) == [[1.0]] * 4


def step_with_unequal_parts(rank: int, world_size: int) -> tuple[int, set[str]]:
    """Step where a node's parts differ in size so much that each would have another pattern."""
    routing.probe_link = lambda link, step: distlion.wire.LinkModel(1e-4, 1e7)
    params = [(str(index), torch.nn.Parameter(torch.ones(UNIT))) for index in range(5)]
    optimizer = distlion.DistributedLion(
        params,
        lr=1e-3,
        nodes=distlion.Nodes(ranks_per_node=2),
        bucket_elements=1,
        timeouts=distlion.Timeouts(step_s=20),
    )
    for _, param in params:
        param.grad = torch.ones(UNIT)
    optimizer.step()
    patterns = {
        repr(part.pattern) for bucket in optimizer._session.routing.buckets for part in bucket.parts
    }
    return optimizer.committed_step, patterns


@pytest.mark.slow
def test_parts_of_a_bucket_have_one_pattern() -> None:
    outcomes = run_workers(step_with_unequal_parts, 8)
    assert [committed for committed, _ in outcomes] == [1] * 8
    assert all(patterns == outcomes[0][1] for _, patterns in outcomes)


def step_with_large_and_small_parts(rank: int, world_size: int) -> tuple[list[list[bool]], int]:
    """Step with buckets that are large messages of a node's first rank, and small of its second."""
    gloo.MOST_BYTES_AT_ONCE = most_bytes = 4096
    sizes = [UNIT, 1] * 12 * N_BUCKETS  # the ranks of a node take turns
    params = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    optimizer = distlion.DistributedLion(
        params,
        lr=1e-3,
        aggregation=distlion.FullPrecision(),
        nodes=distlion.Nodes(ranks_per_node=2),
        exchange=distlion.AllReduce(),
        bucket_elements=12 * (UNIT + 64),
        timeouts=distlion.Timeouts(step_s=20),
    )
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    shapes = [
        [part.vote.shape for part in bucket.parts] for bucket in optimizer._session.routing.buckets
    ]
    are_large = [
        [min(shape.vote_chunk.n_bytes, shape.reply_chunk.n_bytes) > most_bytes for shape in bucket]
        for bucket in shapes
    ]
    return are_large, optimizer.committed_step


def test_ranks_of_a_node_take_part_in_exchanges_of_any_size_in_one_order() -> None:
    expected = [[True, False]] * N_BUCKETS, 1
    assert run_workers(step_with_large_and_small_parts, 4) == [expected] * 4


def move_transposed(rank: int, world_size: int, transposed: bool) -> list[torch.Tensor]:
    """Train a parameter that is stored row by row, or the same one stored column by column."""
    start = torch.linspace(-1, 1, 3 * UNIT).view(UNIT, 3)
    param = torch.nn.Parameter(start.t().contiguous().t() if transposed else start.clone())
    assert param.is_contiguous() is not transposed
    optimizer = distlion.DistributedLion([param], lr=1e-2, nodes=distlion.Nodes(ranks_per_node=2))
    for step in range(3):
        set_grads([param], rank, step)
        optimizer.step()
    return [param.detach().contiguous(), start]


def test_a_parameter_stored_otherwise_moves_alike_in_all_its_pieces() -> None:
    expected = run_workers(move_transposed, 4, False)
    for rank, (found, start) in enumerate(run_workers(move_transposed, 4, True)):
        assert torch.equal(found, expected[rank][0])
        assert (found != start).all()
