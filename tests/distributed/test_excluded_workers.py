"""Real workers that disagree are left out as virtual ones are; refusals, checkpoints."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
from cluster import run_workers
from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.step.bucket import Bucket
from tiers import in_tiers

pytestmark = pytest.mark.distributed

WORKERS, FLIPPER, STEPS = 4, 1, 30
SHAPES = {"a": 200, "b": 70}
CASES: dict[str, dict[str, Any]] = {
    "majority": {},
    "ternary": {"aggregation": distlion.TernaryVote(), "clip_norm": distlion.ClipNorm(1.0)},
    "average": {"aggregation": distlion.Average(), "exchange": distlion.ParameterServer()},
    "quantized": {"aggregation": distlion.QuantizedVote(bits=2), "exchange": distlion.AllGather()},
    "doubling": {"exchange": distlion.RecursiveDoubling()},
    "overlap": {"overlap": True, "bucket_elements": 100},
    "abstain": {"nonfinite": "abstain"},
    "full": {"aggregation": distlion.FullPrecision()},
    "weights": {"weight": 2},
}


def make_params() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(size)) for name, size in SHAPES.items()}


def draw(worker: int, step: int) -> list[Tensor | None]:
    """Draw gradients; from step 25 on only the flipper has one for b."""
    common = torch.Generator().manual_seed(step)
    own = torch.Generator().manual_seed(1000 * (worker + 1) + step)
    sign = -1 if worker == FLIPPER else 1
    grads: list[Tensor | None] = [
        sign * (2 * torch.randn(size, generator=common) + torch.randn(size, generator=own))
        for size in SHAPES.values()
    ]
    return [grads[0], None] if step >= 25 and worker != FLIPPER else grads


def set_grads(params: dict[str, nn.Parameter], worker: int, step: int, name: str) -> None:
    grads = draw(worker, step)
    if name == "abstain" and (worker, step) in ((0, 3), (FLIPPER, 20)):
        grads[0] = torch.full((SHAPES["a"],), float("nan"))
    if name == "overlap":
        for param, grad in zip(params.values(), grads, strict=True):
            if grad is not None:
                (param * grad).sum().backward()
        return
    for param, grad in zip(params.values(), grads, strict=True):
        param.grad = grad


def snapshot(params: dict[str, nn.Parameter], momenta: list[Tensor]) -> list[list[float]]:
    return [each.detach().flatten().tolist() for each in (*params.values(), *momenta)]


QUICK = ("majority", "quantized", "overlap", "full")
"""Two patterns, votes that leave early, and votes that are no bits."""


def train(rank: int, world_size: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Train each case; return bits, who was left out, and whether votes had bits."""
    found, exchange = {}, Bucket.exchange
    cast: list[bool] = []

    def note(bucket: Bucket, header: Any, votes: Tensor, *rest: Any) -> Any:
        if header.step == 24:
            cast.append(bool(votes.any()))
        return exchange(bucket, header, votes, *rest)

    Bucket.exchange = note  # type: ignore[method-assign]
    for name in names:
        params, options = make_params(), CASES[name]
        optimizer = distlion.DistributedLion(
            params.items(),
            lr=0.01,
            agreement=distlion.Agreement(every=1, on_disagreement="exclude"),
            **options,
        )
        for step in range(STEPS):
            planned = optimizer.plan
            set_grads(params, rank, step, name)
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.traffic.last_sent_bytes == planned.sent_bytes
        optimizer.verify_replicas()
        momenta = [optimizer.state[param]["exp_avg"] for param in params.values()]
        excluded = [each.excluded for each in optimizer.diagnostics()]
        assert set(cast) == {rank != FLIPPER}
        found[name] = (snapshot(params, momenta), excluded)
    return found


@functools.cache
def trained(is_quick: bool) -> list[dict[str, Any]]:
    names = tuple(name for name in CASES if (name in QUICK) == is_quick)
    return run_workers(train, WORKERS, names, timeout_s=200)


def train_virtually(name: str, steps: int) -> tuple[distlion.VirtualCluster, Any]:
    options = dict(CASES[name])
    if name == "overlap":
        del options["overlap"]
    if name == "weights":
        options = {"weights": [2] * WORKERS}
    params = make_params()
    cluster = distlion.VirtualCluster(
        params.items(),
        workers=WORKERS,
        lr=0.01,
        agreement=distlion.Agreement(every=1, on_disagreement="exclude"),
        **options,
    )
    for step in range(steps):
        for worker in range(WORKERS):
            set_grads(params, worker, step, name)
            cluster.collect(worker)
        cluster.step()
    return cluster, params


