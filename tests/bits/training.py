"""One case: two groups of uneven parameters, gradients from integers, 20 steps, digests.

Numbers come from tests/oracle.py, which mixes integers: no matrix product, no library of random
numbers and no processor has a say in them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import distlion
import oracle
from bits.cases import ALL_OPTIONS, N_RANKS, N_STEPS, PATTERNS, RULES, Case

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

    def list_groups(self, rule: str) -> list[dict[str, Any]]:
        """Return two parameter groups."""
        shared = {"aggregation": RULES[rule].aggregation, "cautious": RULES[rule].cautious}
        return [
            {
                "params": [(n, p) for n, p in self.named_parameters() if n.startswith(group)],
                **hyperparameters,
                **shared,
            }
            for group, hyperparameters in GROUPS.items()
        ]


def make_grad(voter: int, step: int, index: int) -> Tensor | None:
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
    return torch.from_numpy(grad).reshape(shape)


def set_grads(params: Sequence[Tensor], voter: int, step: int, *, by_backward: bool) -> None:
    """Set every gradient of a worker, or let it arrive through a backward pass."""
    terms = []
    for index, param in enumerate(params):
        grad = make_grad(voter, step, index)
        if grad is not None:
            grad = grad.to(param.dtype)
        if grad is not None and isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, [Shard(0)], src_data_rank=None)
        param.grad = None if by_backward else grad
        if grad is not None and by_backward:
            terms.append((take_local(param) * take_local(grad)).sum())
    if terms:
        # The derivative of a sum is 1, whatever its value.
        torch.autograd.backward(terms)


def take_local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train_on_ranks(rank: int, case: Case, mesh: DeviceMesh) -> tuple[str, str]:
    """Train one worker, or a shard of one; return digests of its parameters and its state."""
    option = ALL_OPTIONS[case.option]
    model, arguments, voter = Model(option.dtype), {}, rank
    if option.is_sharded:
        fully_shard(model, mesh=mesh["shard"])
        arguments = {"process_group": mesh["replicate"].get_group()}
        voter = rank // 2
    if option.weights:
        arguments = {"weight": option.weights[rank]}
    optimizer = distlion.DistributedLion(
        model.list_groups(case.rule),
        exchange=PATTERNS[case.pattern],
        step_timeout_s=20,
        **{**SETTINGS, **arguments, **option.arguments},
    )
    params = list(model.parameters())
    for step in range(N_STEPS):
        set_grads(params, voter, step, by_backward=bool(option.arguments.get("overlap")))
        optimizer.step()
        optimizer.zero_grad()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in params]
    return digest(whole), digest(list_kept(optimizer, params))


def train_virtually(case: Case) -> Digests:
    """Train all workers in this process."""
    option = ALL_OPTIONS[case.option]
    model = Model(option.dtype)
    cluster = distlion.VirtualCluster(
        model.list_groups(case.rule),
        workers=N_RANKS,
        weights=option.weights,
        **{**SETTINGS, **option.arguments},
    )
    params = list(model.parameters())
    for step in range(N_STEPS):
        for worker in range(N_RANKS):
            set_grads(params, worker, step, by_backward=False)
            cluster.collect(worker)
        cluster.step()
    kept = list_kept(cluster, params)
    states = tuple(digest([tensor[worker] for tensor in kept]) for worker in range(N_RANKS))
    return Digests(digest(params), states)


def list_kept(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
    """Return momenta and estimates of one process, parameter by parameter."""
    states = [optimizer.state[param] for param in params]
    return [state[key] for state in states for key in KEPT if key in state]


def digest(tensors: Iterable[Tensor]) -> str:
    """Return the first digits of the SHA-256 of all bits, with types and shapes."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        local = take_local(tensor).detach()
        hashed.update(f"{local.dtype} {tuple(local.shape)};".encode())
        hashed.update(local.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:DIGEST_DIGITS]
