"""Triton kernels for CUDA devices, imported if a tensor is on one. Needs the extra ``gpu``."""

from __future__ import annotations

import re
import warnings

from distlion.errors import KernelBackendError

try:
    import triton
except ImportError as error:
    raise KernelBackendError(
        f"Triton cannot be imported ({error}), which CUDA tensors need; it comes with torch for "
        "CUDA on Linux, or install it with \"pip install 'distlion[gpu]'\"; DISTLION_KERNELS="
        "reference uses the slower plain torch kernels"
    ) from error

from distlion.kernels.gpu.backend import TritonKernels
from distlion.kernels.gpu.encode import encode_kernel

__all__ = ["IS_INTERPRETED", "TESTED_VERSIONS", "TritonKernels", "warn_of_version"]

TESTED_VERSIONS = ((3, 6), (3, 9))
"""First and last version that the kernels were tested with."""
IS_INTERPRETED = not isinstance(encode_kernel, triton.runtime.JITFunction)
"""Whether kernels are interpreted on the CPU: TRITON_INTERPRET was 1 when Triton was imported."""


def warn_of_version(version: str) -> None:
    """Warn if the kernels were not tested with this version of Triton."""
    first, last = TESTED_VERSIONS
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not first <= numbers <= last:
        warnings.warn(
            f"distlion's kernels were tested with Triton {first[0]}.{first[1]} to {last[0]}."
            f"{last[1]}, this is {version}: run the tests of kernels with it before you rely on "
            "equal bits",
            stacklevel=2,
        )


warn_of_version(triton.__version__)
