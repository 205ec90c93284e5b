"""The one place that chooses kernels. It never falls back: what is missing is an error."""

from __future__ import annotations

import os
import sys
from typing import cast

import torch

from distlion.errors import KernelBackendError
from distlion.kernels import reference
from distlion.kernels.contract import Kernels

ENVIRONMENT_VARIABLE = "DISTLION_KERNELS"


def choose_kernels(device: torch.device) -> Kernels:
    """Choose the backend for tensors on ``device``.

    The plain torch kernels serve every device for now. ``DISTLION_KERNELS`` may name the backend
    that is wanted.

    Raises:
        KernelBackendError: ``DISTLION_KERNELS`` names none that exists, or the machine stores
            numbers big end first.
    """
    wanted = os.environ.get(ENVIRONMENT_VARIABLE, "reference")
    if wanted != "reference":
        raise KernelBackendError(
            f"{ENVIRONMENT_VARIABLE}={wanted!r}: no such kernels for {device.type}; expected "
            "'reference', or unset it"
        )
    if sys.byteorder != "little":
        raise KernelBackendError(
            "packed votes need a little-endian machine; this one is big-endian"
        )
    return cast(Kernels, reference)


def check_denormals() -> None:
    """Refuse a process that flushes denormal numbers to zero: its replica would drift away.

    Raises:
        KernelBackendError: It does.
    """
    tiny = torch.tensor([torch.finfo(torch.float32).tiny])
    if not bool((tiny * 0.5 > 0).all()):
        raise KernelBackendError(
            "this process flushes denormals to zero, so replicas would differ; call "
            "torch.set_flush_denormal(False)"
        )
