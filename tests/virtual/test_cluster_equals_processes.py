"""N virtual workers have the parameters and momenta of N real processes, to the bit."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
import matrix
from cluster import run_workers
from distlion import ClipNorm, MomentumSync
from distlion.step import Diagnosis
from distlion.virtual import VirtualCluster
from drawn import draw_grads, make_params
from tiers import in_tiers

pytestmark = pytest.mark.distributed

STEPS = 8
WORLD_SIZES = (1, 2, 3, 4, 5)
# 4,133 is a prime above 4,096: a quantized vote's second, shorter block.
SHAPES = {"a": (4133,), "b": (3, 701), "c": (1,), "d": (130,)}

SAMPLE = {**matrix.LISTED, **matrix.VARIANTS}
SYNCS: dict[str, MomentumSync | None] = {
    "no sync": None,
    "all": MomentumSync(every=6),
    "bfloat16": MomentumSync(every=5, dtype=torch.bfloat16),
    "by name": MomentumSync(every=3, select=("b", "d")),
}


@dataclass(frozen=True)
class Case:
    """What both kinds of workers train."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    bad_grad: float | None = None
    orthogonalize: bool = False


RULE_CASES = [Case(name, {"aggregation": rule}) for name, rule in SAMPLE.items()]
SYNC_CASES = [
    Case(name, {"momentum_sync": sync, "aggregation": distlion.QuantizedVote(bits=2)})
    for name, sync in SYNCS.items()
    if sync is not None
]
OTHER_CASES = [
    Case("clip worker", {"clip_norm": ClipNorm(1.5)}),
    Case("clip global", {"clip_norm": ClipNorm(1.5, scope="global")}),
    Case("skip", {"nonfinite": "skip"}, bad_grad=float("nan")),
    Case(
        "skip with sync and diagnosis",
        {
            "nonfinite": "skip",
            "momentum_sync": MomentumSync(every=2),
            "agreement": distlion.Agreement(every=2),
        },
        bad_grad=float("nan"),
    ),
    Case("abstain", {"nonfinite": "abstain"}, bad_grad=float("inf")),
    Case(
        "abstain with sync",
        {"nonfinite": "abstain", "momentum_sync": MomentumSync(every=3)},
        bad_grad=float("inf"),
    ),
    *(
        Case(
            f"feedback, {nonfinite}",
            {"nonfinite": nonfinite, "aggregation": distlion.FeedbackVote()},
            bad_grad=float("nan"),
        )
        for nonfinite in ("skip", "abstain")
    ),
    Case(
        "feedback, small buckets",
        {
            "bucket_elements": 100,
            "clip_norm": ClipNorm(1.5),
            "aggregation": distlion.FeedbackVote(),
        },
    ),
    Case(
        "feedback, bfloat16",
        {
            "precision": distlion.Precision(rounding="stochastic"),
            "aggregation": distlion.FeedbackVote(),
            "agreement": distlion.Agreement(every=4),
        },
        torch.bfloat16,
    ),
    Case(
        "diagnosed", {"agreement": distlion.Agreement(every=3), "aggregation": distlion.Average()}
    ),
    *(
        Case(
            f"cautious {name}",
            {
                "cautious": True,
                "aggregation": SAMPLE[name],
                "agreement": distlion.Agreement(every=5),
            },
        )
        for name in matrix.first_of_each_class()
    ),
    Case("small buckets", {"bucket_elements": 100, "seed": 5}),
    Case(
        "bfloat16 parameters",
        {"precision": distlion.Precision(exp_avg=torch.float32, rounding="stochastic")},
        torch.bfloat16,
    ),
    Case("bfloat16 momenta", {"momentum_sync": MomentumSync(every=4)}, torch.bfloat16),
    Case(
        "orthogonalized, averaged and diagnosed",
        {"momentum_sync": MomentumSync(every=3), "agreement": distlion.Agreement(every=2)},
        orthogonalize=True,
    ),
    Case("orthogonalized, clip worker", {"clip_norm": ClipNorm(1.5)}, orthogonalize=True),
    Case(
        "orthogonalized, clip global",
        {"clip_norm": ClipNorm(1.5, scope="global"), "nonfinite": "skip"},
        bad_grad=float("inf"),
        orthogonalize=True,
    ),
    Case(
        "orthogonalized, excluded",
        {
            "agreement": distlion.Agreement(every=1, on_disagreement="exclude"),
            "nonfinite": "abstain",
        },
        bad_grad=float("nan"),
        orthogonalize=True,
    ),
]
CASES = RULE_CASES + SYNC_CASES + OTHER_CASES
QUICK = (*matrix.first_of_each_class(), *(case.name for case in OTHER_CASES[::2]), "by name")


