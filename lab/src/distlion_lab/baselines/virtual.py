"""N workers of a method that averages gradients, in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, NonFiniteError, UnsupportedTypeError
from distlion.virtual.members import read_worker
from distlion_lab.baselines.base import Compression, Payload, gathered_bytes
from distlion_lab.baselines.power_sgd import PowerSGD
from distlion_lab.baselines.ring import ring_all_reduce_bytes
from distlion_lab.baselines.worker import Worker

_FLOAT32_BYTES = 4


class VirtualBaseline:
    """Train as N workers that average their gradients, plain or compressed.

    Workers take turns with one set of parameters: each computes its gradient and is collected. Then
    the mean goes into ``p.grad`` and the optimizer steps. Memory holds the method's state of every
    worker and, within a step, one float32 sum or all payloads. With a shared scalar (TernGrad) it
    holds all gradients, since no worker can compress before the last one is collected.

    Args:
        optimizer: Optimizer that steps on the mean. Gradients are collected for the parameters that
            are trainable at construction.
        workers: N, at least 1.
        compression: The method; None adds float32 gradients in rank order.
        seed: Seed of random levels, samples and factors.

    Attributes:
        optimizer: The given optimizer.
        rounds: Rounds of a step: sequential messages.

    Raises:
        InvalidArgumentError: ``workers`` is less than 1.

    Notes:
        Compressed means match N processes with ``compression_hook`` bit by bit, if the optimizer
        has the parameters in the order of the model. Plain and float16 sums are taken in rank
        order; an all-reduce has its own order. PowerSGD keeps only the error of the mean, which
        suffices. But for rounding and the draw of the first factors it equals N processes with
        PyTorch's hook.
        A worker without a gradient for a parameter counts as 0. A parameter without any worker's
        gradient stays unchanged.

    Example:
        >>> baseline = VirtualBaseline(optimizer, workers=32, compression=GradDrop())
        >>> for batches in loader:
        ...     for worker, batch in enumerate(batches):
        ...         model(batch).loss.backward()
        ...         baseline.collect(worker)
        ...     baseline.step()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        workers: int,
        compression: Compression | PowerSGD | None = None,
        seed: int = 0,
    ) -> None:
        if workers < 1:
            raise InvalidArgumentError(f"workers is {workers}; expected 1 or more")
        self.optimizer = optimizer
        self.rounds = _count_rounds(workers, compression)
        self._n_workers = workers
        self._params: list[Tensor] = [
            param
            for group in optimizer.param_groups
            for param in group["params"]
            if param.requires_grad
        ]
        self._n_elements = sum(param.numel() for param in self._params)
        self._collected = 0
        self._steps = 0
        self._bytes = _Bytes()
        self._mean: _Mean
        if compression is None:
            self._mean = _PlainMean(len(self._params), workers)
        elif isinstance(compression, PowerSGD):
            self._mean = _LowRankMean(compression, self._params, n_workers=workers, seed=seed)
        else:
            self._mean = _CompressedMean(compression, self._params, n_workers=workers, seed=seed)

    @property
    def up_bits_per_parameter(self) -> float:
        """Bits that a worker sends to a server in a step, indices and scales included.

        It is the mean over workers and steps, for each trainable element; 0 before the first step.
        """
        return 8 * self._bytes.uplink / (self._n_workers * max(1, self._steps * self._n_elements))

    @property
    def down_bits_per_parameter(self) -> float:
        """Bits that the server sends to each worker in a step; see ``up_bits_per_parameter``."""
        return 8 * self._bytes.reply / max(1, self._steps * self._n_elements)

    @property
    def sent_bytes(self) -> int:
        """Bytes that each of N processes would have sent in all steps so far.

        They are counted for a ring all-reduce, or for the gathers of ``compression_hook`` if the
        network cannot add the payloads.
        """
        reduced = ring_all_reduce_bytes(self._bytes.reduced, self._n_workers, element_bytes=1)
        return self._bytes.gathered + reduced

    @torch.no_grad()
    def collect(self, worker: int) -> None:
        """Take every ``p.grad`` as the gradient of one worker and clear it.

        Args:
            worker: Number of the worker; the workers come in the order 0, 1, ..., N - 1.

        Raises:
            InvalidArgumentError: It is not this worker's turn; nothing is taken.
            UnsupportedTypeError: ``worker`` is no integer, or a gradient is sparse; nothing is
                taken.
        """
        worker = read_worker(worker)
        if worker != self._collected or worker == self._n_workers:
            expected = (
                f"worker {self._collected}" if self._collected < self._n_workers else "step()"
            )
            raise InvalidArgumentError(f"worker {worker} is collected; expected {expected}")
        grads = [_flatten(param) for param in self._params]
        for param in self._params:
            param.grad = None
        self._mean.add(worker, grads)
        self._collected += 1

    @torch.no_grad()
    def step(self) -> None:
        """Write the mean into ``p.grad``, step the optimizer, and clear ``p.grad``.

        Raises:
            InvalidArgumentError: Not all workers were collected.
            NonFiniteError: A mean is not finite; no parameter was moved. The method's state may
                hold it now: restart from a checkpoint.
        """
        if self._collected != self._n_workers:
            raise InvalidArgumentError(
                f"{self._collected} of {self._n_workers} workers were collected; collect all of "
                "them before step()"
            )
        self._collected = 0
        self._steps += 1
        means = list(self._mean.finish(self._bytes))
        for index, mean in enumerate(means):
            if mean is not None and not bool(mean.isfinite().all()):
                raise NonFiniteError(
                    f"the mean gradient of parameter {index} is not finite; no parameter was moved",
                    step=self._steps - 1,
                )
        for param, mean in zip(self._params, means, strict=True):
            param.grad = None if mean is None else mean.view(param.shape).to(param.dtype)
        self.optimizer.step()
        for param in self._params:
            param.grad = None


