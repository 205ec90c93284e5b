"""What users combine FSDP2 with: precision, meta init, offload, accumulation, compilation, TP."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import distlion
from cluster import run_workers
from distlion.errors import (
    GradientChangedError,
    IdenticalGradientsWarning,
    UnsupportedTypeError,
)
from distlion.integrations.fsdp import disable_all_reduce
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

pytestmark = pytest.mark.distributed

N_RANKS = 4
Train = Callable[[nn.Module, distlion.DistributedLion, int, int], None]


def plainly(model: nn.Module, optimizer: distlion.DistributedLion, step: int, rank: int) -> None:
    run_backward(model, step, rank)


def bf16(mesh: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return shard(build(), mesh["shard"], mp_policy=policy)


def one_unit(mesh: Any) -> nn.Module:
    return fully_shard(build(), mesh=mesh["shard"])


def offloaded(mesh: Any) -> nn.Module:
    return shard(build(), mesh["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))


def from_meta(mesh: Any) -> nn.Module:
    with torch.device("meta"):
        model = build()
    model = shard(model, mesh["shard"])
    model.to_empty(device="cpu")
    torch.manual_seed(50 + dist.get_rank())  # workers begin apart: the first one's values win
    for module in model:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def compiled(mesh: Any) -> nn.Module:
    model = shard(build(), mesh["shard"])
    for module in model:
        module.compile(backend="aot_eager")
    return model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(7, 5, bias=False), nn.Linear(5, 7, bias=False)
        self.last.weight = nn.Parameter(self.first.weight.detach().T.contiguous())
        self.again = nn.Linear(7, 5, bias=False)
        self.again.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.last(torch.tanh(self.first(x))))


def tied(mesh: Any) -> nn.Module:
    return fully_shard(Tied(), mesh=mesh["shard"])


def with_empty_shard(mesh: Any) -> nn.Module:
    """One rank's shard of the last bias is empty, and shares a buffer with other gradients."""
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1)), mesh=mesh["shard"])


def with_gradients(mesh: Any) -> nn.Module:
    """A backward pass came before the optimizer, and its gradients are 0 in place."""
    model = with_empty_shard(mesh)
    run_backward(model, 99, dist.get_rank())
    model.zero_grad(set_to_none=False)
    return model


def clipped(model: nn.Module, optimizer: distlion.DistributedLion, step: int, rank: int) -> None:
    run_backward(model, step, rank)
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    norms = [torch.zeros(()) for _ in range(N_RANKS)]
    dist.all_gather(norms, total.full_tensor())
    assert norms[0] == norms[1] != norms[2] == norms[3]  # each worker's own


