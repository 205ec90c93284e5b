"""GPUs of this process, the kernels that work on them, and anything that is missing."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass

import torch

from distlion.errors import KernelBackendError


@dataclass(frozen=True)
class Accelerators:
    """The GPUs of this machine, as torch sees them.

    Attributes:
        devices: Name and memory of each, in the order of their numbers.
        cuda: CUDA version that torch is built for; None for none.
        triton: Installed version; None for none.
        missing: Reason why parameters cannot be on a GPU, and the remedy; empty if they can.
        warning: Caveat about the kernels; empty for none.
    """

    devices: tuple[str, ...]
    cuda: str | None
    triton: str | None
    missing: str
    warning: str

    def describe(self) -> str:
        """Describe the GPUs in a sentence."""
        if self.missing:
            return f"no GPU is used: {self.missing}"
        return (
            f"GPU: {'; '.join(self.devices)}; CUDA {self.cuda}; parameters there are computed by "
            f"Triton {self.triton}, votes cross host memory"
        )


def find_accelerators() -> Accelerators:
    """Look for GPUs and for their kernels' requirements; start nothing on them."""
    missing, triton, warning = explain_missing_cuda(), None, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            importlib.import_module("distlion.kernels.gpu")
            triton = str(importlib.import_module("triton").__version__)
        except KernelBackendError as error:
            missing = missing or str(error)
        warning = " ".join(str(each.message) for each in caught)
    n_devices = 0 if explain_missing_cuda() else torch.cuda.device_count()
    return Accelerators(
        devices=tuple(map(_describe_device, range(n_devices))),
        cuda=_cuda_version(),
        triton=triton,
        missing=missing,
        warning=warning,
    )


def explain_missing_cuda() -> str:
    """Say why torch finds no CUDA device, and what to do; nothing where it finds one."""
    if torch.cuda.is_available():
        return ""
    cuda = _cuda_version()
    if cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA; where there is a GPU, install a "
            "build for it, as https://pytorch.org/get-started/locally says"
        )
    return (
        f"torch {torch.__version__} is built for CUDA {cuda}, and no device answers; is there a "
        "GPU, does nvidia-smi list it, and does CUDA_VISIBLE_DEVICES hide it?"
    )


def _cuda_version() -> str | None:
    version: str | None = getattr(torch.version, "cuda", None)
    return version


def _describe_device(number: int) -> str:
    properties = torch.cuda.get_device_properties(number)
    return f"cuda:{number} {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