def set_grads(params: dict[str, nn.Parameter], case: Case, worker: int, step: int) -> None:
    """Give a worker its gradients: sometimes 0, sometimes absent, sometimes not finite."""
    grads = draw_grads(params.values(), worker, step)
    for number, (param, grad) in enumerate(zip(params.values(), grads, strict=True)):
        grad[grad.abs() < 0.1] = 0
        param.grad = None if (worker + step + number) % 9 == 4 else grad
    if case.bad_grad is not None and step % 6 == 2 and worker == step % 3:
        spoiled = params["b" if case.orthogonalize else "d"]
        spoiled.grad = torch.full_like(spoiled, case.bad_grad)


def make_groups(params: dict[str, nn.Parameter], case: Case) -> list[dict[str, Any]]:
    """Return a group of all, or one for each parameter, the matrix orthogonalized."""
    if not case.orthogonalize:
        return [{"params": list(params.items())}]
    return [
        {"params": [(name, param)], "orthogonalize": param.ndim == 2}
        for name, param in params.items()
    ]


def hyperparameters(case: Case) -> dict[str, Any]:
    return {"lr": 3e-3, "weight_decay": 0.1, **case.arguments}


Result = tuple[list[Tensor], list[Tensor], int, list[Diagnosis]]


def train_really(rank: int, world_size: int, case: Case) -> tuple[Result, int]:
    params = make_params(SHAPES, dtype=case.dtype)
    optimizer = distlion.DistributedLion(
        make_groups(params, case), exchange=distlion.AllReduce(), **hyperparameters(case)
    )
    for step in range(STEPS):
        set_grads(params, case, rank, step)
        planned, before = optimizer.plan, optimizer.committed_step
        optimizer.step()
        if optimizer.committed_step > before:
            assert optimizer.traffic.last_sent_bytes == planned.sent_bytes
            assert optimizer.traffic.last_messages == planned.messages
    momenta = [kept for param in params.values() for kept in optimizer.state[param].values()]
    values = [param.detach() for param in params.values()]
    found = optimizer.diagnostics()
    return (values, momenta, optimizer.committed_step, found), optimizer.traffic.sent_bytes


def train_all(rank: int, world_size: int, cases: list[Case]) -> dict[str, tuple[Result, int]]:
    return {case.name: train_really(rank, world_size, case) for case in cases}


def train_virtually(case: Case, workers: int) -> tuple[VirtualCluster, list[Tensor]]:
    params = make_params(SHAPES, dtype=case.dtype)
    cluster = VirtualCluster(make_groups(params, case), workers=workers, **hyperparameters(case))
    for step in range(STEPS):
        for worker in range(workers):
            set_grads(params, case, worker, step)
            cluster.collect(worker)
            assert all(param.grad is None for param in params.values())
        cluster.step()
    return cluster, [param.detach() for param in params.values()]


@functools.cache
def trained(workers: int, is_quick: bool) -> list[dict[str, tuple[Result, int]]]:
    """Return for each rank what it has at the end of each case of a tier."""
    cases = [case for case in CASES if (case.name in QUICK) == is_quick]
    return run_workers(train_all, workers, cases, timeout_s=300, measured=workers == 3)


def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("workers", "name"),
    in_tiers(
        itertools.product(WORLD_SIZES, [case.name for case in CASES]),
        lambda one: one[0] == 3 and one[1] in QUICK,
    ),
)
def test_virtual_workers_equal_real_ones(workers: int, name: str) -> None:
    (case,) = (each for each in CASES if each.name == name)
    real = trained(workers, name in QUICK)

    cluster, values = train_virtually(case, workers)

    for worker in range(workers):
        (real_values, real_momenta, committed, found), _ = real[worker][name]
        assert cluster.committed_step == committed
        assert cluster.diagnostics() == found
        assert all(map(torch.equal, values, real_values))
        kept = [kept[worker] for state in cluster.state.values() for kept in state.values()]
        assert len(kept) == len(real_momenta)
        assert all(map(torch.equal, kept, real_momenta))
    assert cluster.traffic.sent_bytes == real[-1][name][1]
