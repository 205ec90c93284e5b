"""DistributedDataParallel beside a voting optimizer: its averaging of gradients must be off."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with its own types.
import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from distlion.errors import UnsupportedTypeError


def disable_all_reduce(model: DistributedDataParallel) -> None:
    """Let every rank of a DDP model keep its own gradients.

    Call it once, right after wrapping: DDP takes one communication hook. Buffers are still
    broadcast in forward.

    Args:
        model: The wrapped model.

    Raises:
        UnsupportedTypeError: The model is not wrapped in DistributedDataParallel.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> disable_all_reduce(model)  # from distlion.integrations.ddp
        >>> optimizer = distlion.DistributedLion(model.parameters(), lr=1e-4)
    """
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedTypeError(
            f"model is a {type(model).__name__}; expected DistributedDataParallel (a bare model "
            "needs no such call)"
        )
    model.register_comm_hook(None, _keep_local)


def _keep_local(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
