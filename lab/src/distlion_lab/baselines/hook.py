"""A method as a communication hook of DistributedDataParallel."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with its own types.
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from distlion.errors import InvalidArgumentError, ProcessGroupError, UnsupportedTypeError
from distlion_lab.baselines.base import Compression, Payload
from distlion_lab.baselines.ring import ring_all_gather_bytes
from distlion_lab.baselines.worker import Worker


class CompressionState:
    """The hook's state on one worker: each parameter's state, the step, and bytes.

    State is kept by parameter, since DDP rebuilds its buckets after the first step.

    Args:
        compression: The method.
        params: Parameters of the wrapped model, in its order; frozen ones are skipped.
        process_group: The workers whose gradients are averaged; None for the default group.
        seed: Seed of random levels and samples, equal on all workers.

    Raises:
        UnsupportedTypeError: The method's payloads are added in an all-reduce, not gathered.
        ProcessGroupError: There is no process group.

    Attributes:
        steps: Number of backward passes with averaged gradients.
        sent_bytes: Bytes that this rank handed to the network in all of them: gathers in a ring,
            with shared scalars, lengths and padding.
        uplink_bytes, reply_bytes: Bytes that the method itself would have sent to a server, and a
            server to this worker.
    """

    def __init__(
        self,
        compression: Compression,
        params: Iterable[Tensor],
        *,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        if not compression.gathers:
            raise UnsupportedTypeError(
                f"the payloads of {compression!r} are added in an all-reduce; register PyTorch's "
                "fp16_compress_hook instead of this hook"
            )
        process_group = process_group or dist.group.WORLD
        if process_group is None:
            raise ProcessGroupError("there is no process group; call init_process_group first")
        self.compression = compression
        self.process_group = process_group
        self.steps = 0
        self.sent_bytes = 0
        self.uplink_bytes = 0
        self.reply_bytes = 0
        trainable = [param for param in params if param.requires_grad]
        self._indices = {param: index for index, param in enumerate(trainable)}
        self._worker = Worker(
            compression, rank=process_group.rank(), n_workers=process_group.size(), seed=seed
        )

    def compress(self, param: Tensor, grad: Tensor, scalar: Tensor) -> Payload:
        """Compress the gradient of a parameter, (n,) float32.

        Raises:
            InvalidArgumentError: The parameter is not one of the given ones.
        """
        if param not in self._indices:
            raise InvalidArgumentError(
                f"a gradient of shape {tuple(param.shape)} belongs to none of the given "
                "parameters; give CompressionState the parameters of the wrapped model"
            )
        return self._worker.compress(self._indices[param], grad, step=self.steps, scalar=scalar)

    def gather(self, row: Tensor) -> list[Tensor]:
        """Gather tensors of one shape from all ranks, and count the bytes."""
        rows = [torch.empty_like(row) for _ in range(self.process_group.size())]
        dist.all_gather(rows, row, group=self.process_group)
        self.sent_bytes += ring_all_gather_bytes(row.nbytes, len(rows))
        return rows

    def count(self, payloads: Sequence[Payload], n_elements: int) -> None:
        """Count the bytes that the method itself would have sent about one parameter."""
        own = payloads[self.process_group.rank()]
        self.uplink_bytes += self.compression.uplink_bytes(own)
        self.reply_bytes += self.compression.reply_bytes(payloads, n_elements)


def compression_hook(state: CompressionState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Replace the gradients of a bucket by the method's mean over all ranks.

    1. share the scalars of the bucket's parameters, if the method has one
    2. compress each gradient
    3. share the payloads' lengths, if they vary
    4. gather the payloads, each padded to the longest of its parameter
    5. aggregate them in rank order, which is the same arithmetic on every rank

    Args:
        state: State for this model, registered together with this hook.
        bucket: Gradients of any floating dtype; the arithmetic is float32. Overwritten.

    Returns:
        A future that is done already and holds the bucket's buffer.

    Example:
        >>> state = CompressionState(GradDrop(), model.parameters())
        >>> model.register_comm_hook(state, compression_hook)
    """
    grads = [gradient.flatten().float() for gradient in bucket.gradients()]
    scalars = _share_scalars(state, grads)
    payloads = [
        state.compress(param, grad, scalar)
        for param, grad, scalar in zip(bucket.parameters(), grads, scalars, strict=True)
    ]
    lengths = _share_lengths(state, payloads, grads[0].device)
    wires = _gather_payloads(state, payloads, lengths)
    for index, gradient in enumerate(bucket.gradients()):
        received = [
            state.compression.read(wires[rank][index], gradient.numel(), scalar=scalars[index])
            for rank in range(len(wires))
        ]
        mean = state.compression.aggregate(received, gradient.numel())
        gradient.copy_(mean.view(gradient.shape))
        state.count(received, gradient.numel())
    state.steps += bucket.is_last()
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _share_scalars(state: CompressionState, grads: Sequence[Tensor]) -> Sequence[Tensor]:
    own = torch.stack([state.compression.measure(grad) for grad in grads])
    if state.compression.shares_scalar:
        # Not an all-reduce: the maximum must be NaN if any of them is.
        own = torch.stack(state.gather(own)).amax(dim=0)
    return own.unbind()


def _share_lengths(
    state: CompressionState, payloads: Sequence[Payload], device: torch.device
) -> list[list[int]]:
    """Return the bytes of every payload of every rank."""
    own = torch.tensor([payload.n_bytes for payload in payloads], dtype=torch.int64, device=device)
    rows = state.gather(own) if state.compression.varies else [own] * state.process_group.size()
    return [row.tolist() for row in rows]


def _gather_payloads(
    state: CompressionState, payloads: Sequence[Payload], lengths: Sequence[Sequence[int]]
) -> list[list[Tensor]]:
    """Return the bytes of every payload of every rank, (n_bytes,) uint8 each."""
    longest = [max(column) for column in zip(*lengths, strict=True)]
    padded = [
        torch.nn.functional.pad(payload.to_wire(), (0, length - payload.n_bytes))
        for payload, length in zip(payloads, longest, strict=True)
    ]
    rows = state.gather(torch.cat(padded))
    return [
        [wire[:length] for wire, length in zip(torch.split(row, longest), own, strict=True)]
        for row, own in zip(rows, lengths, strict=True)
    ]
