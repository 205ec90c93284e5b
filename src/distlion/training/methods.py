"""The rules of the command line as optimizers, each with its own account of bytes."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from distlion.aggregation import (
    Average,
    FullPrecision,
    MajorityVote,
    QuantizedVote,
    TernaryVote,
)
from distlion.errors import ReplicaMismatchError
from distlion.exchange import Direct, Gather, Server
from distlion.optim import DistributedLion, Lion
from distlion.training.settings import ExchangeName, RuleName, TrainSettings

_FLOAT32_BYTES = 4


class Method(Protocol):
    """A model to call, the optimizer that moves it, and what its steps have sent."""

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
        """Return the account of bytes as JSON can hold it."""

    def replicas_equal(self) -> bool:
        """Return whether all ranks, which must all call it, hold the same parameters to the bit."""


def build_method(settings: TrainSettings, model: nn.Module) -> Method:
    """Build the optimizer of the rule over the default process group."""
    if settings.rule.votes:
        return VotingMethod.build(settings, model)
    return AllReduceMethod.build(settings, model)


def gather_rows(row: Tensor) -> Tensor:
    """Stack the tensors of all ranks: (world_size, *row.shape). All ranks must call it."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def ring_all_reduce_bytes(n_elements: int, world_size: int) -> int:
    """Count the bytes that each worker sends in a ring all-reduce of fp32 numbers.

    Equation:
        2 (N - 1) / N * 4 n    (reduce-scatter and all-gather, each N - 1 messages of n / N numbers)
        N is ``world_size``, n is ``n_elements``; rounded down to whole bytes.
    """
    return 2 * (world_size - 1) * _FLOAT32_BYTES * n_elements // world_size


@dataclass(frozen=True)
class VotingMethod:
    """DistributedLion on a bare model: gradients stay local, votes are exchanged."""

    model: nn.Module
    optimizer: DistributedLion

    @classmethod
    def build(cls, settings: TrainSettings, model: nn.Module) -> VotingMethod:
        """Build DistributedLion with the rule and the exchange of the settings."""
        optimizer = DistributedLion(
            model.named_parameters(),
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            aggregation=_build_aggregation(settings),
            exchange=_build_exchange(settings.exchange),
            overlap=settings.overlap,
            seed=settings.seed,
        )
        return cls(model, optimizer)

    @property
    def sent_bytes(self) -> int:
        """Return the bytes of the steps; the replica digests are counted apart."""
        return self.optimizer.traffic.sent_bytes

    @property
    def bits_per_parameter(self) -> float:
        """Return the bits of the last step for each trainable parameter."""
        return self.optimizer.traffic.bits_per_parameter

    def traffic(self) -> dict[str, Any]:
        """Return the optimizer's traffic."""
        return dataclasses.asdict(self.optimizer.traffic)

    def replicas_equal(self) -> bool:
        """Return whether the optimizer finds the replicas equal."""
        try:
            self.optimizer.verify_replicas()
        except ReplicaMismatchError:
            return False
        return True


@dataclass
class _ReducedElements:
    """Count the numbers that gradient buckets handed to an all-reduce."""

    process_group: dist.ProcessGroup
    total: int = 0
    steps: int = 0


@dataclass(frozen=True)
class AllReduceMethod:
    """A full-precision optimizer fed the mean gradient of all workers, by DDP's all-reduce.

    Gloo does not tell what it sends, so bytes are those of a ring all-reduce of the buckets that
    DDP handed over.
    """

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    reduced: _ReducedElements

    @classmethod
    def build(cls, settings: TrainSettings, model: nn.Module) -> AllReduceMethod:
        """Wrap the model in DDP with a hook that counts; build Lion or AdamW."""
        kind = torch.optim.AdamW if settings.rule is RuleName.GLOBAL_ADAMW else Lion
        optimizer = kind(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)
        reduced = _ReducedElements(wrapped.process_group)
        # Without annotations: DDP compares them with types, and __future__ makes them strings.
        hook = lambda state, bucket: _all_reduce_and_count(state, bucket)  # noqa: E731, PLW0108
        wrapped.register_comm_hook(reduced, hook)
        return cls(wrapped, optimizer, reduced)

    @property
    def sent_bytes(self) -> int:
        """Return the bytes of the gradients' all-reduces."""
        return ring_all_reduce_bytes(self.reduced.total, dist.get_world_size())

    @property
    def bits_per_parameter(self) -> float:
        """Return the bits of a step for each trainable parameter."""
        elements = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        per_step = self.reduced.total / max(1, self.reduced.steps)
        return 8 * ring_all_reduce_bytes(round(per_step), dist.get_world_size()) / elements

    def traffic(self) -> dict[str, Any]:
        """Return steps and bytes."""
        return {
            "steps": self.reduced.steps,
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.sent_bytes,
            "bits_per_parameter": self.bits_per_parameter,
        }

    def replicas_equal(self) -> bool:
        """Compare a digest of all parameters over the ranks."""
        digest = hashlib.sha256()
        for param in self.model.parameters():
            digest.update(param.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        # A clone: Gloo's thread, which lets go of it last, could not free Python's memory at exit.
        rows = gather_rows(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).clone())
        return bool((rows == rows[0]).all())


def _all_reduce_and_count(
    reduced: _ReducedElements, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    reduced.total += bucket.buffer().numel()
    reduced.steps += bucket.is_last()
    return allreduce_hook(reduced.process_group, bucket)


def _build_aggregation(settings: TrainSettings) -> Any:
    match settings.rule:
        case RuleName.TERNARY:
            return TernaryVote()
        case RuleName.AVERAGE:
            return Average()
        case RuleName.QUANTIZED:
            assert settings.bits is not None  # TrainSettings checked both
            assert settings.norm is not None
            return QuantizedVote(bits=settings.bits, norm=settings.norm.value)
        case RuleName.FULL:
            return FullPrecision()
        case _:
            return MajorityVote()


def _build_exchange(name: ExchangeName) -> Any:
    match name:
        case ExchangeName.DIRECT:
            return Direct()
        case ExchangeName.GATHER:
            return Gather()
        case ExchangeName.SERVER:
            return Server()
        case ExchangeName.AUTO:
            return "auto"
