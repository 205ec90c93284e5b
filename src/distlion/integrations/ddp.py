"""DistributedDataParallel beside a voting optimizer: its averaging of gradients must be off."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with its own types.
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from distlion.errors import UnsupportedTypeError


def disable_all_reduce(model: DistributedDataParallel) -> None:
    """Make every rank of a DDP model keep its own gradients.

    Call it once, right after wrapping. DDP then behaves as inside its own ``no_sync()``, which may
    still be used. Backward leaves gradients where autograd puts them, so overlap works and nothing
    is copied into buckets. Buffers, such as BatchNorm's statistics, are still broadcast before
    every forward pass that follows one with gradients, inside ``no_sync()`` too.

    Args:
        model: The wrapped model.

    Raises:
        UnsupportedTypeError: The model is not wrapped in DistributedDataParallel. Or the wrapper
            has ``static_graph=True`` or ``mixed_precision``, which need the all-reduce, or
            ``delay_all_reduce_named_params`` with an all-reduce that cannot be switched off. Or it
            has a communication hook already.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> disable_all_reduce(model)  # from distlion.integrations.ddp
        >>> optimizer = distlion.DistributedLion(model.parameters(), lr=1e-4)
    """
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedTypeError(
            f"model is a {type(model).__name__}; expected DistributedDataParallel (a bare model "
            "needs no such call; call it before torch.compile)"
        )
    if model.static_graph:
        raise UnsupportedTypeError(
            "static_graph=True makes DDP wait for an all-reduce that does not come; wrap the model "
            "without it, or do not wrap it at all"
        )
    if model.mixed_precision is not None:
        raise UnsupportedTypeError(
            "mixed_precision= of DDP restores the gradients' dtype in its all-reduce; use "
            "torch.autocast, or do not wrap the model"
        )
    # DDP averages these in hooks on the parameters, which ignore no_sync() and communication hooks.
    if getattr(model, "_delay_all_reduce_params", ()):
        raise UnsupportedTypeError(
            "delay_all_reduce_named_params= makes DDP average these gradients in a hook of their "
            "own, which cannot be switched off; wrap the model without it"
        )
    # Some trainers set the attribute below again for the last micro-batch: gradients then pass
    # through buckets, and this hook keeps them local.
    try:
        model.register_comm_hook(None, _keep_local)
    except RuntimeError as error:
        raise UnsupportedTypeError(
            f"the wrapper has a communication hook already ({error}), by register_comm_hook() or "
            "an earlier call of this function; leave the hook out, as no gradients travel, and "
            "call this once"
        ) from error
    model.require_backward_grad_sync = False
    model.register_forward_hook(_keep_buffers_alike)


def _keep_local(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _keep_buffers_alike(model: DistributedDataParallel, inputs: Any, output: Any) -> None:
    """Request the broadcast that DDP drops together with the all-reduce."""
    model.require_forward_param_sync = torch.is_grad_enabled()
