"""The scale of a quantized vote at its edges, where another order or precision moves a level.

Ordinary gradients hardly ever tell a scale from its neighbor in float32; these do, in real
processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import distlion
import oracle
from cluster import run_workers

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

N_COORDINATES = oracle.SCALE_BLOCK
LR = 2.0**-10


@dataclass(frozen=True)
class Edge:
    """Gradients of three workers, as {coordinate: value}; worker 0's level moves the first."""

    grads: tuple[dict[int, float], ...]
    norm: str
    step: float
    level: int
    wrong_level: int


# Worker 0 has level 64 where its scale is 1 / 4096, 63 where it is one ulp more; workers 1 and 2
# vote -63 and -65.
OTHERS_L1 = ({0: -1.0, 1: 1.05}, {0: -1.0, 1: 0.97})
SMALL_TERMS = dict.fromkeys(range(2, N_COORDINATES), 2.0 ** (-54))
MET_ONE_BY_ONE = {2**k: 2.0**-54 for k in range(1, 12)}

EDGES = {
    # 1 + 2^-24 is a tie of float32. The tree adds the small terms up before they meet the 1, and
    # tips it; from left to right each of them is lost.
    "small terms add up first": Edge(
        ({0: 1.0, 1: 2.0**-24} | SMALL_TERMS, *OTHERS_L1), "l1", 64.0, 63, 64
    ),
    # Here each small term meets the 1 alone and is lost; added up first, or exactly, they would tip
    # the tie.
    "small terms are lost one by one": Edge(
        ({0: 1.0, 1: 2.0**-24} | MET_ONE_BY_ONE, *OTHERS_L1), "l1", 64.0, 64, 63
    ),
    # 1 / (1 / 41) is 41 in double; with 1 / 41 rounded to float32 it is less.
    "reciprocal in double": Edge(
        ({0: 1.0}, {0: -0.5, 1: 1.0}, {0: -0.5, 1: 1.0}), "linf", 1 / 41, 41, 40
    ),
}


def gradient_of(edge: Edge, rank: int) -> oracle.F32:
    grad = np.zeros(N_COORDINATES, np.float32)
    for coordinate, value in edge.grads[rank].items():
        grad[coordinate] = value
    return grad


def move_once(rank: int, world_size: int, name: str) -> float:
    edge = EDGES[name]
    p = torch.nn.Parameter(torch.zeros(N_COORDINATES))
    optimizer = distlion.DistributedLion(
        [p],
        lr=LR,
        betas=(0.0, 0.0),
        aggregation=distlion.QuantizedVote(bits=8, norm=edge.norm, step=edge.step),
    )
    p.grad = torch.from_numpy(gradient_of(edge, rank))
    optimizer.step()
    return float(p.detach()[0])


@pytest.mark.parametrize("name", EDGES)
def test_level_at_the_edge_is_that_of_the_specification(name: str) -> None:
    edge = EDGES[name]
    rule = oracle.Rule("quantized", bits=8, norm=edge.norm, step=edge.step)
    votes = [
        int(oracle.quantized_votes(gradient_of(edge, r), rule, np.ones(N_COORDINATES, np.int64))[0])
        for r in range(3)
    ]
    assert votes[0] == 2 * edge.level + 1
    others = votes[1] + votes[2]
    assert np.sign(others + 2 * edge.level + 1) != np.sign(others + 2 * edge.wrong_level + 1)
    assert run_workers(move_once, 3, name) == [-LR * np.sign(sum(votes))] * 3
