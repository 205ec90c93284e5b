"""A program that sets torch's default dtype or device trains to the same bits as one that doesn't.

A model states its own dtype and device here, as one that was loaded does. The default device is
"meta", so that arithmetic with a tensor made there fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
import distlion_flower
from cluster import run_workers
from distlion.votes import Aggregation
from drawn import draw_grads, make_params, set_grads

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SHAPES: dict[str, int | tuple[int, ...]] = {"p0": (70, 5), "p1": (5,), "p2": (1100,)}
STEPS = 3

RULES: tuple[Aggregation, ...] = (
    distlion.MajorityVote(),
    distlion.TernaryVote(),
    distlion.MaskedVote(),
    distlion.Average(),
    distlion.QuantizedVote(bits=3),
    distlion.QuantizedVote(bits=4, norm="linf"),
    distlion.FeedbackVote(1),
    distlion.FeedbackVote(2),
    distlion.FullPrecision(),
    distlion.FullPrecision(torch.bfloat16),
)

DELTA_RULES: tuple[Aggregation, ...] = (
    distlion.ScaledVote(),
    distlion.StochasticVote(),
    distlion.ResidualVote(2),
    distlion.EstimateVote(2),
)

Program = Callable[[int, Path], Iterable[Tensor]]


def vote(
    rank: int, folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Tensor]:
    """Train by votes, with an option."""
    params = make_params(SHAPES, dtype=dtype)
    optimizer = distlion.DistributedLion(
        params.items(), lr=1e-2, **{"exchange": distlion.AllReduce(), **options}
    )
    train(optimizer, params, rank)
    agreement = [each.agreement for each in optimizer.diagnostics()]
    momenta = [optimizer.state[param]["exp_avg"] for param in params.values()]
    return [*params.values(), *momenta, torch.tensor(agreement, dtype=torch.float64, device="cpu")]


def vote_by_all_rules(rank: int, folder: Path) -> list[Tensor]:
    """Train with a group for each rule."""
    params, groups = group_by_rule()
    train(distlion.DistributedLion(groups, lr=1e-2), params, rank)
    return list(params.values())


def group_by_rule() -> tuple[dict[str, nn.Parameter], list[dict[str, Any]]]:
    """Return parameters, and a group for each rule."""
    params = make_params({str(rule): 70 + number for number, rule in enumerate(RULES)})
    return params, [
        {"params": [(name, param)], "aggregation": rule}
        for rule, (name, param) in zip(RULES, params.items(), strict=True)
    ]


def train(optimizer: distlion.DistributedLion, params: dict[str, nn.Parameter], rank: int) -> None:
    """Take steps with gradients of a backward pass."""
    for step in range(STEPS):
        grads = draw_grads(params.values(), rank, step)
        losses = [(p * g).sum() for p, g in zip(params.values(), grads, strict=True)]
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.verify_replicas()


def go_local(rank: int, folder: Path, *, inner: str = "sgd", **options: Any) -> list[Tensor]:
    """Train by local steps."""
    params = make_params(SHAPES)
    own: torch.optim.Optimizer = distlion.Lion(params.values(), lr=1e-3)
    if inner == "sgd":
        own = torch.optim.SGD(params.values(), lr=1e-2, momentum=0.9)
    optimizer = distlion.LocalSteps(own, every=2, exchange=distlion.AllReduce(), **options)
    for step in range(STEPS):
        set_grads(params.values(), rank, step)
        optimizer.step()
    optimizer.vote()
    optimizer.verify_replicas()
    return [*params.values(), *optimizer.common_point]


def save_and_load(rank: int, folder: Path, *, is_local: bool) -> list[Tensor]:
    """Go on from a checkpoint, and mean the buffers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        modules = [
            nn.Sequential(
                nn.Linear(6, 4, device="cpu", dtype=torch.float32),
                nn.BatchNorm1d(4, device="cpu", dtype=torch.float32),
            )
            for _ in range(2)
        ]
    for number, model in enumerate(modules):
        optimizer: Any = (
            distlion.LocalSteps(distlion.Lion(model.parameters(), lr=1e-3), every=3)
            if is_local
            else distlion.DistributedLion(model.parameters(), aggregation=distlion.FeedbackVote())
        )
        if number:
            distlion.load_checkpoint(folder, model, optimizer)
        for step in range(2):
            set_grads(model.parameters(), rank, step)
            optimizer.step()
        mean = model[1].running_mean
        assert isinstance(mean, Tensor)
        mean += rank
        distlion.average_buffers(model)
        distlion.save_checkpoint(folder, model, optimizer).wait()
    return [*model.parameters(), *model.buffers()]