@dataclass
class _Bytes:
    """Count bytes.

    Attributes:
        uplink: Bytes from all workers together to a server, in all steps.
        reply: Bytes from a server to each worker, in all steps.
        gathered: Bytes that each worker sends in gathers, in all steps.
        reduced: Bytes that each worker hands to all-reduces, in all steps.
    """

    uplink: int = 0
    reply: int = 0
    gathered: int = 0
    reduced: int = 0

    def add_reduced(self, n_elements: int, n_workers: int) -> None:
        """Count float32 numbers of one parameter that every worker hands to an all-reduce."""
        n_bytes = _FLOAT32_BYTES * n_elements
        self.uplink += n_workers * n_bytes
        self.reply += n_bytes
        self.reduced += n_bytes


class _Mean(Protocol):
    """Collects the gradients of a step, worker by worker, and yields their mean."""

    def add(self, worker: int, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of one worker, (n,) float32 each."""

    def finish(self, count: _Bytes) -> Iterator[Tensor | None]:
        """Yield the mean of each parameter, (n,) float32; None if no worker has a gradient."""


class _PlainMean:
    """A mean with one running sum."""

    def __init__(self, n_params: int, n_workers: int) -> None:
        self._n_workers = n_workers
        self._sums: list[Tensor | None] = [None] * n_params

    def add(self, worker: int, grads: Sequence[Tensor | None]) -> None:
        for index, grad in enumerate(grads):
            total = self._sums[index]
            if grad is not None:
                self._sums[index] = grad if total is None else total + grad

    def finish(self, count: _Bytes) -> Iterator[Tensor | None]:
        for mean in self.take():
            if mean is not None:
                count.add_reduced(mean.numel(), self._n_workers)
            yield mean

    def take(self) -> Iterator[Tensor | None]:
        """Yield the mean of each parameter, and forget it."""
        for index, total in enumerate(self._sums):
            self._sums[index] = None
            yield None if total is None else total / self._n_workers


@dataclass
class _Matrix:
    """State of PowerSGD for a parameter that it compresses."""

    n_sent: int
    factor: Tensor
    lost: Tensor


class _LowRankMean:
    """A mean with one running sum that keeps each mean's error from step to step."""

    def __init__(
        self, method: PowerSGD, params: Sequence[Tensor], *, n_workers: int, seed: int
    ) -> None:
        self._method = method
        self._n_workers = n_workers
        self._plain = _PlainMean(len(params), n_workers)
        self._step = 0
        self._matrices: dict[int, _Matrix] = {}
        factors = method.draw_factors([param.shape for param in params], seed)
        for position, factor in factors.items():
            param = params[position]
            n_sent = method.sent_elements(param.shape)
            assert n_sent is not None  # it has a factor
            lost = torch.zeros(
                param.shape[0], len(factor), dtype=torch.float32, device=param.device
            )
            self._matrices[position] = _Matrix(n_sent, factor.to(param.device), lost)

    def add(self, worker: int, grads: Sequence[Tensor | None]) -> None:
        self._plain.add(worker, grads)

    def finish(self, count: _Bytes) -> Iterator[Tensor | None]:
        is_whole = self._step < self._method.start_step
        self._step += 1
        for index, mean in enumerate(self._plain.take()):
            matrix = None if is_whole else self._matrices.get(index)
            if mean is None:
                yield None
            elif matrix is None:
                count.add_reduced(mean.numel(), self._n_workers)
                yield mean
            else:
                count.add_reduced(matrix.n_sent, self._n_workers)
                wanted = mean.view_as(matrix.lost) + matrix.lost
                sent, matrix.factor = self._method.approximate(wanted, matrix.factor)
                matrix.lost = wanted - sent
                yield sent.flatten()


class _CompressedMean:
    """A mean that holds each worker's payloads, or gradients if a scalar must be shared first."""

    def __init__(
        self, compression: Compression, params: Sequence[Tensor], *, n_workers: int, seed: int
    ) -> None:
        self._compression = compression
        self._params = params
        self._workers = [
            Worker(compression, rank=rank, n_workers=n_workers, seed=seed)
            for rank in range(n_workers)
        ]
        self._held: list[list[Payload | Tensor | None]] = []
        self._step = 0

    def add(self, worker: int, grads: Sequence[Tensor | None]) -> None:
        if self._compression.shares_scalar:
            self._held.append(list(grads))
            return
        self._held.append(
            [
                None if grad is None else self._compress(worker, index, grad, grad.new_zeros(()))
                for index, grad in enumerate(grads)
            ]
        )

    def finish(self, count: _Bytes) -> Iterator[Tensor | None]:
        for index, held in enumerate(zip(*self._held, strict=True)):
            if all(each is None for each in held):
                yield None
                continue
            n_elements = self._params[index].numel()
            payloads = self._complete(index, held)
            self._count(count, payloads, n_elements)
            yield self._compression.aggregate(payloads, n_elements)
        self._held.clear()
        self._step += 1

    def _complete(self, index: int, held: Sequence[Payload | Tensor | None]) -> list[Payload]:
        """Compress the remaining gradients; a worker without a gradient sends zeros."""
        param = self._params[index]
        zeros = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
        entries = [zeros if each is None else each for each in held]
        measured = [self._compression.measure(each) for each in entries if isinstance(each, Tensor)]
        scalar = torch.stack(measured).amax() if measured else zeros.new_zeros(())
        return [
            self._compress(worker, index, each, scalar) if isinstance(each, Tensor) else each
            for worker, each in enumerate(entries)
        ]

    def _compress(self, worker: int, index: int, grad: Tensor, scalar: Tensor) -> Payload:
        return self._workers[worker].compress(index, grad, step=self._step, scalar=scalar)

    def _count(self, count: _Bytes, payloads: Sequence[Payload], n_elements: int) -> None:
        count.uplink += sum(self._compression.uplink_bytes(payload) for payload in payloads)
        count.reply += self._compression.reply_bytes(payloads, n_elements)
        if self._compression.gathers:
            count.gathered += gathered_bytes(self._compression, payloads)
        else:
            count.reduced += payloads[0].n_bytes


def _flatten(param: Tensor) -> Tensor | None:
    grad = param.grad
    if grad is None:
        return None
    if grad.layout is not torch.strided:
        raise UnsupportedTypeError(
            f"the gradient of a parameter of shape {tuple(param.shape)} is sparse; expected a "
            "dense one"
        )
    return grad.flatten().float()


def _count_rounds(workers: int, compression: Compression | PowerSGD | None) -> int:
    """Count the rounds of a step, in the method's favor.

    Sums travel along a tree in 2 ceil(log2 N) rounds, and PowerSGD's second factors follow the
    first ones. Gathered payloads go to all workers at once, and so do scalars exchanged before.
    """
    if workers == 1:
        return 0
    if isinstance(compression, PowerSGD):
        return 2 * _count_rounds(workers, None)
    if compression is None or not compression.gathers:
        return 2 * math.ceil(math.log2(workers))
    return 1 + compression.shares_scalar
