"""Runs of workers with local steps: plain torch for the inner steps, the oracle for the votes.

    run = PlainRun(make_adamw, 3, every=4, rule=DeltaRule("scaled"))
    run.do(12)
    run.common, run.own[rank]

Real and virtual workers must end at the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

import distlion
from delta_oracle import DeltaOracle, DeltaRule
from distlion import errors
from drawn import draw_grads, make_params, set_grads
from failures import Caught

SHAPES: dict[str, int | tuple[int, ...]] = {"p0": (70, 33), "p1": (5,), "p2": (4200,)}
EVERY, STEPS = 3, 10
"""Three votes, and one local step after the last of them."""

Inner = Optimizer | list[Optimizer]
MakeInner = Callable[[list[nn.Parameter]], Inner]


def make_adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(list(params), lr=3e-3)


def make_sgd(params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(list(params), lr=1e-2, momentum=0.9)


def make_lion(params: Iterable[nn.Parameter]) -> Optimizer:
    return distlion.Lion(list(params), lr=1e-3)


def make_grouped_lion(params: Iterable[nn.Parameter]) -> Optimizer:
    """Make Lion with groups as ``group_params`` makes them: matrices orthogonalized."""
    matrices, others = split_by_dims(params)
    groups = [
        {"params": matrices, "orthogonalize": True, "weight_decay": 0.1},
        {"params": others, "cautious": True},
    ]
    return distlion.Lion(groups, lr=1e-3)


needs_muon = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon"
)
"""Mark of tests whose inner optimizers include Muon."""


def make_muon_and_adamw(params: Iterable[nn.Parameter]) -> list[Optimizer]:
    """Make Muon for matrices, and AdamW for all others."""
    matrices, others = split_by_dims(params)
    return [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(others, lr=3e-3)]


def split_by_dims(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    params = list(params)
    return [each for each in params if each.ndim == 2], [each for each in params if each.ndim != 2]


def list_inners(inner: Inner) -> list[Optimizer]:
    """List the optimizers of a worker."""
    return inner if isinstance(inner, list) else [inner]


def step_inner(inner: Inner) -> None:
    """Take a step of each optimizer of a worker."""
    for each in list_inners(inner):
        each.step()


INNERS: dict[str, Callable[[Iterable[nn.Parameter]], Inner]] = {
    "adamw": make_adamw,
    "sgd": make_sgd,
    "lion": make_lion,
    "orthogonalizing lion": make_grouped_lion,
}
if hasattr(torch.optim, "Muon"):
    INNERS["muon and adamw"] = make_muon_and_adamw


class PlainRun:
    """Workers that each have parameters and an inner optimizer, and the oracle of their votes."""

    def __init__(
        self,
        make_inner: MakeInner,
        n_workers: int,
        *,
        rule: DeltaRule,
        every: int = EVERY,
        dtype: torch.dtype = torch.float32,
        nonfinite: str = "raise",
        **outer: Any,
    ) -> None:
        self.nonfinite = nonfinite
        self.every, self.dtype = every, dtype
        self.own = [[*make_params(SHAPES, dtype=dtype).values()] for _ in range(n_workers)]
        self.inners = [make_inner(params) for params in self.own]
        flat = [param.detach().float().view(-1).numpy().copy() for param in self.own[0]]
        self.oracle = DeltaOracle(flat, rule, n_workers, **outer)
        self.done = 0

    @property
    def common(self) -> list[Tensor]:
        return [
            torch.from_numpy(flat).view(param.shape)
            for flat, param in zip(self.oracle.params, self.own[0], strict=True)
        ]

    def do(self, n_steps: int) -> PlainRun:
        """Do steps, each with gradients of its own for every worker."""
        for _ in range(n_steps):
            for worker, params in enumerate(self.own):
                set_grads(params, worker, self.done)
                step_inner(self.inners[worker])
            self.done += 1
            if self.done % self.every == 0:
                self.vote()
        return self

    @torch.no_grad()
    def vote(self) -> None:
        """Vote; all go on from the common point."""
        self.cast()
        common = self.common
        for params in self.own:
            for param, point in zip(params, common, strict=True):
                param.copy_(point)

    @torch.no_grad()
    def cast(self) -> None:
        """Vote; all stay where they are."""
        begun = [common.to(self.dtype).float() for common in self.common]
        deltas = [
            [start - param.float() for start, param in zip(begun, params, strict=True)]
            for params in self.own
        ]
        are_finite = [bool(each.isfinite().all()) for delta in deltas for each in delta]
        if self.nonfinite != "abstain" and not all(are_finite):
            assert self.nonfinite == "skip"
            return
        self.oracle.vote(
            [
                [each.view(-1).numpy() if each.isfinite().all() else None for each in delta]
                for delta in deltas
            ]
        )


def make(
    params: dict[str, nn.Parameter], make_inner: MakeInner = make_adamw, **options: Any
) -> distlion.LocalSteps:
    """Make the optimizer of a real worker."""
    inner = make_inner(params.values())
    return distlion.LocalSteps(
        inner, **{"every": EVERY, "timeouts": distlion.Timeouts(step_s=20), **options}
    )


def catch(action: Callable[[], Any]) -> Caught | None:
    """Return what a call raises, as far as tests of local steps compare it."""
    try:
        action()
    except errors.DistlionError as error:
        return Caught(type(error).__name__, str(error), None, None, (), None, True)
    return None


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copy tensors as they are now."""
    return [each.detach().clone() for each in tensors]


