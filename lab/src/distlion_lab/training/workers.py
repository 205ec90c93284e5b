"""Workers that train by a method: one real worker a process, or N virtual ones in one process."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlion.errors import ReplicaMismatchError
from distlion.local import LocalSteps
from distlion.optim import DistributedLion, group_params
from distlion.step import Agreement, MomentumSync, Timeouts
from distlion.virtual import VirtualCluster
from distlion.votes import Aggregation
from distlion.wire import PATTERNS, AllReduce, Exchange
from distlion_lab.baselines.base import Compression
from distlion_lab.baselines.ddp import Account, compress_gradients, wrap_in_ddp
from distlion_lab.baselines.power_sgd import PowerSGD

LION_BETAS = (0.9, 0.99)
"""The papers' betas: of a method whose name has none."""
_Optimizer = TypeVar("_Optimizer", bound=DistributedLion | LocalSteps)
AUTO = "auto"
"""Name that lets the optimizer choose the pattern."""


@dataclass(frozen=True)
class MethodRun:
    """A run of a method.

    Attributes:
        params: Names and trainable parameters of the model.
        lr: Highest learning rate.
        weight_decay: Decoupled weight decay.
        workers: Number of workers, real or virtual.
        steps: Number of steps in the whole run.
        seed: Seed of every draw.
        warmup_steps: Steps in which Deep Gradient Compression raises its sparsity; None for a
            twentieth of the run.
        make_optimizer: Makes the optimizer of a real worker that votes: ``DistributedLion``, or a
            crew's.
        matrices: Names of the hidden weight matrices, as ``name_matrices`` returns them.
    """

    params: Sequence[tuple[str, nn.Parameter]]
    lr: float
    weight_decay: float
    workers: int
    steps: int
    seed: int
    warmup_steps: int | None = None
    make_optimizer: Callable[..., DistributedLion] = DistributedLion
    matrices: frozenset[str] = frozenset()

    def group(self, *, orthogonalize: bool) -> Any:
        """Return the parameters, or groups: hidden matrices orthogonalized, all others cautious."""
        if not orthogonalize:
            return self.params
        matrices = [named for named in self.params if named[0] in self.matrices]
        others = [named for named in self.params if named[0] not in self.matrices]
        groups = [
            {"params": matrices, "orthogonalize": True},
            {"params": others, "cautious": True},
        ]
        return [group for group in groups if group["params"]]

    @property
    def n_elements(self) -> int:
        """Number of trainable elements."""
        return sum(param.numel() for _, param in self.params)


def name_matrices(model: nn.Module, *, head: str | None = None) -> frozenset[str]:
    """Return the names of a model's hidden weight matrices; ``head`` as in ``group_params``."""
    groups = group_params(model, head=head)
    chosen = [group["params"] for group in groups if group.get("orthogonalize", False)]
    return frozenset(name for params in chosen for name, _ in params)


class VoteOptions(TypedDict, total=False):
    """Arguments of ``DistributedLion``; an absent one takes its default there."""

    aggregation: Aggregation
    betas: tuple[float, float]
    cautious: bool
    exchange: Exchange | Literal["auto"]
    overlap: bool | Literal["auto"]
    momentum_sync: MomentumSync | None
    agreement: Agreement
    timeouts: Timeouts


def find_exchange(name: str) -> Exchange | Literal["auto"]:
    """Return the argument of ``DistributedLion`` for the name of a pattern, or for "auto"."""
    return "auto" if name == AUTO else PATTERNS[name]


