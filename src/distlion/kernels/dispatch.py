"""The only place that chooses kernels. It never falls back: a missing backend is an error."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from distlion.errors import KernelBackendError
from distlion.kernels.reference import Kernels

if TYPE_CHECKING:
    from distlion.kernels.cpu import Makes

ENVIRONMENT_VARIABLE = "DISTLION_KERNELS"
"""Variable with the wanted backend: "cpu" (C++ core), "triton", or "reference" (plain torch)."""

AVAILABLE = {"cpu": ("cpu", "reference", "triton"), "cuda": ("triton", "reference")}
"""Backends for each type of device, the default first. Other types have plain torch only."""

PLAIN = Kernels()
"""The ops in plain torch, which define the correct results."""


def choose_kernels(device: torch.device) -> Kernels:
    """Choose the backend for tensors on ``device``.

    The default is the C++ core on the CPU, Triton on CUDA, and plain torch elsewhere.

    Raises:
        KernelBackendError: The core was not built, Triton is missing, ``DISTLION_KERNELS`` names no
            backend for the device, or the machine is big-endian. Triton takes only CPU tensors with
            ``TRITON_INTERPRET=1``, and no CPU tensors without.
    """
    available = AVAILABLE.get(device.type, ("reference",))
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
    if wanted == "triton":
        return _load_triton(device.type)
    return _load_core() if wanted == "cpu" else PLAIN


@functools.cache
def _load_core() -> Kernels:
    # Imported when first needed: the plain kernels work without it.
    core = importlib.import_module("distlion.kernels.cpu")
    return cast(Kernels, core.CpuKernels())


@functools.cache
def _load_triton(device_type: str) -> Kernels:
    gpu = importlib.import_module("distlion.kernels.gpu")
    if (device_type == "cpu") != gpu.IS_INTERPRETED:
        is_not = "is" if gpu.IS_INTERPRETED else "is not"
        change = "unset it for CUDA"
        if not gpu.IS_INTERPRETED:  # the host's part of each vote comes here too
            change = "unset DISTLION_KERNELS, as Triton is the default for CUDA"
        raise KernelBackendError(
            f"Triton's kernels were asked for tensors on {device_type}, but TRITON_INTERPRET=1 "
            f"{is_not} set: interpreted kernels work on the CPU, compiled ones on CUDA; {change}, "
            "and start again"
        )
    return cast(Kernels, gpu.TritonKernels())


def note_makes(tensors: Sequence[Tensor]) -> Makes | None:
    """Note dtype, device and shape of tensors, to compare others with in one call of the core.

    Returns:
        The makes; None without the core, or with a torch before 2.10, which has no table by which
        it reads tensors.
    """
    table = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if table is None or os.environ.get(ENVIRONMENT_VARIABLE) == "reference":
        return None
    core = importlib.import_module("distlion.kernels.cpu")
    return cast("Makes", core.Makes(list(tensors), table))


def check_denormals(devices: Iterable[torch.device] = ()) -> None:
    """Refuse a process that flushes denormal numbers to zero, as its replica would diverge.

    Args:
        devices: Devices of parameters; the host, which averages momenta, is checked too.

    Raises:
        KernelBackendError: It flushes them.
    """
    for device in {torch.device("cpu"), *devices}:
        tiny = torch.full((1,), torch.finfo(torch.float32).tiny, dtype=torch.float32, device=device)
        if not bool((tiny * 0.5 > 0).all()):
            raise KernelBackendError(
                f"this process flushes denormals to zero on {device}, so replicas would differ; "
                "call torch.set_flush_denormal(False)"
            )
