"""Exchanges of every method among real workers: what a host of the lab does when it is timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import target_path  # noqa: F401
import torch
import torch.distributed as dist
from contest import RULES
from torch import Tensor, nn

import distlion
from distlion.votes import SCALED_RULES
from distlion.wire import AllReduce
from distlion_lab.baselines.base import Compression
from distlion_lab.baselines.ddp import compress_gradients, wrap_in_ddp
from distlion_lab.baselines.half import HalfPrecision
from distlion_lab.baselines.one_bit_adam import compress_signs
from distlion_lab.baselines.power_sgd import PowerSGD
from distlion_lab.baselines.top_bits import TopBits
from distlion_lab.baselines.worker import Worker
from distlion_lab.training.workers import gather_rows

MEAN, HALF, LOW_RANK, SIGNS, SPARSE = "mean", "half", "low rank", "signs", "sparse"
LOW_RANK_4 = "low rank 4"
VOTE = "majority"
"""Methods that are timed by name; votes on deltas are timed by the name of their rule."""
_NEVER = 10**9
_RATE = 1e-3


class Contestant(Protocol):
    """A worker's side of an exchange."""

    def prepare(self) -> None:
        """Make something to exchange; not timed, and without any message."""

    def exchange(self) -> None:
        """Exchange it."""


def make_contestants(params: Sequence[Tensor]) -> dict[str, Contestant]:
    """Make all of them over tensors of the same shapes; every rank calls it."""
    hooks: dict[str, Compression | PowerSGD | None]
    hooks = {MEAN: None, HALF: HalfPrecision()}
    hooks |= {LOW_RANK: PowerSGD(rank=1), LOW_RANK_4: PowerSGD(rank=4)}
    found: dict[str, Contestant] = {
        name: GradientMean(_copy(params), hook) for name, hook in hooks.items()
    }
    found[SIGNS] = SignsMean(_copy(params))
    found[SPARSE] = SparseMean(_copy(params))
    found[VOTE] = StepVote(_copy(params))
    for rule in RULES:
        found[rule] = DeltaVote(_copy(params), aggregation=SCALED_RULES[rule])
    return found


def _copy(params: Sequence[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone()) for param in params]


def _draw_like(params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.randn(param.shape) for param in params]


class _Weighted(nn.Module):
    """Return a loss whose gradients are given numbers, so that a backward pass costs next to none.

    Args:
        params: Of the model.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)
        self.grads = _draw_like(params)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.params, self.grads, strict=True)

    def forward(self) -> Tensor:
        terms = [torch.vdot(p.flatten(), g.flatten()) for p, g in self._pairs()]
        return torch.stack(terms).sum()


class GradientMean:
    """DDP's mean gradient, with a hook or without.

    Args:
        params: Of the model.
        hook: What is sent in place of 32 bits.
    """

    def __init__(self, params: Sequence[nn.Parameter], hook: Compression | PowerSGD | None) -> None:
        self._wrapped = wrap_in_ddp(_Weighted(params), hook)
        self.account = compress_gradients(self._wrapped, hook, seed=0)
        self._loss = torch.zeros(())

    def prepare(self) -> None:
        self._wrapped.zero_grad(set_to_none=False)
        self._loss = self._wrapped()

    def exchange(self) -> None:
        self._loss.backward()  # type: ignore[no-untyped-call]


class StepVote:
    """A step of ``DistributedLion``: its vote, and the commit."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._grads = _draw_like(params)
        self._params = params
        self.optimizer = distlion.DistributedLion(
            params, _RATE, exchange=AllReduce(), replicas=distlion.Replicas(check_every=None)
        )

    def prepare(self) -> None:
        for param, grad in zip(self._params, self._grads, strict=True):
            param.grad = grad

    def exchange(self) -> None:
        self.optimizer.step()


class DeltaVote:
    """A vote of ``LocalSteps``, after a local step.

    Args:
        params: Of the model.
        options: Of ``LocalSteps``.
    """

    def __init__(self, params: Sequence[nn.Parameter], **options: object) -> None:
        self._grads = _draw_like(params)
        self._params = params
        self.optimizer = distlion.LocalSteps(
            torch.optim.AdamW(params, _RATE),
            every=_NEVER,
            exchange=AllReduce(),
            replicas=distlion.Replicas(check_every=None),
            **options,  # type: ignore[arg-type]
        )

    def prepare(self) -> None:
        for param, grad in zip(self._params, self._grads, strict=True):
            param.grad = grad
        self.optimizer.step()

    def exchange(self) -> None:
        self.optimizer.vote()


