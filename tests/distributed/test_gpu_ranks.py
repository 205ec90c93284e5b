"""Workers with a GPU beside workers without one: the same bits, and one wait for each bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
import matrix
from backends import INTERPRETS
from cluster import run_workers
from tiers import in_tiers

pytestmark = pytest.mark.skipif(not INTERPRETS, reason="runs where TRITON_INTERPRET=1")

SIZES = (70, 4200, 1, 513)
MANY_STEPS, FEW_STEPS = 20, 3
"""Interpreted kernels are slow: the quick tier takes a few steps."""


def draw(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def train(
    rank: int,
    world_size: int,
    params: list[nn.Parameter],
    place: Any,
    settings: dict[str, Any],
    n_steps: int,
) -> distlion.DistributedLion:
    dtype = params[0].dtype
    optimizer = distlion.DistributedLion(params, lr=1e-2, weight_decay=0.1, **settings)
    for step in range(n_steps):
        grads = [place(grad) for grad in draw(100 * step + rank, dtype)]
        sum((param * grad).sum() for param, grad in zip(params, grads, strict=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.verify_replicas()
    return optimizer


def train_somewhere(
    rank: int,
    world_size: int,
    on_gpu: tuple[int, ...],
    settings: dict[str, Any],
    dtype: torch.dtype,
    n_steps: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters and momenta after some steps, on a GPU for the ranks ``on_gpu``."""
    values = draw(7 + rank, dtype)
    if rank not in on_gpu:
        params = [nn.Parameter(value) for value in values]
        optimizer = train(rank, world_size, params, lambda grad: grad, settings, n_steps)
        return [p.detach() for p in params], [optimizer.state[p]["exp_avg"] for p in params]
    from pretend_cuda import pretend_cuda

    with pretend_cuda() as device:
        params = [nn.Parameter(device.place(value)) for value in values]
        optimizer = train(rank, world_size, params, device.place, settings, n_steps)
        assert device.launches, "nothing was computed on the device"
        assert all(param.device.type == "cuda" for param in params)
        return [p.detach().cpu() for p in params], [
            optimizer.state[p]["exp_avg"].cpu() for p in params
        ]


