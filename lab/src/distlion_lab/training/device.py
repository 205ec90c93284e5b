"""The device that a run computes on."""

from __future__ import annotations

import os

import torch

from distlion.errors import InvalidArgumentError
from distlion_lab.planning.accelerator import explain_missing_cuda
from distlion_lab.tasks.base import Batch


def check_device(name: str) -> None:
    """Raise InvalidArgumentError unless this process can compute on a device of this name."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgumentError(
            f"device is {name!r}; expected one that torch knows, such as cpu or cuda"
        ) from error
    if device.type != "cuda":
        return
    if missing := explain_missing_cuda():
        raise InvalidArgumentError(
            f"device is {name!r}, but torch finds no such device here: {missing}"
        )
    n_devices = torch.cuda.device_count()
    if device.index is not None and device.index >= n_devices:
        raise InvalidArgumentError(
            f"device is {name!r}, but torch finds {n_devices} here, counted from cuda:0"
        )


def find_device(name: str, rank: int) -> torch.device:
    """Return the device of a worker: the workers of a machine are dealt its GPUs in turn.

    Args:
        name: Device of the settings; ``cuda:1`` puts all workers on that one.
        rank: Number of the worker; under torchrun its local rank counts instead.
    """
    device = torch.device(name)
    if device.type != "cuda" or ":" in name:
        return device
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on a device."""
    if device.type == "cpu":
        return batch
    inputs = {name: tensor.to(device) for name, tensor in batch.inputs.items()}
    return Batch(inputs, batch.targets.to(device))
