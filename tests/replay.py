"""One run, told once and played twice: by the numpy oracle and by DistributedLion."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import distlion
import matrix
import oracle
from distlion.votes import Aggregation
from distlion.wire import Exchange

INITIAL_KEY = 1 << 20
SIMPLE_SIZES = (1, 65, 300)


@dataclass(frozen=True)
class GroupSpec:
    """A parameter group; ``sizes`` in coordinates, a size of 1 makes a 0-dim parameter.

    With ``rows`` its parameters are matrices whose directions are orthogonalized.
    """

    rule: Aggregation
    sizes: tuple[int, ...]
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    dtype: str = "float32"
    cautious: bool = False
    rows: int = 0


@dataclass(frozen=True)
class Case:
    """A run. ``options`` are further keyword arguments of DistributedLion."""

    name: str
    groups: tuple[GroupSpec, ...]
    steps: int = 50
    seed: int = 0
    absent: bool = False
    rounding: str = "nearest"
    exp_avg_dtype: str | None = None
    exchange: Exchange | str = "auto"
    bucket_elements: int | None = None
    overlap: bool | str = False
    micro_steps: int = 1
    weights: tuple[int, ...] | None = None

    @property
    def sizes(self) -> list[int]:
        return [n for group in self.groups for n in group.sizes]

    @property
    def dtypes(self) -> list[str]:
        return [group.dtype for group in self.groups for _ in group.sizes]


@dataclass(frozen=True)
class Outcome:
    """Parameters and momenta after a run, as float32 arrays; ``error`` where it ended early."""

    params: list[oracle.F32]
    exp_avgs: list[oracle.F32]
    error: str | None = None


def simple_case(**settings: Any) -> Case:
    """Return a short run of one group under majority vote, with gradients missing now and then."""
    group = GroupSpec(
        distlion.MajorityVote(),
        SIMPLE_SIZES,
        lr=2e-3,
        weight_decay=0.1,
        dtype=settings.pop("dtype", "float32"),
    )
    return Case("simple", (group,), seed=21, absent=True, **settings)


def initial_values(case: Case) -> list[oracle.F32]:
    return [
        oracle.values(case.seed, INITIAL_KEY + index, n=n, dtype=dtype)
        for index, (n, dtype) in enumerate(zip(case.sizes, case.dtypes, strict=True))
    ]


def worker_grads(case: Case, step: int, rank: int) -> list[oracle.F32 | None]:
    """Return the gradients of one worker.

    The second quarter of a parameter cancels between workers 2k and 2k + 1.
    """
    grads: list[oracle.F32 | None] = []
    for index, (n, dtype) in enumerate(zip(case.sizes, case.dtypes, strict=True)):
        if case.absent and oracle.is_absent(case.seed, step, rank, index):
            grads.append(None)
            continue
        grad = oracle.gradient(case.seed, step, rank, index, n, dtype)
        opposed = slice(n // 4, n // 2)
        pair = oracle.gradient(case.seed, step, 1000 + rank // 2, index, n, dtype)
        grad[opposed] = -pair[opposed] if rank % 2 else pair[opposed]
        grads.append(grad)
    return grads


def play_oracle(case: Case, world_size: int) -> list[Outcome]:
    """Return what every worker must have at the end."""
    values = iter(initial_values(case))
    groups = [
        oracle.Group(
            [next(values) for _ in spec.sizes],
            matrix.describe_for_oracle(spec.rule),
            spec.lr,
            spec.betas,
            spec.weight_decay,
            spec.dtype,
            spec.cautious,
            spec.rows,
        )
        for spec in case.groups
    ]
    cluster = oracle.OracleCluster(
        groups,
        world_size,
        seed=case.seed,
        stochastic=case.rounding == "stochastic",
        exp_avg_dtype=case.exp_avg_dtype,
        weights=case.weights,
    )
    for step in range(case.steps):
        cluster.step([worker_grads(case, step, rank) for rank in range(world_size)])
    return [Outcome(cluster.params, cluster.exp_avgs[rank]) for rank in range(world_size)]


def make_optimizer(case: Case, *, rank: int, **options: Any) -> distlion.DistributedLion:
    """Build the optimizer of one worker.

    Only rank 0 starts from the right values: the others must receive them.
    """
    values = iter(initial_values(case))
    param_groups = []
    for spec in case.groups:
        params = []
        for n in spec.sizes:
            value = torch.from_numpy(next(values)).to(getattr(torch, spec.dtype))
            value = value if rank == 0 else torch.zeros_like(value)
            shape = (spec.rows, -1) if spec.rows else () if n == 1 else (n,)
            params.append(torch.nn.Parameter(value.reshape(shape)))
        param_groups.append(
            {
                "params": params,
                "aggregation": spec.rule,
                "lr": spec.lr,
                "betas": spec.betas,
                "weight_decay": spec.weight_decay,
                "cautious": spec.cautious,
                "orthogonalize": spec.rows > 0,
            }
        )
    defaults = {
        "exchange": case.exchange,
        "seed": case.seed,
        "precision": distlion.Precision(
            None if case.exp_avg_dtype is None else getattr(torch, case.exp_avg_dtype),
            case.rounding,
        ),
        "bucket_elements": case.bucket_elements,
        "overlap": case.overlap,
        "timeouts": distlion.Timeouts(step_s=20),
    }
    if case.weights is not None:
        defaults["weight"] = case.weights[rank]
    return distlion.DistributedLion(param_groups, **(defaults | options))


def set_grads(optimizer: torch.optim.Optimizer, grads: Sequence[oracle.F32 | None]) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p, grad in zip(params, grads, strict=True):
        p.grad = None if grad is None else torch.from_numpy(grad).to(p.dtype).reshape(p.shape)


def accumulate_grads(optimizer: distlion.DistributedLion, case: Case, step: int, rank: int) -> None:
    """Let gradients arrive through backward, in ``case.micro_steps`` passes."""
    optimizer.zero_grad()
    for micro_step in range(case.micro_steps):
        grads = worker_grads(case, step * case.micro_steps + micro_step, rank)
        if micro_step == case.micro_steps - 1:
            run_backward(optimizer, grads)
        else:
            with optimizer.no_sync():
                run_backward(optimizer, grads)


def run_backward(optimizer: torch.optim.Optimizer, grads: Sequence[oracle.F32 | None]) -> None:
    """Run a backward pass that leaves just these gradients."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    terms = [
        (p * torch.from_numpy(grad).to(p.dtype).reshape(p.shape)).sum().float()
        for p, grad in zip(params, grads, strict=True)
        if grad is not None
    ]
    if terms:
        sum(terms[1:], terms[0]).backward()


