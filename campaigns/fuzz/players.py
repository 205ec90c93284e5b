"""Who plays: a rank, or the workers of one process; and what can be seen of one from outside."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler

import distlion
import distlion.errors
import matrix
from distlion import faults
from distlion.optim import VotingBase
from distlion.votes import Aggregation
from fuzz.program import Setup

STEP_TIMEOUT_S = 10.0
LIMITS = distlion.Timeouts(init_s=STEP_TIMEOUT_S, step_s=2.0, busy_s=STEP_TIMEOUT_S)
PAUSE_S = 3.0
"""Time for which others wait for a rank that is busy elsewhere."""
VOTE_S = 0.3
"""Within this time votes that leave during backward have left."""

Grads = list[Tensor | None]


N_FEATURES = 3


class Model(nn.Module):
    """Parameters p0, p1, ..., running statistics, and buffers that have no mean."""

    def __init__(self, setup: Setup, *, salt: int = 0) -> None:
        super().__init__()
        self.setup = setup
        self.salt = salt
        self.norm = nn.BatchNorm1d(N_FEATURES, affine=False, device="cpu", dtype=torch.float32)
        values = np.random.default_rng([salt]).standard_normal(N_FEATURES)
        self.register_buffer("projection", torch.from_numpy(values).to(torch.bfloat16))
        self.register_buffer("n_seen", torch.full((), salt, device="cpu", dtype=torch.int64))
        self.numbers = [[self.add(n) for n in sizes] for sizes in setup.sizes]
        for index in setup.frozen:
            self.params[index].requires_grad_(False)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def forward(self, data: Tensor) -> Tensor:
        """Normalize (batch, N_FEATURES) float32; in training, change all buffers."""
        if self.training:
            self.n_seen += len(data)
            self.projection.copy_(data[0])
        return self.norm(data)  # type: ignore[no-any-return]

    def add(self, n: int) -> int:
        """Add a parameter and return its number."""
        number = len(self.params)
        values = np.random.default_rng([self.salt, number]).standard_normal(n)
        dtype = getattr(torch, self.setup.find_dtype(number))
        param = nn.Parameter(torch.from_numpy(values).to(dtype))
        self.register_parameter(f"p{number}", param)
        return number


def make_options(setup: Setup) -> dict[str, Any]:
    """Return the arguments of both optimizers, as objects."""
    options = dict(setup.options)
    exp_avg = options.pop("exp_avg_dtype", None)
    options["precision"] = distlion.Precision(
        exp_avg and getattr(torch, exp_avg), options.pop("rounding", "nearest")
    )
    options["agreement"] = distlion.Agreement(every=options.pop("diagnose_every", None))
    if "clip_norm" in options:
        options["clip_norm"] = distlion.ClipNorm(0.7, scope=options["clip_norm"])
    if "momentum_sync" in options:
        options["momentum_sync"] = distlion.MomentumSync(every=options["momentum_sync"])
    return options


@contextmanager
def odd_defaults(setup: Setup) -> Iterator[None]:
    """Set torch's default dtype and device for a while: what workers do must not depend on them."""
    dtype, device = setup.defaults
    torch.set_default_dtype(getattr(torch, dtype))
    torch.set_default_device(None if device == "cpu" else device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def make_scheduler(kind: str | None, optimizer: torch.optim.Optimizer) -> Any:
    """Make a scheduler: its state may hold functions, or others of its kind."""
    if kind == "lambda":
        return lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    if kind == "sequential":
        parts: list[Any] = [
            lr_scheduler.LinearLR(optimizer, total_iters=2),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=9),
        ]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
    return None if kind is None else lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)


