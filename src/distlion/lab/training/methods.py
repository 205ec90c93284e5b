"""The rules of the command line as optimizers, each with its own account of bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlion.errors import ReplicaMismatchError
from distlion.exchange import PATTERNS
from distlion.lab.baselines import (
    HALF_BYTES,
    AllReduceState,
    Compression,
    CompressionState,
    CountedPowerSGD,
    DeepGradientCompression,
    GradDrop,
    PowerSGD,
    TernGrad,
    compression_hook,
    full_precision_hook,
    half_precision_hook,
    power_sgd_hook,
)
from distlion.lab.training.train_settings import (
    AUTO,
    DEFAULT_STEP_TIMEOUT_S,
    BaselineName,
    TrainSettings,
)
from distlion.lab.training.vote_names import (
    ADAMW_BETAS,
    LION_BETAS,
    find_vote,
    split_betas,
    split_cautious,
)
from distlion.optim import DistributedLion, Lion, MomentumSync

_ONE_BUCKET_MB = 1 << 20


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

    def diagnostics(self) -> list[dict[str, Any]]:
        """Return how far votes agreed as JSON can hold it; empty unless that was asked for."""

    def replicas_equal(self) -> bool:
        """Return whether all ranks, which must all call it, hold bitwise identical parameters."""


def build_method(settings: TrainSettings, model: nn.Module) -> Method:
    """Build the optimizer of the rule over the default process group."""
    if settings.baseline is None:
        return VotingMethod.build(settings, model)
    return AveragingMethod.build(settings, model)


def gather_rows(row: Tensor) -> Tensor:
    """Stack the tensors of all ranks: (world_size, *row.shape). All ranks must call it."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


@dataclass(frozen=True)
class VotingMethod:
    """DistributedLion on a bare model: gradients stay local, votes are exchanged."""

    model: nn.Module
    optimizer: DistributedLion

    @classmethod
    def build(cls, settings: TrainSettings, model: nn.Module) -> VotingMethod:
        """Build DistributedLion with the rule and the exchange of the settings."""
        vote = find_vote(settings.rule)
        assert vote is not None  # TrainSettings checked it
        optimizer = DistributedLion(
            model.named_parameters(),
            lr=settings.lr,
            betas=vote.betas,
            cautious=vote.cautious,
            weight_decay=settings.weight_decay,
            aggregation=vote.rule,
            exchange="auto" if settings.exchange == AUTO else PATTERNS[settings.exchange],
            momentum_sync=(
                None if settings.sync_every is None else MomentumSync(every=settings.sync_every)
            ),
            overlap=settings.overlap.choice,
            diagnose_every=settings.diagnose_every,
            seed=settings.seed,
            step_timeout_s=(
                DEFAULT_STEP_TIMEOUT_S
                if settings.step_timeout_s is None
                else settings.step_timeout_s
            ),
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

    def diagnostics(self) -> list[dict[str, Any]]:
        """Return the optimizer's diagnostics."""
        return [dataclasses.asdict(found) for found in self.optimizer.diagnostics()]

    def replicas_equal(self) -> bool:
        """Return whether the optimizer finds the replicas equal."""
        try:
            self.optimizer.verify_replicas()
        except ReplicaMismatchError:
            return False
        return True


class _Account(Protocol):
    """The state of a communication hook, which counts."""

    @property
    def steps(self) -> int:
        """Return the backward passes so far."""

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that this worker has sent in all of them."""


@dataclass(frozen=True)
class AveragingMethod:
    """An optimizer fed the mean gradient of all workers, plain or compressed, by a hook of DDP.

    Gloo does not report what it sends, so bytes are those of rings that carry what the hook handed
    over.
    """

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    account: _Account

    @classmethod
    def build(cls, settings: TrainSettings, model: nn.Module) -> AveragingMethod:
        """Wrap the model in DDP with the hook of the rule; build the optimizer of the rule."""
        optimizer = _build_optimizer(settings, model)
        wrapped = _wrap(settings, model)
        account, hook = _build_hook(settings, wrapped)
        wrapped.register_comm_hook(account, hook)
        return cls(wrapped, optimizer, account)

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
            "received_bytes": self.sent_bytes,  # a ring passes on as much as it takes
            "bits_per_parameter": self.bits_per_parameter,
        }

    def diagnostics(self) -> list[dict[str, Any]]:
        """Return nothing: nobody votes."""
        return []

    def replicas_equal(self) -> bool:
        """Compare a digest of all parameters over the ranks."""
        digest = hashlib.sha256()
        for param in self.model.parameters():
            digest.update(param.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        # A clone: Gloo's thread, which lets go of it last, could not free Python's memory at exit.
        rows = gather_rows(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).clone())
        return bool((rows == rows[0]).all())


def _wrap(settings: TrainSettings, model: nn.Module) -> DistributedDataParallel:
    one_bucket = settings.baseline is BaselineName.DDP_POWERSGD  # as its hook demands
    with warnings.catch_warnings():
        # Torch 2.13 renamed the argument; older ones know only this name.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model,
            broadcast_buffers=False,
            bucket_cap_mb=_ONE_BUCKET_MB if one_bucket else None,
        )


def _build_optimizer(settings: TrainSettings, model: nn.Module) -> torch.optim.Optimizer:
    """Build what steps on the mean gradient.

    TernGrad and GradDrop say nothing of the optimizer, so they get AdamW: with plain SGD, vision
    transformers and GPTs barely train. DGC has its momentum inside, and SGD without one outside.
    """
    params, lr, weight_decay = model.parameters(), settings.lr, settings.weight_decay
    base, betas = split_betas(settings.rule)
    match settings.baseline:
        case BaselineName.GLOBAL_ADAMW | BaselineName.TERNGRAD | BaselineName.GRADDROP:
            return torch.optim.AdamW(params, lr, betas or ADAMW_BETAS, weight_decay=weight_decay)
        case BaselineName.DGC:
            # Without momentum, its L2 term is decoupled weight decay.
            return torch.optim.SGD(params, lr=lr, weight_decay=weight_decay)
        case _:
            _, cautious = split_cautious(base)
            betas = betas or LION_BETAS
            return Lion(params, lr, betas, weight_decay=weight_decay, cautious=cautious)


def _build_hook(
    settings: TrainSettings, model: DistributedDataParallel
) -> tuple[_Account, Callable[..., Any]]:
    group = model.process_group
    compression = _build_compression(settings)
    if compression is not None:
        state = CompressionState(
            compression, model.parameters(), process_group=group, seed=settings.seed
        )
        return state, compression_hook
    match settings.baseline:
        case BaselineName.DDP_FP16:
            return AllReduceState(group, element_bytes=HALF_BYTES), half_precision_hook
        case BaselineName.DDP_POWERSGD:
            return CountedPowerSGD(group, PowerSGD(), seed=settings.seed), power_sgd_hook
        case _:
            return AllReduceState(group), full_precision_hook


def _build_compression(settings: TrainSettings) -> Compression | None:
    match settings.baseline:
        case BaselineName.TERNGRAD:
            return TernGrad()
        case BaselineName.GRADDROP:
            return GradDrop()
        case BaselineName.DGC:
            # The paper raises sparsity and learning rate over the same steps.
            return DeepGradientCompression(warmup_steps=settings.warmup_steps)
        case _:
            return None
