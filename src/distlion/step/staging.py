"""Copies between the device of parameters and host memory, which the network reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor

from distlion.errors import DeviceError, DistlionError


def bring_down(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors into host memory, on the current stream, and wait for them once.

    Nothing may be sent before it is known to be complete. So the host waits for the votes of one
    bucket, and everything else that it must read; the thread sleeps meanwhile.

    Args:
        tensors: Tensors on one device; tensors on the CPU are returned unchanged.
    """
    device = tensors[0].device if tensors else None
    if device is None or device.type != "cuda":
        return [tensor.cpu() for tensor in tensors]
    copies = []
    for tensor in tensors:
        copy = tensor
        if tensor.device.type != "cpu":
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
            copy.copy_(tensor, non_blocking=True)
        copies.append(copy)
    arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(device))
    arrived.synchronize()
    return copies


def bring_up(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without waiting; later work on the device comes after it."""
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
    return pinned.copy_(tensor).to(device, non_blocking=True)


def read_together(parts: Sequence[Tensor]) -> list[float]:
    """Read the numbers of flat tensors, one after the other, waiting once for each device."""
    devices = list(dict.fromkeys(part.device for part in parts))
    read: dict[torch.device, Iterator[float]] = {}
    for device in devices:
        read[device] = iter(torch.cat([part for part in parts if part.device == device]).tolist())
    return [number for part in parts for number in islice(read[part.device], len(part))]


@contextmanager
def name_failure(device: torch.device, what: str) -> Iterator[None]:
    """Name the work in which a device failed, as it reports errors some time after the launch.

    Raises:
        DeviceError: It failed while ``what``. Exhausted memory stays torch's own error.
    """
    try:
        yield
    except (DistlionError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch's are RuntimeErrors, Triton's are not
        sentence = str(error).split("\n")[0]
        raise DeviceError(
            f"{device} failed while {what}, or before: {sentence}; nothing of this step was "
            "committed here. Start again from a checkpoint; CUDA_LAUNCH_BLOCKING=1 finds the "
            "launch that failed"
        ) from error