class Player:
    """One who holds a model, an optimizer and a scheduler.

    Args:
        setup: How they are made.
        folder: Of files; ranks share it.
        make: Makes the optimizer from groups and options.
        workers: Whose gradients are given here.
    """

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        make: Callable[..., VotingBase],
        *,
        workers: Sequence[int],
    ) -> None:
        self.setup, self.folder, self.workers = setup, folder, workers
        self._make = make
        self.added: list[tuple[int, str]] = []
        self.marked: list[dict[str, str]] | None = None
        self.model, self.optimizer = self.make_fresh()
        self.scheduler = make_scheduler(setup.scheduler, self.optimizer)

    @property
    def rank(self) -> int:
        """Of a rank; 0 of the workers of one process."""
        return self.workers[0]

    def make_fresh(self, salt: int = 0, **changes: Any) -> tuple[Model, VotingBase]:
        """Make a model and an optimizer of the present layout.

        Args:
            salt: Of the parameters' values.
            changes: Of the setup.
        """
        setup = replace(self.setup, **changes)
        model = Model(setup, salt=salt)
        groups = [
            {
                "params": [(f"p{number}", model.params[number]) for number in numbers],
                "aggregation": matrix.LISTED[rule],
            }
            for numbers, rule in zip(model.numbers, setup.rules, strict=True)
        ]
        optimizer = self._make(groups, **make_options(setup))
        for size, rule in self.added:
            add_group(model, optimizer, size, rule)
        return model, optimizer

    def as_virtual(self, workers: int) -> Virtual:
        """Return workers of one process, with another model of the present layout."""
        other = Virtual(replace(self.setup, workers=workers), self.folder)
        for size, rule in self.added:
            add_group(other.model, other.optimizer, size, rule)
        for old, new in zip(self.model.params, other.model.params, strict=True):
            new.requires_grad_(old.requires_grad)
        return other

    def mark(self) -> None:
        """Note what there is before something that may be refused; else it is noted before all."""
        self.marked = self.snapshots()

    def snapshots(self) -> list[dict[str, str]]:
        """Digest all that each worker here holds."""
        return [self.snapshot(worker) for worker in self.workers]

    @property
    def is_dead(self) -> bool:
        """Whether the optimizer is of no more use."""
        return False

    def barrier(self) -> None:
        """Wait for all ranks."""

    def backward(self, grads: Grads) -> None:
        """Let these gradients arrive through a backward pass."""
        terms = [
            (param * grad).sum().float()
            for param, grad in zip(self.model.params, grads, strict=True)
            if grad is not None and param.requires_grad
        ]
        if terms:
            sum(terms[1:], terms[0]).backward()

    def step(
        self, passes: Callable[[int], list[Grads]], edit: Callable[[int], None] | None
    ) -> None:
        """Do a step.

        Args:
            passes: Returns a worker's gradients, of one backward pass after the other.
            edit: Edits what is in ``p.grad`` of a worker before the step; None for nothing.
        """
        raise NotImplementedError

    def forward(self, worker: int, data: Tensor) -> None:
        """Let a worker's model see data in training."""
        self.model(data)

    def average(self) -> None:
        """Make the buffers of all workers equal."""
        raise NotImplementedError

    def buffers(self, worker: int) -> dict[str, Tensor]:
        """Return a worker's buffers."""
        return dict(self.model.named_buffers())

    def kept(self, param: Tensor, worker: int) -> dict[str, Tensor]:
        """Return a worker's momentum and estimate of a parameter."""
        state = self.optimizer.state.get(param, {})
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def snapshot(self, worker: int) -> dict[str, str]:
        """Digest all that a worker holds, by name."""
        found = {"committed_step": repr(self.optimizer.param_groups[0].get("step"))}
        for index, param in enumerate(self.model.params):
            found[f"p{index}"] = digest(param)
            for key, value in self.kept(param, worker).items():
                found[f"{key} of p{index}"] = digest(value)
        for name, buffer in self.buffers(worker).items():
            found[name] = digest(buffer)
        for number, group in enumerate(self.optimizer.param_groups):
            for key, value in group.items():
                if key not in ("params", "worker", "param_names"):
                    found[f"{key} of group {number}"] = describe(value)
        if self.scheduler is not None:
            found["scheduler"] = describe(self.scheduler)
        return found


