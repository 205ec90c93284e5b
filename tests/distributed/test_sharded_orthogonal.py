"""Orthogonalized matrices that are cut into shards have the bits of whole ones."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import distlion
import matrix
from cluster import run_workers
from distlion.errors import UnsupportedTypeError
from distlion.step import matrix_cuts
from distributed.orthogonal_shards import (
    Whole,
    build,
    make_groups,
    make_optimizer,
    run_backward,
    shard,
)
from distributed.sharded_models import digest, gather_gradients, load, make_mesh, save
from tiers import in_tiers

pytestmark = pytest.mark.distributed

STEPS = 3
# Their scales are other ones where shards cut a parameter, and MaskedVote is refused.
RULES = {
    name: rule
    for name, rule in matrix.RULES.items()
    if (not isinstance(rule, distlion.QuantizedVote) or rule.bits == 1)
    and not rule.worker_state
    and not isinstance(rule, distlion.MaskedVote)
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True, "bucket_elements": 300},
    "abstain": {"nonfinite": "abstain"},
}
# Shards of 3 and 4: some ranks have none of a matrix of two rows. The first in the quick tier.
CASES = [
    ((2, 2), ("overlap",)),
    *((shape, (*OPTIONS, *RULES)) for shape in ((2, 2), (2, 3), (1, 4), (2, 1))),
]


def train_beside_whole(
    rank: int, world_size: int, shape: tuple[int, int], names: tuple[str, ...]
) -> dict[str, Any]:
    mesh, found = make_mesh(*shape), {}
    for name in names:
        model = shard(build(), mesh["shard"])
        rule = RULES.get(name, distlion.MajorityVote())
        optimizer = make_optimizer(model, mesh, aggregation=rule, **OPTIONS.get(name, {}))
        whole, begun = Whole(shape[0], aggregation=rule), 0
        for step in range(STEPS):
            run_backward(model, step, rank)
            whole.step(gather_gradients(model, mesh))
            if optimizer._session.overlap is not None:
                begun += optimizer._session.overlap._n_started
            optimizer.step()
            optimizer.zero_grad()
        found[name] = whole.find_different(model), digest(model), begun
    return found


@functools.cache
def trained(shape: tuple[int, int], names: tuple[str, ...]) -> list[dict[str, Any]]:
    return run_workers(train_beside_whole, shape[0] * shape[1], shape, names, timeout_s=300)


@pytest.mark.parametrize(("shape", "names"), in_tiers(CASES, lambda case: case == CASES[0]))
class TestBits:
    def test_shards_have_the_bits_of_whole_matrices(self, shape: Any, names: Any) -> None:
        for found in trained(shape, names):
            assert {name: different for name, (different, *_) in found.items() if different} == {}

    def test_replicas_are_equal(self, shape: Any, names: Any) -> None:
        found = trained(shape, names)
        for rank, rows in enumerate(found):
            for name, (_, bits, _) in rows.items():
                assert bits == found[rank % shape[1]][name][1], name

    def test_overlap_begins_during_backward(self, shape: Any, names: Any) -> None:
        assert all(found["overlap"][2] > 0 for found in trained(shape, names))


def train_kinds(rank: int, world_size: int) -> dict[str, list[str]]:
    """Train bfloat16, votes of weight, and gradients that workers lack; return what differs."""
    mesh, found = make_mesh(2, 2), {}
    worker = rank // 2
    for name, dtype, own, of_all in (
        ("bfloat16", torch.bfloat16, {}, {}),
        ("weights", torch.float32, {"weight": (3, 2)[worker]}, {"weights": (3, 2)}),
        ("absent", torch.float32, {}, {}),
    ):
        model = shard(build(dtype), mesh["shard"])
        optimizer = make_optimizer(model, mesh, **own)
        whole = Whole(2, dtype, **of_all)
        for step in range(STEPS):
            run_backward(model, step, rank)
            rows = gather_gradients(model, mesh)
            if name == "absent":
                odd = list(model.parameters())[2]
                # Worker 0 lacks it on one of its shards, and in the last step both workers do.
                rows[0][2] = None
                if rank == 1 or step == STEPS - 1:
                    odd.grad = None
                if step == STEPS - 1:
                    rows[1][2] = None
            whole.step(rows)
            optimizer.step()
            optimizer.zero_grad()
        found[name] = whole.find_different(model)
    return found


def test_bfloat16_weights_and_absent_gradients_have_the_bits_of_whole_matrices() -> None:
    for found in run_workers(train_kinds, 4, timeout_s=120):
        assert found == {"bfloat16": [], "weights": [], "absent": []}


def clip_and_diagnose(rank: int, world_size: int) -> tuple[list[bytes], list[float], int]:
    mesh = make_mesh(2, 2)
    model = shard(build(), mesh["shard"])
    rule = distlion.FullPrecision()
    options = {
        "clip_norm": distlion.ClipNorm(1e-3, scope="global"),
        "agreement": distlion.Agreement(every=2),
    }
    optimizer = make_optimizer(model, mesh, aggregation=rule, **options)
    inside = 0
    for step in range(STEPS):
        run_backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        inside = optimizer.traffic.node_sent_bytes
    agreed = [each.agreement for each in optimizer.diagnostics() if "weight" in each.parameter]
    return digest(model), agreed, inside


def test_clipped_steps_are_diagnosed_by_the_directions_that_were_encoded() -> None:
    found = run_workers(clip_and_diagnose, 4)
    assert found[0][0] == found[2][0]
    for _, agreed, inside in found:
        # The votes are directions in full precision: what they say is what is diagnosed.
        assert len(agreed) == 10
        assert set(agreed) == {1.0}
        assert inside > 0


class Mlp(nn.Module):
    """A block with columns and rows to cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 10), nn.Linear(10, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def train_other_placements(rank: int, world_size: int, name: str) -> bool:
    """Train shards of columns, or those of tensor parallelism; return whether bits are whole's."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = Mlp()
    if name == "columns":
        mesh = make_mesh(2, 2)
        fully_shard(model, mesh=mesh["shard"], shard_placement_fn=lambda p: Shard(p.ndim - 1))
    else:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])
    # Coins are drawn by the local element there: votes without coins.
    rule, workers = distlion.TernaryVote(), mesh["replicate"].size()
    optimizer = make_optimizer(model, mesh, aggregation=rule)
    whole = Mlp()
    settings = {"lr": 1e-2, "weight_decay": 0.1, "seed": 7, "aggregation": rule}
    cluster = distlion.VirtualCluster(make_groups(whole), workers=workers, **settings)
    for step in range(STEPS):
        torch.manual_seed(100 * step + (rank if name == "columns" else rank // 2))
        model(torch.randn(4, 8)).square().mean().backward()
        for worker, row in enumerate(gather_gradients(model, mesh)):
            for param, grad in zip(whole.parameters(), row, strict=True):
                param.grad = grad
            cluster.collect(worker)
        cluster.step()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return all(torch.equal(mine.full_tensor(), own) for mine, own in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["columns", "tensor parallelism"])
def test_shards_along_other_dims_have_the_bits_of_whole_matrices(name: str) -> None:
    assert run_workers(train_other_placements, 4, name) == [True] * 4


def train_on(model: nn.Module, optimizer: Any, steps: range, worker: int) -> None:
    for step in steps:
        # The same gradient on all shards of a worker, whatever their number.
        run_backward(model, step, worker)
        optimizer.step()
        optimizer.zero_grad()


def save_halfway(rank: int, world_size: int, shards: int, folder: str) -> list[bytes]:
    mesh = make_mesh(2, shards)
    model = shard(build(), mesh["shard"])
    optimizer = make_optimizer(model, mesh)
    train_on(model, optimizer, range(2), rank // shards)
    save(model, optimizer, folder)
    train_on(model, optimizer, range(2, 4), rank // shards)
    return [param.full_tensor().detach().numpy().tobytes() for param in model.parameters()]


def resume(rank: int, world_size: int, shards: int, folder: str) -> list[bytes]:
    mesh = make_mesh(2, shards)
    model = shard(build(), mesh["shard"])
    optimizer = make_optimizer(model, mesh)
    train_on(model, optimizer, range(1), 5)
    load(model, optimizer, folder)
    train_on(model, optimizer, range(2, 4), rank // shards)
    return [param.full_tensor().detach().numpy().tobytes() for param in model.parameters()]


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits_with_other_shards_too(tmp_path: Any) -> None:
    expected = run_workers(save_halfway, 4, 2, str(tmp_path / "dcp"))[0]
    assert run_workers(resume, 4, 2, str(tmp_path / "dcp")) == [expected] * 4
    assert run_workers(resume, 2, 1, str(tmp_path / "dcp")) == [expected] * 2


def make_lion(rank: int, world_size: int) -> str:
    model = shard(build(), make_mesh(1, 2)["shard"])
    sorted_names = [
        [[name for name, _ in group["params"]] for group in distlion.group_params(each)]
        for each in (model, build())
    ]
    assert sorted_names[0] == sorted_names[1]
    with pytest.raises(UnsupportedTypeError) as caught:
        distlion.Lion(make_groups(model))
    return str(caught.value)


def test_lion_alone_refuses_shards_of_matrices_by_name() -> None:
    for text in run_workers(make_lion, 2):
        assert "orthogonalize=True and conv.weight, a DTensor" in text
        assert "Use DistributedLion" in text


def hold_odd_pieces(rank: int, world_size: int) -> str:
    """Let the second shard of each worker be where the first one is."""
    mesh = make_mesh(2, 2)
    model = shard(build(), mesh["shard"])
    own = matrix_cuts.locate_shard
    if rank % 2:
        matrix_cuts.locate_shard = lambda param: tuple(
            (0, stop - start) for start, stop in own(param)
        )
    try:
        with pytest.raises(UnsupportedTypeError) as caught:
            make_optimizer(model, mesh)
    finally:
        matrix_cuts.locate_shard = own
    return str(caught.value)


def test_pieces_that_do_not_add_up_are_refused_on_all_ranks() -> None:
    for text in run_workers(hold_odd_pieces, 4):
        assert "orthogonalize=True and conv.weight" in text
        assert "Expected pieces that add up to (5, 2, 3, 3)" in text