def step_alone(rank: int, folder: Path) -> list[Tensor]:
    """Train virtual workers, with a group for each rule."""
    params, groups = group_by_rule()
    cluster = distlion.VirtualCluster(
        groups,
        lr=1e-2,
        workers=3,
        clip_norm=distlion.ClipNorm(1.0, scope="global"),
        agreement=distlion.Agreement(every=1),
    )
    for step in range(STEPS):
        for worker in range(3):
            set_grads(params.values(), worker, step)
            cluster.collect(worker)
        cluster.step()
    return list(params.values())


def serve(rank: int, folder: Path, *, rule: str) -> list[Tensor]:
    """Train clients of a server."""
    params = make_params(SHAPES)
    clients = distlion_flower.VirtualClients(params.items(), clients=5, lr=0.5, rule=rule)
    for round_ in range(2):
        for client in clients.draw(3):
            grads = draw_grads(params.values(), client, round_)
            with torch.no_grad():
                for param, grad in zip(params.values(), grads, strict=True):
                    param.sub_(grad, alpha=0.1)
            clients.collect(client, n_examples=1 + client)
        clients.step()
    return list(params.values())


def go_local_alone(rank: int, folder: Path) -> list[Tensor]:
    """Train virtual workers of local steps."""
    params = make_params(SHAPES)
    make_inner = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
    cluster = distlion.VirtualLocalSteps(params.values(), make_inner, workers=2, every=2)
    for step in range(STEPS):
        for worker in range(2):
            set_grads(params.values(), worker, step)
            cluster.collect(worker)
        cluster.step()
    return list(params.values())


PROGRAMS: dict[str, Program] = {
    "all rules": vote_by_all_rules,
    "overlap": partial(vote, overlap=True, bucket_elements=200),
    "clipping": partial(vote, clip_norm=distlion.ClipNorm(1.0, scope="global")),
    "diagnostics": partial(
        vote, agreement=distlion.Agreement(every=1), replicas=distlion.Replicas(check_every=1)
    ),
    "means": partial(vote, momentum_sync=distlion.MomentumSync(every=2)),
    "means in 16 bits": partial(
        vote, momentum_sync=distlion.MomentumSync(every=2, dtype=torch.bfloat16)
    ),
    "nodes": partial(vote, nodes=distlion.Nodes(ranks_per_node=2)),
    "weights": partial(vote, weight=3, exchange=distlion.AllGather()),
    "server": partial(vote, exchange=distlion.ParameterServer()),
    "doubling": partial(vote, exchange=distlion.RecursiveDoubling()),
    "16 bits": partial(
        vote, dtype=torch.bfloat16, precision=distlion.Precision(rounding="stochastic")
    ),
    "half": partial(vote, dtype=torch.float16),
    "auto": partial(vote, exchange="auto"),
    **{f"local {rule}": partial(go_local, aggregation=rule) for rule in DELTA_RULES},
    "local Lion": partial(go_local, inner="lion", outer_momentum=0.5, nesterov=True),
    "local, on the CPU": partial(
        go_local, agreement=distlion.Agreement(every=1), common_device="cpu"
    ),
    "checkpoint": partial(save_and_load, is_local=False),
    "local checkpoint": partial(save_and_load, is_local=True),
    "virtual workers": step_alone,
    **{f"clients, {rule}": partial(serve, rule=rule) for rule in ("majority", "residual")},
    "virtual local steps": go_local_alone,
}

DEFAULTS = {
    "torch's own": (torch.float32, None),
    "float64": (torch.float64, "meta"),
    "bfloat16": (torch.bfloat16, "meta"),
}


def summarize(program: Program, rank: int, folder: Path) -> str:
    """Run a program, and return a text that tells its bits from others."""
    try:
        ended = [each.detach() for each in program(rank, folder)]
    except Exception as error:  # the other rank raises the same
        return f"{type(error).__name__}: {error}"
    return " ".join(
        f"{each.dtype} {sha256(each.view(-1).view(torch.uint8).numpy()).hexdigest()}"
        for each in ended
    )


def run_all(rank: int, world_size: int, folder: str) -> dict[str, list[str]]:
    """Run all programs under all defaults; return those that differ, by program."""
    differing: dict[str, list[str]] = {}
    expected: dict[str, str] = {}
    for default, (dtype, device) in DEFAULTS.items():
        for name, program in PROGRAMS.items():
            torch.set_default_dtype(dtype)
            torch.set_default_device(device)
            try:
                found = summarize(program, rank, Path(folder) / default / name)
            finally:
                torch.set_default_dtype(torch.float32)
                torch.set_default_device(None)
            if found != expected.setdefault(name, found) or "Error" in found[:40]:
                differing.setdefault(name, []).append(f"{default}: {found[:300]}")
    return differing


def test_defaults_of_torch_change_no_bit(tmp_path: Path) -> None:
    for differing in run_workers(run_all, 2, str(tmp_path), timeout_s=300):
        assert differing == {}
