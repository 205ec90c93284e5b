"""One case: two groups of uneven parameters, gradients from integers, 20 steps, digests.

Numbers come from tests/oracle.py, which mixes integers: no matrix product, no library of random
numbers and no processor has a say in them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import distlion
import oracle
from bits.cases import ALL_OPTIONS, ALL_RULES, CREW, MEMBERS, N_STEPS, PATTERNS, Case, Option
from bits.products import portable_products

SEED = 2404
INITIAL = 1 << 20
KEPT = ("exp_avg", "estimate")
DIGEST_DIGITS = 16

SHAPES: dict[str, tuple[int, ...]] = {
    "head.weight": (5, 13),
    "head.bias": (7,),
    "head.scale": (1,),
    # A prime above 4,096: the second, shorter block of a scale.
    "body.weight": (4133,),
    "body.gain": (341, 3),
    "body.bias": (64,),
}
GROUPS = {
    "head": {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "body": {"lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.0},
}
SETTINGS = {"seed": SEED, "bucket_elements": 1200}
"""Several buckets in each group."""
BROKEN = {(1, 5, 3), (1, 6, 0), (2, 11, 4)}
"""Worker, step and number of the gradients that are not finite in a "broken" case."""


@dataclass(frozen=True)
class Digests:
    """What a run left behind.

    Attributes:
        params: Of all parameters; equal on all ranks.
        states: Of each worker's or rank's momenta, and estimates where the rule keeps them.
    """

    params: str
    states: tuple[str, ...]


class Model(nn.Module):
    """Parameters by name, in the order of ``SHAPES``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for index, (name, shape) in enumerate(SHAPES.items()):
            numbers = oracle.values(SEED, INITIAL + index, n=math.prod(shape))
            value = torch.from_numpy(numbers).reshape(shape).to(dtype)
            self.register_parameter(name.replace(".", "_"), nn.Parameter(value))

    def forward(self) -> None:
        """Do nothing: FSDP2 shards only what has a forward."""

    def list_groups(self, case: Case) -> list[dict[str, Any]]:
        """Return two parameter groups, or twice as many where matrices are orthogonalized."""
        option, rule = ALL_OPTIONS[case.option], ALL_RULES[case.rule]
        groups = list_groups(dict(self.named_parameters()), option)
        for group in groups:
            group |= {"aggregation": rule.aggregation, "cautious": rule.cautious}
        if option.head_rule is not None:
            groups[0]["aggregation"] = option.head_rule
        return groups


def list_groups(named: Mapping[str, Tensor], option: Option) -> list[dict[str, Any]]:
    """Return groups of named parameters with their hyperparameters."""
    groups = []
    for first, hyperparameters in GROUPS.items():
        own = [(name, param) for name, param in named.items() if name.startswith(first)]
        if option.orthogonalizes:
            matrices = [pair for pair in own if pair[1].ndim == 2]
            groups.append({"params": matrices, **hyperparameters, "orthogonalize": True})
            own = [pair for pair in own if pair[1].ndim != 2]
        groups.append({"params": own, **hyperparameters})
    return groups