class SignsMean:
    """1-bit Adam's exchange: signs to the owners of shards, and the signs of their sums back.

    Args:
        params: Of the model.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._sizes = [param.numel() for param in params]
        self._n_workers = dist.get_world_size()
        self._n_shard = -(-sum(self._sizes) // (8 * self._n_workers)) * 8
        self._owners = torch.repeat_interleave(
            torch.arange(len(self._sizes)), torch.tensor(self._sizes)
        )
        self._error = torch.zeros(sum(self._sizes))
        self._server_error = torch.zeros(self._n_shard)
        self._momentum = torch.zeros(0)
        self.outcome = torch.zeros(0)
        self.sent_bytes = 0

    def prepare(self) -> None:
        self._momentum = torch.randn(sum(self._sizes))

    def exchange(self) -> None:
        # 1: signs of this worker, and its scales
        rest = self._momentum + self._error
        parts = [compress_signs(part) for part in rest.split(self._sizes)]
        mine = torch.cat(parts)
        self._error = rest - mine
        scales = torch.stack([part.flatten()[0].abs() for part in parts])
        # 2: each shard to its owner, and all scales to everybody
        total = self._sum_shard(self._scatter(self._pack(mine)), self._gather(scales))
        # 3: signs of the sum of this shard, to everybody
        wanted = total + self._server_error
        sent = compress_signs(wanted)
        self._server_error = wanted - sent
        magnitudes = self._gather(sent[:1].abs())
        rows = self._gather(_pack_bits(sent))
        self.outcome = (_unpack_bits(rows) * magnitudes).flatten()[: self._error.numel()]

    def _pack(self, values: Tensor) -> Tensor:
        """Return the bits of each owner's shard, (workers, shard / 8) uint8."""
        padded = torch.zeros(self._n_workers * self._n_shard)
        padded[: values.numel()] = values
        return _pack_bits(padded).view(self._n_workers, -1)

    def _scatter(self, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows)
        self.sent_bytes += rows.nbytes - rows[0].nbytes
        return received

    def _gather(self, row: Tensor) -> Tensor:
        self.sent_bytes += (self._n_workers - 1) * row.nbytes
        return gather_rows(row)

    def _sum_shard(self, rows: Tensor, scales: Tensor) -> Tensor:
        """Return the mean of all workers' values in this rank's shard."""
        begin = dist.get_rank() * self._n_shard
        owners = self._owners[begin : begin + self._n_shard]
        total = torch.zeros(self._n_shard)
        for row, own in zip(rows, scales, strict=True):
            total[: len(owners)] += _unpack_bits(row)[: len(owners)] * own[owners]
        return total / self._n_workers


def _pack_bits(values: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits((values >= 0).numpy()))


def _unpack_bits(bits: Tensor) -> Tensor:
    """Return the signs of rows of bits, (..., 8 n) float32."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), axis=-1)).float() * 2 - 1


class SparseMean:
    """The exchange of ``sparse-H``: payloads of fixed length, gathered by everybody.

    Args:
        params: Of the model.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._rank, self._n_workers = dist.get_rank(), dist.get_world_size()
        self._message = TopBits()
        self._worker = Worker(self._message, rank=self._rank, n_workers=self._n_workers, seed=0)
        self._deltas: list[Tensor] = []
        self.means: list[Tensor] = []
        self.sent_bytes = 0

    def prepare(self) -> None:
        self._deltas = [each.flatten() for each in _draw_like(self._params)]

    def exchange(self) -> None:
        nothing = torch.zeros(())
        wires = [
            self._worker.compress(index, delta, step=0, scalar=nothing).to_wire()
            for index, delta in enumerate(self._deltas)
        ]
        whole = torch.cat(wires)
        rows = gather_rows(whole)
        self.sent_bytes += (self._n_workers - 1) * whole.numel()
        cut = [row.split([wire.numel() for wire in wires]) for row in rows]
        self.means = [
            self._message.aggregate(
                [self._message.read(row[index], delta.numel(), scalar=nothing) for row in cut],
                delta.numel(),
            )
            for index, delta in enumerate(self._deltas)
        ]