def accumulated(model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
    model.set_requires_gradient_sync(False)
    run_backward(model, step, rank)
    assert all(param.grad is None for param in model.parameters())
    model.set_requires_gradient_sync(True)
    run_backward(model, step + 100, rank)


def added_to(model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
    """Reduce in each of two micro-steps: gradients of a block share a buffer and its counter."""
    with optimizer.no_sync():
        run_backward(model, step, rank)
    run_backward(model, step + 100, rank)


def sharded(mesh: Any) -> nn.Module:
    return shard(build(), mesh["shard"])


OVERLAP = {"overlap": True, "bucket_elements": 64}
CASES: dict[str, tuple[Callable[[Any], nn.Module], Train, dict[str, Any]]] = {
    "bf16 mixed precision": (bf16, plainly, {}),
    "CPU offload": (offloaded, plainly, {}),
    "meta init": (from_meta, plainly, {}),
    "compiled blocks": (compiled, plainly, {}),
    "tied weights": (tied, plainly, {}),
    "clip_grad_norm_ of torch": (sharded, clipped, {}),
    "set_requires_gradient_sync": (sharded, accumulated, {}),
    "set_requires_gradient_sync, overlap": (sharded, accumulated, OVERLAP),
    "no_sync": (sharded, added_to, {}),
    "no_sync, overlap": (sharded, added_to, OVERLAP),
    "no_sync, CPU offload, overlap": (offloaded, added_to, OVERLAP),
    "no_sync, bf16, overlap": (bf16, added_to, OVERLAP),
    "no_sync, one unit, overlap": (one_unit, added_to, OVERLAP),
    "no_sync, empty shard, overlap": (with_empty_shard, added_to, OVERLAP),
    "gradients before, overlap": (with_gradients, plainly, OVERLAP),
    "ClipNorm": (sharded, plainly, {"clip_norm": distlion.ClipNorm(0.01)}),
    "ClipNorm, global": (
        sharded,
        plainly,
        {"clip_norm": distlion.ClipNorm(0.01, scope="global")},
    ),
    "momentum sync": (sharded, plainly, {"momentum_sync": distlion.MomentumSync(every=2)}),
}


def train_cases(rank: int, world_size: int) -> dict[str, Any]:
    mesh, found = make_mesh(2, 2), {}
    for name, (make_model, train, options) in CASES.items():
        model = make_model(mesh)
        optimizer = make_optimizer(model, mesh, **options)
        before = digest(model)
        reference = None
        # Norms of shards are added in another order; momenta on the way are not collected.
        is_built = make_model not in (tied, with_empty_shard, with_gradients)
        if is_built and not options.keys() & {"clip_norm", "momentum_sync"}:
            reference = Reference(2)
            state = {key: value.full_tensor() for key, value in model.state_dict().items()}
            reference.model.load_state_dict(state)
        for step in range(3):
            train(model, optimizer, step, rank)
            if reference is not None:
                reference.step(gather_gradients(model, mesh))
            optimizer.step()
            optimizer.zero_grad()
        equal = None if reference is None else reference.equals(model)
        found[name] = equal, digest(model) != before, digest(model)
    return found


@functools.cache
def trained() -> list[dict[str, Any]]:
    return run_workers(train_cases, N_RANKS, timeout_s=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
class TestFeatures:
    def test_replicas_move_and_are_equal(self, name):
        rows = [found[name] for found in trained()]
        assert [moved for _, moved, _ in rows] == [True] * N_RANKS
        assert rows[0][2] == rows[2][2]
        assert rows[1][2] == rows[3][2]

    def test_bits_are_those_of_whole_parameters(self, name):
        equal = [found[name][0] for found in trained()]
        assert equal in ([True] * N_RANKS, [None] * N_RANKS)


def test_most_features_are_compared_with_whole_parameters():
    excluded = {
        "tied weights",
        "no_sync, empty shard, overlap",
        "gradients before, overlap",
        "ClipNorm",
        "ClipNorm, global",
        "momentum sync",
    }
    assert len(CASES.keys() - excluded) == 12


def change_one_element(param: torch.Tensor) -> None:
    """Change one that is in no sample of 64, so that only a version counter tells."""
    elements = param.grad._local_tensor.view(-1)
    assert elements.numel() >= 128
    elements[1] += 1


def wide(mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 64), nn.Tanh(), nn.Linear(64, 3))
    return fully_shard(model, mesh=mesh["shard"])


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "nothing": lambda model: None,
    "one element": lambda model: change_one_element(model[0].weight),
    "the DTensor": lambda model: model[0].weight.grad.mul_(2),
    "torch's clipping": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "another gradient": lambda model: setattr(
        model[0].weight, "grad", model[0].weight.grad.detach().clone()
    ),
}


def catch(action: Callable[[], Any]) -> type[BaseException] | None:
    try:
        action()
    except Exception as error:
        return type(error)
    return None


def change_after_arrival(rank: int, world_size: int) -> dict[tuple[str, bool], Any]:
    """Change gradients on one rank after their arrival; return errors, and whether all stayed."""
    mesh, found = make_mesh(2, 2), {}
    for is_added_to in (False, True):
        for name, change in CHANGES.items():
            model = wide(mesh)
            optimizer = make_optimizer(model, mesh, **OVERLAP)
            before = digest(model)
            (added_to if is_added_to else plainly)(model, optimizer, 0, rank)
            if rank == 0 or name == "torch's clipping":  # which is a collective
                change(model)
            found[name, is_added_to] = catch(optimizer.step), digest(model) == before

        def change_later(param: torch.Tensor) -> None:
            if rank == 0:
                change_one_element(param)

        model = wide(mesh)
        optimizer = make_optimizer(model, mesh, **OVERLAP)
        before = digest(model)
        # A hook behind that of overlap: other gradients of the buffer arrive after the change.
        model[0].weight.register_post_accumulate_grad_hook(change_later)
        (added_to if is_added_to else plainly)(model, optimizer, 0, rank)
        found["a later hook", is_added_to] = catch(optimizer.step), digest(model) == before
    return found


@functools.cache
def changed() -> list[dict[tuple[str, bool], Any]]:
    return run_workers(change_after_arrival, N_RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("is_added_to", [False, True])
@pytest.mark.parametrize("name", [*CHANGES, "a later hook"])
def test_a_gradient_that_changes_after_it_arrived_ends_the_step_on_all_ranks(name, is_added_to):
    for found in changed():
        kind, stayed = found[name, is_added_to]
        assert (kind, stayed) == (
            (None, False) if name == "nothing" else (GradientChangedError, True)
        )


class Mlp(nn.Module):
    """A block with a norm that tensor parallelism leaves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(7), nn.Linear(7, 12), nn.Linear(12, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def train_on_three_dims(rank: int, world_size: int) -> tuple[list[bytes], list[bytes], str]:
    """Train with workers x FSDP x tensor parallelism: two workers of four ranks."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(), Mlp())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = make_optimizer(model, mesh)
    before = digest(model)
    for step in range(3):
        torch.manual_seed(100 * step + rank // 2)  # ranks of one tp group have the same batch
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    shape = str(tuple(optimizer.state_dict()["state"][2]["exp_avg"].shape))
    return before, digest(model), shape


@pytest.mark.slow
def test_tensor_parallelism_beside_it_on_eight_ranks():
    found = run_workers(train_on_three_dims, 8, timeout_s=300)
    for rank in range(4):
        assert found[rank][1] == found[rank + 4][1]
        assert found[rank][0] != found[rank][1]
        assert found[rank][2].startswith("(2, ")


def warn_of_all_reduce(rank: int, world_size: int) -> tuple[list[str], list[str], str]:
    """Train on a 2D mesh as FSDP2 does it by itself, and with its all-reduce switched off."""
    mesh, texts = make_mesh(2, 2), []
    logging.disable(logging.CRITICAL)
    for is_off in (False, True):
        model = shard(build(), mesh)
        if is_off:
            disable_all_reduce(model)
        optimizer = make_optimizer(model, mesh, process_group=None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(4):
                run_backward(model, step, rank)
                optimizer.step()
                optimizer.zero_grad()
        texts.append([w.category.__name__ for w in caught if "Identical" in w.category.__name__])
    try:
        disable_all_reduce(shard(build(), mesh["shard"]))
    except UnsupportedTypeError as error:
        return texts[0], texts[1], str(error)
    return texts[0], texts[1], ""


@pytest.mark.slow
def test_workers_that_fsdp_has_averaged_are_told():
    for averaged, apart, refused in run_workers(warn_of_all_reduce, N_RANKS):
        assert averaged == [IdenticalGradientsWarning.__name__]
        assert apart == []
        assert "without a replicate dim, which is right" in refused


def clip_beside_tensor_parallelism(rank: int, world_size: int) -> tuple[float, float, list[float]]:
    """Return the norm as torch has it, that of ClipNorm, and an averaged momentum held twice."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    torch.manual_seed(0)
    model = Mlp()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    optimizer = make_optimizer(
        model, mesh, clip_norm=distlion.ClipNorm(1e-3), replicas=distlion.Replicas(check_every=None)
    )
    torch.manual_seed(rank // 2)
    model(torch.randn(4, 7)).square().mean().backward()
    squares = [param.grad.full_tensor().double().square().sum() for param in model.parameters()]
    inputs, session = optimizer._gather_inputs(), optimizer._session
    buckets = session.routing.buckets
    for bucket in buckets:
        bucket.load(inputs)
    counted = [segment for bucket in buckets for segment in bucket.list_counted()]
    [clipping] = session.stages
    _, norm = clipping.measure(counted, inputs.header)
    optimizer.step()
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = Mlp()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    syncing = make_optimizer(model, mesh, momentum_sync=distlion.MomentumSync(every=1))
    for param in model.parameters():
        param.grad = torch.full_like(param, 1.0 + rank // 2)
    syncing.step()
    averaged = syncing.state[model.norm.weight]["exp_avg"].flatten().tolist()
    assert optimizer.grad_norm == norm
    return float(sum(squares).sqrt()), norm, averaged


@functools.cache
def clipped_beside_tensor_parallelism() -> list[tuple[float, float, list[float]]]:
    return run_workers(clip_beside_tensor_parallelism, N_RANKS)


@pytest.mark.slow
def test_a_norm_counts_what_tensor_parallelism_leaves_whole_once():
    for whole, clipped_by, _ in clipped_beside_tensor_parallelism():
        assert clipped_by == pytest.approx(whole, rel=1e-6)  # gradients are float32


def test_momenta_that_ranks_of_a_worker_hold_copies_of_are_averaged_alike():
    for *_, averaged in clipped_beside_tensor_parallelism():
        assert averaged == pytest.approx([0.05 * 1.5] * len(averaged))