class Rank(Player):
    """One of several processes.

    Args:
        setup: As for every player.
        folder: Likewise.
        group: The workers.
    """

    def __init__(self, setup: Setup, folder: Path, group: dist.ProcessGroup) -> None:
        self.group = group
        super().__init__(setup, folder, self._make_optimizer, workers=[dist.get_rank(group)])

    @property
    def is_dead(self) -> bool:
        assert isinstance(self.optimizer, distlion.DistributedLion)
        try:
            self.optimizer._session.lifecycle.check_usable()
        except distlion.errors.ProcessGroupError:
            return True
        return False

    def barrier(self) -> None:
        dist.barrier(self.group)

    def average(self) -> None:
        limits = {"timeout_s": STEP_TIMEOUT_S, "busy_timeout_s": STEP_TIMEOUT_S}
        distlion.average_buffers(self.model, self.group, **limits)

    def _make_optimizer(self, groups: Any, **options: Any) -> distlion.DistributedLion:
        network = dict(self.setup.network)
        if network.get("exchange", "auto") != "auto":
            network["exchange"] = matrix.PATTERNS[network["exchange"]]
        return distlion.DistributedLion(
            groups,
            process_group=self.group,
            timeouts=LIMITS,
            replicas=distlion.Replicas(check_every=network.pop("check_every", 1000)),
            **(network | options),
        )

    def step(
        self, passes: Callable[[int], list[Grads]], edit: Callable[[int], None] | None
    ) -> None:
        has_left = threading.Event()
        watch = faults.arm(
            rank=self.rank,
            step=self.optimizer.param_groups[-1]["step"],
            point="framed",
            action=lambda chunk: has_left.set(),
        )
        try:
            self.accumulate(passes)
            if edit is not None:
                if self.setup.overlap:
                    has_left.wait(VOTE_S)  # the edit is late for the votes that do leave
                edit(self.rank)
        finally:
            faults.armed.remove(watch)
        self.optimizer.step()

    def accumulate(self, passes: Callable[[int], list[Grads]]) -> None:
        """Do the backward passes of a step: all but the last inside ``no_sync``, which nests."""
        *first, last = passes(self.rank)
        assert isinstance(self.optimizer, distlion.DistributedLion)
        self.optimizer.zero_grad()
        with self.optimizer.no_sync():
            for grads in first[:1]:
                with self.optimizer.no_sync():
                    self.backward(grads)
            for grads in first[1:]:
                self.backward(grads)
        self.backward(last)


class Virtual(Player):
    """The workers of one process. As the model of ranks, each has buffers of its own."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self._buffers: dict[int, dict[str, Tensor]] = {}
        super().__init__(setup, folder, self._make_optimizer, workers=list(range(setup.workers)))

    def _make_optimizer(self, groups: Any, **options: Any) -> distlion.VirtualCluster:
        return distlion.VirtualCluster(groups, workers=self.setup.workers, **options)

    @property
    def cluster(self) -> distlion.VirtualCluster:
        assert isinstance(self.optimizer, distlion.VirtualCluster)
        return self.optimizer

    def step(
        self, passes: Callable[[int], list[Grads]], edit: Callable[[int], None] | None
    ) -> None:
        for worker in self.workers:
            self.optimizer.zero_grad()
            for grads in passes(worker):
                self.backward(grads)
            if edit is not None:
                edit(worker)
            self.cluster.collect(worker)
        self.cluster.step()

    def forward(self, worker: int, data: Tensor) -> None:
        own = {name: buffer.clone() for name, buffer in self.buffers(worker).items()}
        torch.func.functional_call(self.model, own, (data,))
        self._buffers[worker] = own

    def average(self) -> None:
        rows = [self.buffers(worker) for worker in self.workers]
        equal = {name: average([row[name] for row in rows], name) for name in rows[0]}
        self._buffers = dict.fromkeys(self.workers, equal)

    def buffers(self, worker: int) -> dict[str, Tensor]:
        return self._buffers.get(worker) or super().buffers(worker)

    def kept(self, param: Tensor, worker: int) -> dict[str, Tensor]:
        return {key: value[worker] for key, value in super().kept(param, worker).items()}


def add_group(model: Model, optimizer: VotingBase, size: int, rule: str) -> None:
    """Add a parameter, in a group of its own."""
    number = model.add(size)
    params = [(f"p{number}", model.params[number])]
    group: dict[str, Any] = {"params": params, "aggregation": matrix.LISTED[rule], "lr": 2e-3}
    optimizer.add_param_group(group)


def average(buffers: list[Tensor], name: str) -> Tensor:
    """Return the mean of running statistics, in double and rounded once; else the first one."""
    first, *others = buffers
    if "running" not in name or all(torch.equal(first, each) for each in others):
        return first
    total = sum((each.double() for each in others), first.double())
    return (total / len(buffers)).to(first.dtype)


def digest(tensor: Tensor) -> str:
    """Digest dtype, shape and bits."""
    if tensor.device.type == "meta":
        return "meta"
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    kind = f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")
    return f"{kind} {hashlib.sha256(data).hexdigest()[:16]}"


def describe(value: Any) -> str:
    """Say a value of a group, or a scheduler, so that any difference shows."""
    if isinstance(value, Tensor):
        return f"tensor {digest(value)}"
    if isinstance(value, Aggregation | str | None):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(describe, value))})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{key}: {describe(value[key])}' for key in sorted(value))})"
    if callable(value):
        return f"function {getattr(value, '__qualname__', value)!r}"
    if isinstance(value, lr_scheduler.LRScheduler):
        kept = {key: each for key, each in vars(value).items() if key != "optimizer"}
        return f"{type(value).__name__}({describe(kept)})"
    return repr(value)