def make_grad(voter: int, step: int, index: int, option: Option) -> Tensor | None:
    """Return a worker's gradient of one parameter, or None: now and then it has none.

    A quarter is exactly 0; another quarter cancels between workers 2k and 2k + 1.
    """
    shape = tuple(SHAPES.values())[index]
    if oracle.is_absent(SEED, step, voter, index):
        return None
    n = math.prod(shape)
    grad = oracle.gradient(SEED, step, voter, index, n)
    opposed = slice(n // 4, n // 2)
    pair = oracle.gradient(SEED, step, 1000 + voter // 2, index, n)
    grad[opposed] = -pair[opposed] if voter % 2 else pair[opposed]
    if option.disturbance == "opposed":
        shared = oracle.gradient(SEED, step, 2000, index, n)[n // 2 :]
        grad[n // 2 :] = -shared if voter == option.n_workers - 1 else shared
    if option.disturbance == "broken" and (voter, step, index) in BROKEN:
        grad[n // 3] = math.inf
    return torch.from_numpy(grad).reshape(shape)


def set_grads(
    params: Sequence[Tensor],
    voter: int,
    step: int,
    option: Option,
    *,
    by_backward: bool = False,
) -> None:
    """Set every gradient of a worker, or let it arrive through a backward pass."""
    terms = []
    for index, param in enumerate(params):
        grad = make_grad(voter, step, index, option)
        if grad is not None:
            grad = grad.to(param.dtype)
        if grad is not None and isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, [Shard(0)], src_data_rank=None)
        if not by_backward:
            param.grad = grad
        elif grad is not None:
            terms.append((take_local(param) * take_local(grad)).sum())
    if terms:
        # The derivative of a sum is 1, whatever its value.
        torch.autograd.backward(terms)


def change_rates(optimizers: Iterable[torch.optim.Optimizer], step: int, option: Option) -> None:
    """Change hyperparameters before some steps, in a "scheduled" case."""
    if option.disturbance != "scheduled" or step % 6 != 5:
        return
    for group in (group for each in optimizers for group in each.param_groups):
        group["lr"] *= 0.5
        group["weight_decay"] += 0.125
        group["betas"] = (0.85, 0.97)


def take_local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def take_whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor of which this rank may have a shard."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def multiply_as(option: Option) -> AbstractContextManager[None]:
    """Return the context for a case's matrix products: portable ones where it has a record."""
    if not option.orthogonalizes or option.is_machine_bound:
        return nullcontext()
    # One rank of a worker may orthogonalize all of its matrices.
    return portable_products(may_be_idle=shares_worker(option))


def shares_worker(option: Option) -> bool:
    """Return whether two ranks act as one worker."""
    return option.is_sharded or "nodes" in option.arguments


def prepare_rank(rank: int, case: Case, mesh: DeviceMesh | None) -> tuple[Model, dict[str, Any]]:
    """Make the model of one worker, or a shard of it, and the arguments of its optimizer."""
    option = ALL_OPTIONS[case.option]
    model, arguments = Model(option.dtype), {**SETTINGS, "timeouts": distlion.Timeouts(step_s=20)}
    if option.is_sharded:
        assert mesh is not None
        fully_shard(model, mesh=mesh["shard"])
        arguments["process_group"] = mesh["replicate"].get_group()
    if option.weights:
        arguments["weight"] = option.weights[rank // 2 if shares_worker(option) else rank]
    pattern = PATTERNS["all-reduce" if case.pattern == CREW else case.pattern]
    return model, {**arguments, "exchange": pattern, **option.arguments}


def step_all(
    optimizer: Any, params: Sequence[Tensor], voter: int, option: Option, *, steps: Iterable[int]
) -> None:
    """Do steps of a worker's optimizer."""
    by_backward = bool(option.arguments.get("overlap"))
    for step in steps:
        change_rates([optimizer], step, option)
        if option.has_two_passes:
            with optimizer.no_sync():
                set_grads(params, voter, N_STEPS + step, option, by_backward=True)
        set_grads(params, voter, step, option, by_backward=by_backward)
        optimizer.step()
        optimizer.zero_grad()


def train_on_ranks(rank: int, case: Case, mesh: DeviceMesh | None) -> tuple[str, str]:
    """Train one worker, or a shard of one; return digests of its parameters and its state."""
    option = ALL_OPTIONS[case.option]
    model, arguments = prepare_rank(rank, case, mesh)
    optimizer = distlion.DistributedLion(model.list_groups(case), **arguments)
    params = list(model.parameters())
    voter = rank // 2 if option.is_sharded else rank
    with multiply_as(option):
        step_all(optimizer, params, voter, option, steps=range(N_STEPS))
    return digest(map(take_whole, params)), digest(list_kept(optimizer, params))


def train_virtually(case: Case) -> Digests:
    """Train all workers in this process."""
    option = ALL_OPTIONS[case.option]
    model, ids = Model(option.dtype), tuple(range(option.n_workers))
    cluster = distlion.VirtualCluster(
        model.list_groups(case),
        workers=option.n_workers,
        weights=option.weights and option.weights[: option.n_workers],
        **{**SETTINGS, **option.arguments},
    )
    params = list(model.parameters())
    with multiply_as(option):
        for step in range(N_STEPS):
            if option.newcomers and step in MEMBERS:
                ids = MEMBERS[step]
                cluster.change_workers(ids, newcomers=option.newcomers)
            change_rates([cluster], step, option)
            for place, worker in enumerate(ids):
                set_grads(params, worker, step, option)
                cluster.collect(place)
            cluster.step()
    kept = list_kept(cluster, params)
    states = tuple(digest([tensor[place] for tensor in kept]) for place in range(len(ids)))
    return Digests(digest(params), states)


def list_kept(
    optimizer: torch.optim.Optimizer, params: Iterable[Tensor], keys: Sequence[str] = KEPT
) -> list[Tensor]:
    """Return momenta and estimates of one process, parameter by parameter."""
    states = [optimizer.state[param] for param in params]
    return [state[key] for state in states for key in keys if key in state]


def digest(tensors: Iterable[Tensor]) -> str:
    """Return the first digits of the SHA-256 of all bits, with types and shapes."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        local = take_local(tensor).detach()
        hashed.update(f"{local.dtype} {tuple(local.shape)};".encode())
        hashed.update(local.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:DIGEST_DIGITS]
