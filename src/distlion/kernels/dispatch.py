"""The one place that chooses kernels. It never falls back: what is missing is an error."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import cast

import torch

from distlion.errors import KernelBackendError
from distlion.kernels import reference
from distlion.kernels.contract import Kernels

ENVIRONMENT_VARIABLE = "DISTLION_KERNELS"
"""Names the backend that is wanted: "cpu", the C++ core, or "reference", plain torch."""


def choose_kernels(device: torch.device) -> Kernels:
    """Choose the backend for tensors on ``device``: the C++ core on the CPU, plain torch elsewhere.

    Raises:
        KernelBackendError: The core was not built, ``DISTLION_KERNELS`` names none that exists for
            the device, or the machine stores numbers big end first.
    """
    available = ("cpu", "reference") if device.type == "cpu" else ("reference",)
    wanted = os.environ.get(ENVIRONMENT_VARIABLE, available[0])
    if wanted not in available:
        expected = " or ".join(repr(name) for name in available)
        raise KernelBackendError(
            f"{ENVIRONMENT_VARIABLE}={wanted!r}: no such kernels for {device.type}; expected "
            f"{expected}, or unset it"
        )
    if sys.byteorder != "little":
        raise KernelBackendError(
            "packed votes need a little-endian machine; this one is big-endian"
        )
    return _load_core() if wanted == "cpu" else cast(Kernels, reference)


@functools.cache
def _load_core() -> Kernels:
    # Imported when first needed: the plain kernels work without it.
    core = importlib.import_module("distlion.kernels.cpu")
    return cast(Kernels, core.CpuKernels())


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