def train(
    optimizer: distlion.LocalSteps,
    params: Iterable[nn.Parameter],
    rank: int,
    begin: int,
    end: int,
) -> None:
    """Do steps of a real worker."""
    params = list(params)
    for step in range(begin, end):
        set_grads(params, rank, step)
        optimizer.step()


def train_virtually(
    cluster: distlion.VirtualLocalSteps, params: Iterable[nn.Parameter], begin: int, end: int
) -> list[list[Tensor]]:
    """Do steps of virtual workers; return the parameters of each."""
    params = list(params)
    for step in range(begin, end):
        for worker in range(cluster.workers):
            for param, grad in zip(params, draw_grads(params, worker, step), strict=True):
                param.grad = grad
            cluster.collect(worker)
        cluster.step()
    return [[p.detach().clone() for p in cluster.worker_params(n)] for n in range(cluster.workers)]


def are_equal(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    """Return whether two lists of tensors are equal to the last bit."""
    pairs = list(zip(one, other, strict=True))
    assert pairs
    return all(torch.equal(a.detach(), b.detach()) for a, b in pairs)


# Changes that no local step makes


def load_weights(optimizer: Any, params: dict[str, nn.Parameter]) -> None:
    with torch.no_grad():
        params["p1"].fill_(7.0)


def write_data(optimizer: Any, params: dict[str, nn.Parameter]) -> None:
    params["p1"].data.add_(1.0)


def add_by_foreach(optimizer: Any, params: dict[str, nn.Parameter]) -> None:
    torch._foreach_add_([params["p1"].data], 1.0)


def fill_from_a_vector(optimizer: Any, params: dict[str, nn.Parameter]) -> None:
    nn.utils.vector_to_parameters(torch.ones(5), [params["p1"]])


def exchange_data(optimizer: Any, params: dict[str, nn.Parameter]) -> None:
    params["p1"].data = params["p1"].data + 1.0


def add_to_inner(optimizer: Any, params: dict[str, nn.Parameter]) -> None:
    optimizer.inner.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def freeze(optimizer: Any, params: dict[str, nn.Parameter]) -> None:
    params["p1"].requires_grad_(False)


WRITES = (write_data, add_by_foreach, fill_from_a_vector, exchange_data)
"""Writes that torch does not count."""