class RealWorker(Protocol):
    """One worker of the default process group, with its model, optimizer and account of bytes."""

    @property
    def model(self) -> nn.Module:
        """Return the module whose forward and backward make the gradients."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer to step after each backward."""

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that this worker has sent in all steps so far."""

    @property
    def bits_per_parameter(self) -> float:
        """Return the bits for each trainable parameter that this worker sends in a step."""

    def traffic(self) -> dict[str, Any]:
        """Return the account of bytes as JSON types."""

    def diagnostics(self) -> list[dict[str, Any]]:
        """Return the diagnoses of votes as JSON types; empty unless asked for."""

    def replicas_equal(self) -> bool:
        """Return True if all ranks hold bitwise identical parameters; all ranks must call it."""

    @property
    def place(self) -> str:
        """Return this worker's note for progress, besides loss and bytes; mostly empty."""

    def scoring(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the parameters that all workers share."""

    def finish(self) -> None:
        """Agree after the last step of a run; all ranks must call it."""


class _InStep:
    """Defaults of a worker whose parameters are equal on all workers after every step."""

    @property
    def place(self) -> str:
        """Return nothing."""
        return ""

    def scoring(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def finish(self) -> None:
        """Do nothing."""


def gather_rows(row: Tensor) -> Tensor:
    """Stack the tensors of all ranks: (world_size, *row.shape). All ranks must call it."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def digest_parameters(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters, to compare them bitwise."""
    digest = hashlib.sha256()
    for param in model.parameters():
        flat = param.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Voter(Generic[_Optimizer]):
    """A bare model and an optimizer that votes, with the account of the optimizer."""

    model: nn.Module
    optimizer: _Optimizer

    @property
    def sent_bytes(self) -> int:
        """Return the bytes of the steps; replica digests are counted separately."""
        return self.optimizer.traffic.sent_bytes

    @property
    def bits_per_parameter(self) -> float:
        """Return the bits of the last step for each trainable parameter."""
        return self.optimizer.traffic.bits_per_parameter

    def traffic(self) -> dict[str, Any]:
        """Return the optimizer's traffic."""
        return dataclasses.asdict(self.optimizer.traffic)

    def diagnostics(self) -> list[dict[str, Any]]:
        """Return the optimizer's diagnostics."""
        return [dataclasses.asdict(found) for found in self.optimizer.diagnostics()]

    def replicas_equal(self) -> bool:
        """Return True if the optimizer finds the replicas equal."""
        try:
            self.optimizer.verify_replicas()
        except ReplicaMismatchError:
            return False
        return True


@dataclass(frozen=True)
class VotingWorker(_InStep, Voter[DistributedLion]):
    """DistributedLion on a bare model: gradients stay local, votes are exchanged."""

    @classmethod
    def build(
        cls,
        model: nn.Module,
        run: MethodRun,
        options: VoteOptions,
        *,
        vote: VoteOptions,
        orthogonalize: bool = False,
    ) -> VotingWorker:
        """Build the optimizer of a run.

        Args:
            model: The model whose parameters the run moves.
            run: The run.
            options: Exchange, overlap and diagnostics of votes.
            vote: The method's rule, betas and mask.
            orthogonalize: Whether hidden matrices are orthogonalized.
        """
        params = run.group(orthogonalize=orthogonalize)
        optimizer = run.make_optimizer(
            params, run.lr, weight_decay=run.weight_decay, seed=run.seed, **(vote | options)
        )
        return cls(model, optimizer)


@dataclass(frozen=True)
class AveragingWorker(_InStep):
    """An optimizer on the mean gradient of all workers, plain or compressed, from a DDP hook.

    Gloo does not report its traffic, so the bytes are computed: rings that carry the payloads of
    the hook.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    account: Account

    @classmethod
    def build(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compression: Compression | PowerSGD | None,
        *,
        seed: int,
    ) -> AveragingWorker:
        """Wrap the model in DDP with the hook of a compression."""
        wrapped = wrap_in_ddp(model, compression)
        return cls(wrapped, optimizer, compress_gradients(wrapped, compression, seed=seed))

    @property
    def sent_bytes(self) -> int:
        """Return the bytes of the gradients."""
        return self.account.sent_bytes

    @property
    def bits_per_parameter(self) -> float:
        """Return the bits of a step for each trainable parameter, on average over the steps."""
        elements = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return 8 * self.sent_bytes / (max(1, self.account.steps) * elements)

    def traffic(self) -> dict[str, Any]:
        """Return steps and bytes."""
        return {
            "steps": self.account.steps,
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.sent_bytes,  # a rank of a ring receives as much as it sends
            "bits_per_parameter": self.bits_per_parameter,
        }

    def diagnostics(self) -> list[dict[str, Any]]:
        """Return nothing: nobody votes."""
        return []

    def replicas_equal(self) -> bool:
        """Compare a digest of all parameters over the ranks."""
        digest = bytearray.fromhex(digest_parameters(self.model))
        # A clone: Gloo's thread releases it last, and could not free Python's memory at exit.
        rows = gather_rows(torch.frombuffer(digest, dtype=torch.uint8).clone())
        return bool((rows == rows[0]).all())


class VirtualWorkers(Protocol):
    """N workers that take turns with one model, then step together.

    ``distlion_lab.baselines.VirtualBaseline`` is one, for methods that average gradients.
    """

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer whose learning rate a schedule sets."""

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that one worker would have sent in all steps so far."""

    @property
    def up_bits_per_parameter(self) -> float:
        """Return the bits from worker to server, for each parameter and step."""

    @property
    def down_bits_per_parameter(self) -> float:
        """Return the bits from server to worker, for each parameter and step."""

    @property
    def rounds(self) -> int:
        """Return the number of sequential messages in a step."""

    def collect(self, worker: int) -> None:
        """Take every ``p.grad`` as the gradient of a worker, and clear it."""

    def step(self) -> None:
        """Move the parameters."""


@dataclass(frozen=True)
class VirtualVoting:
    """Virtual workers that vote, under the pattern ``AllReduce``."""

    optimizer: VirtualCluster
    rounds: int

    @classmethod
    def build(
        cls,
        run: MethodRun,
        aggregation: Aggregation,
        *,
        betas: tuple[float, float] = LION_BETAS,
        cautious: bool = False,
        orthogonalize: bool = False,
        momentum_sync: MomentumSync | None = None,
    ) -> VirtualVoting:
        """Build the workers of a run that vote by a rule."""
        cluster = VirtualCluster(
            run.group(orthogonalize=orthogonalize),
            run.lr,
            betas,
            workers=run.workers,
            weight_decay=run.weight_decay,
            aggregation=aggregation,
            cautious=cautious,
            momentum_sync=momentum_sync,
            seed=run.seed,
        )
        return cls(cluster, _count_rounds(run, aggregation, syncs=momentum_sync is not None))

    @property
    def sent_bytes(self) -> int:
        return self.optimizer.traffic.sent_bytes

    @property
    def up_bits_per_parameter(self) -> float:
        return self.optimizer.up_bits_per_parameter

    @property
    def down_bits_per_parameter(self) -> float:
        return self.optimizer.down_bits_per_parameter

    def collect(self, worker: int) -> None:
        self.optimizer.collect(worker)

    def step(self) -> None:
        self.optimizer.step()


def _count_rounds(run: MethodRun, aggregation: Aggregation, *, syncs: bool) -> int:
    """Count the rounds of a step; staggered momenta travel in a separate exchange."""
    if run.workers == 1:
        return 0
    shape = aggregation.shape_of(run.n_elements, run.workers)
    return AllReduce().cost(shape).rounds * (2 if syncs else 1)