def snapshot(optimizer: torch.optim.Optimizer, error: str | None = None) -> Outcome:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return Outcome(
        [p.detach().float().reshape(-1).numpy().copy() for p in params],
        [optimizer.state[p]["exp_avg"].float().reshape(-1).numpy().copy() for p in params],
        error,
    )


def play_worker(rank: int, world_size: int, case: Case, **options: Any) -> Outcome:
    optimizer = make_optimizer(case, rank=rank, **options)
    for step in range(case.steps):
        if case.overlap or case.micro_steps > 1:
            accumulate_grads(optimizer, case, step, rank)
        else:
            set_grads(optimizer, worker_grads(case, step, rank))
        optimizer.step()
    return snapshot(optimizer)


def play_all(rank: int, world_size: int, cases: Sequence[Case]) -> dict[str, Outcome]:
    """Play several cases in one launch.

    One that raises does so on all ranks, so that the next can go on.
    """
    outcomes = {}
    for case in cases:
        try:
            outcomes[case.name] = play_worker(rank, world_size, case)
        except Exception:
            outcomes[case.name] = Outcome([], [], traceback.format_exc())
    return outcomes


def assert_equal_to_the_bit(found: Outcome, expected: Outcome, where: str) -> None:
    assert found.error is None, f"{where}: {found.error}"
    for kind in ("params", "exp_avgs"):
        pairs = zip(getattr(found, kind), getattr(expected, kind), strict=True)
        for index, (ours, theirs) in enumerate(pairs):
            differs = np.flatnonzero(oracle.bits_of(ours) != oracle.bits_of(theirs))
            assert differs.size == 0, (
                f"{where}: {kind}[{index}] of {ours.size} coordinates differs at {differs.size} "
                f"of them, first at {differs[0]}: {ours[differs[0]]!r}, "
                f"expected {theirs[differs[0]]!r}"
            )


def assert_all_equal(outcomes: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    for rank, (found, wanted) in enumerate(zip(outcomes, expected, strict=True)):
        assert_equal_to_the_bit(found, wanted, f"rank {rank}")