@pytest.mark.parametrize(
    ("rule", "n_steps", "overlap"),
    in_tiers(
        [
            (distlion.MajorityVote(), FEW_STEPS, True),
            *(
                (rule, MANY_STEPS, each)
                for rule in matrix.LISTED.values()
                for each in (False, True)
            ),
        ],
        lambda case: case[1] == FEW_STEPS,
    ),
)
def test_ranks_with_and_without_a_gpu_train_together(
    rule: Any, n_steps: int, overlap: bool
) -> None:
    settings = {"aggregation": rule, "overlap": overlap}
    if overlap:
        settings["bucket_elements"] = 600
    mixed, host = (
        run_workers(
            train_somewhere,
            3,
            on_gpu,
            settings,
            torch.float32,
            n_steps,
            timeout_s=300,
        )
        for on_gpu in ((0, 2), ())
    )
    for ours, theirs in zip(mixed, host, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert all(map(torch.equal, one, other))


OTHERS: dict[str, dict[str, Any]] = {
    "nodes": {"nodes": distlion.Nodes(ranks_per_node=2)},
    "nodes, overlap": {
        "nodes": distlion.Nodes(ranks_per_node=2),
        "overlap": True,
        "bucket_elements": 600,
    },
    "momenta": {"momentum_sync": distlion.MomentumSync(every=3)},
    "momenta in 16 bits": {"momentum_sync": distlion.MomentumSync(every=3, dtype=torch.bfloat16)},
    "clipping": {"clip_norm": distlion.ClipNorm(0.5, scope="global")},
    "clipping in nodes": {
        "clip_norm": distlion.ClipNorm(0.5),
        "nodes": distlion.Nodes(ranks_per_node=2),
    },
    "all-gather": {"exchange": distlion.AllGather()},
    "server": {"exchange": distlion.ParameterServer()},
    "diagnoses": {"agreement": distlion.Agreement(every=5)},
    "stochastic": {"precision": distlion.Precision(rounding="stochastic")},
}


@pytest.mark.parametrize(
    ("name", "n_steps"),
    in_tiers(
        [("nodes", FEW_STEPS), *((name, MANY_STEPS) for name in OTHERS)],
        lambda case: case[1] == FEW_STEPS,
    ),
)
def test_everything_else_a_step_does_has_the_same_bits_too(name: str, n_steps: int) -> None:
    settings = OTHERS[name]
    dtype = torch.bfloat16 if name in ("stochastic", "momenta") else torch.float32
    mixed, host = (
        run_workers(train_somewhere, 4, on_gpu, settings, dtype, n_steps, timeout_s=300)
        for on_gpu in ((0, 1, 3), ())
    )
    for ours, theirs in zip(mixed, host, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert all(map(torch.equal, one, other))


SHAPES = ((70, 80), (90, 100), (110, 60))
"""Of one shape each, so that products have one matrix wherever it is; two are cut in a node."""


def draw_matrices(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train_matrices(
    rank: int, world_size: int, size: int, on_gpu: tuple[int, ...]
) -> tuple[list[Tensor], set[torch.dtype]]:
    """Train nodes of some ranks, or single workers with their mean gradients."""
    from distlion.step.cut_matrices import CutMatrices
    from pretend_cuda import pretend_cuda

    with pretend_cuda() as device:
        place = device.place if rank in on_gpu else torch.clone
        params = [nn.Parameter(place(value)) for value in draw_matrices(7)]
        group = {"params": params, "orthogonalize": True}
        nodes = distlion.Nodes(ranks_per_node=size)
        optimizer = distlion.DistributedLion([group], lr=1e-2, nodes=nodes)
        for step in range(2):
            grads = [
                draw_matrices(100 * step + each)
                for each in ([rank] if size > 1 else [2 * rank, 2 * rank + 1])
            ]
            for param, *own in zip(params, *grads, strict=True):
                param.grad = place(sum(own[1:], own[0]) / len(own))
            optimizer.step()
        optimizer.verify_replicas()
        cut = [bucket.matrices for bucket in optimizer._session.routing.buckets]
        dtypes = {each.dtype for each in cut if isinstance(each, CutMatrices)}
        return [param.detach().cpu() for param in params], dtypes


@pytest.mark.slow
@pytest.mark.parametrize("on_gpu", [(0, 1, 2, 3), (0, 1, 3)])
def test_matrices_that_are_cut_in_nodes_are_whole_on_gpus(on_gpu: tuple[int, ...]) -> None:
    found = run_workers(train_matrices, 4, 2, on_gpu, timeout_s=120)
    for params, _ in found[1:]:
        assert all(map(torch.equal, params, found[0][0]))
    if len(on_gpu) < 4:  # a product on a CPU is another one, and needs float32
        assert [dtypes for _, dtypes in found[2:]] == [{torch.float32}] * 2
        return
    assert [dtypes for _, dtypes in found] == [{torch.bfloat16}] * 4
    for params, _ in run_workers(train_matrices, 2, 1, on_gpu, timeout_s=120):
        assert all(map(torch.equal, params, found[0][0]))


def repair_somewhere(rank: int, world_size: int) -> list[Tensor]:
    """Spoil the replica of rank 1, which is on a GPU, and let the others repair it."""
    from pretend_cuda import pretend_cuda

    with pretend_cuda() as device:
        values = draw(7)
        params = [nn.Parameter(device.place(value) if rank else value) for value in values]
        optimizer = distlion.DistributedLion(
            params, lr=1e-2, replicas=distlion.Replicas(on_mismatch="repair")
        )
        if rank == 1:
            with torch.no_grad():
                params[1][17] += 1
        optimizer.verify_replicas()
        return [param.detach().cpu() for param in params]


def test_a_replica_on_a_gpu_is_repaired() -> None:
    for params in run_workers(repair_somewhere, 3):
        assert all(map(torch.equal, params, draw(7)))


def change_clusters(
    rank: int, world_size: int, on_gpu: bool, settings: dict[str, Any], folder: str
) -> list[Tensor]:
    """Return what virtual workers come to, half of the way after a checkpoint."""
    from pretend_cuda import pretend_cuda

    with pretend_cuda() as device:
        place = device.place if on_gpu else torch.clone
        clusters = []
        for _ in range(2):
            params = [nn.Parameter(place(value)) for value in draw(7)]
            clusters.append(
                (distlion.VirtualCluster(params, workers=4, lr=1e-2, **settings), params)
            )
        for step in range(6):
            cluster, params = clusters[step // 3]
            if step == 3:
                distlion.save_checkpoint(folder, nn.ParameterList(clusters[0][1]), clusters[0][0])
                distlion.load_checkpoint(folder, nn.ParameterList(params), cluster)
            for worker in range(4):
                for param, grad in zip(params, draw(100 * step + worker), strict=True):
                    param.grad = place(grad)
                cluster.collect(worker)
            cluster.step()
        assert bool(device.launches) == on_gpu
        return [param.detach().cpu() for param in params]


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=pytest.mark.slow) for rule in matrix.LISTED.values()]
)
def test_virtual_workers_on_a_gpu_have_the_bits_of_the_host(rule: Any, tmp_path: Path) -> None:
    settings = {"aggregation": rule, "momentum_sync": distlion.MomentumSync(every=2)}
    rows = [
        run_workers(
            change_clusters, 1, on_gpu, settings, str(tmp_path / str(on_gpu)), process_group=False
        )[0]
        for on_gpu in (True, False)
    ]
    assert all(map(torch.equal, *rows))


def step_lion(rank: int, world_size: int, on_gpu: bool) -> tuple[list[Tensor], list[str]]:
    from pretend_cuda import pretend_cuda

    with pretend_cuda() as device:
        place = device.place if on_gpu else torch.clone
        params = [nn.Parameter(place(value)) for value in draw(7)]
        optimizer = distlion.Lion(params, lr=1e-2, weight_decay=0.1)
        for step in range(5):
            for param, grad in zip(params, draw(step), strict=True):
                param.grad = place(grad)
            optimizer.step()
        waits = list(device.waits)
        return [param.detach().cpu() for param in params], waits


def test_lion_alone_on_a_gpu_has_the_bits_of_the_host_and_never_waits() -> None:
    (there, waits), (here, _) = (
        run_workers(step_lion, 1, on_gpu, process_group=False)[0] for on_gpu in (True, False)
    )
    assert all(map(torch.equal, there, here))
    # At construction, whether denormals are kept.
    assert waits == ["__bool__"]