@pytest.mark.parametrize("name", in_tiers(CASES, lambda name: name in QUICK))
def test_real_workers_equal_virtual_ones(name: str) -> None:
    real = trained(name in QUICK)
    cluster, params = train_virtually(name, STEPS)
    excluded = [each.excluded for each in cluster.diagnostics()]
    assert excluded[-1] == (FLIPPER,)
    for rank in range(WORKERS):
        assert real[rank][name] == (snapshot(params, cluster.exp_avg(rank)), excluded)


def test_a_momentum_goes_on_where_nobody_else_votes() -> None:
    # b stands still from step 25 on, as only the worker that is left out has a gradient for it.
    (_, b, _, momentum), _ = trained(True)[FLIPPER]["majority"]
    assert b == train_virtually("majority", 25)[1]["b"].tolist()
    replayed = torch.zeros(SHAPES["b"])
    for step in range(STEPS):
        grad = draw(FLIPPER, step)[1]
        assert grad is not None
        replayed = replayed * 0.95 + grad * (1 - 0.95)
    assert torch.allclose(torch.tensor(momentum), replayed, atol=1e-6)


def resume(rank: int, world_size: int, folder: str) -> list[Any]:
    """Save in the middle; go on, and go on from the checkpoint."""
    model = nn.Linear(20, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    ends = []
    for is_resumed in (False, True):
        optimizer = distlion.DistributedLion(
            model.named_parameters(),
            lr=0.01,
            agreement=distlion.Agreement(every=1, on_disagreement="exclude"),
        )
        first = 0
        if is_resumed:
            first = distlion.load_checkpoint(folder, model, optimizer).step
        for step in range(first, 25):
            grad = draw(rank, step)[0]
            assert grad is not None
            model.weight.grad, model.bias.grad = grad.view(10, 20), None
            optimizer.step()
            if step == 19 and not is_resumed:
                distlion.save_checkpoint(folder, model, optimizer)
        ends.append((model.weight.tolist(), optimizer.param_groups[0]["agreement"]))
        ends.append([each.excluded for each in optimizer.diagnostics()][-5:])
    return ends


def load_with_fewer(rank: int, world_size: int, folder: str) -> dict[str, float]:
    model = nn.Linear(20, 10)
    optimizer = distlion.DistributedLion(
        model.named_parameters(),
        lr=0.01,
        agreement=distlion.Agreement(every=1, on_disagreement="exclude"),
    )
    distlion.load_checkpoint(folder, model, optimizer, on_world_change="mean")
    return dict(optimizer.param_groups[0]["agreement"])


def test_a_run_resumes_with_the_same_workers_left_out() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ends = run_workers(resume, WORKERS, folder)
        for whole, gone, resumed, gone_later in ends:
            assert whole == resumed
            assert gone == gone_later == [(FLIPPER,)] * 5

        # Of other workers nobody knows who agreed.
        assert run_workers(load_with_fewer, 3, folder) == [{"0": 0.5, "1": 0.5, "2": 0.5}] * 3


def refuse(rank: int, world_size: int) -> tuple[str, str, str]:
    said = []
    for options, error in (
        ({"nodes": distlion.Nodes(ranks_per_node=2)}, UnsupportedTypeError),
        ({"aggregation": distlion.FeedbackVote()}, InvalidArgumentError),
    ):
        with pytest.raises(error) as caught:
            distlion.DistributedLion(
                make_params().items(),
                agreement=distlion.Agreement(every=1, on_disagreement="exclude"),
                **options,
            )
        said.append(str(caught.value))
    choice = "exclude" if rank else "warn"
    with pytest.raises(distlion.errors.ConfigMismatchError) as differs:
        distlion.DistributedLion(
            make_params().items(), agreement=distlion.Agreement(every=1, on_disagreement=choice)
        )
    return said[0], said[1], str(differs.value)


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    for nodes, rule, differs in run_workers(refuse, 4):
        assert "2 ranks act as one worker" in nodes
        assert "FeedbackVote" in rule
        assert "on_disagreement" in differs
