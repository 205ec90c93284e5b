"""The backends that the kernels' tests run over, each with a device: one list for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from distlion.kernels import Kernels, reference
from distlion.kernels.cpu import INSTRUCTION_SETS, CpuKernels

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
HAS_CUDA = torch.cuda.is_available()
REFERENCE = cast(Kernels, reference)


@dataclass(frozen=True)
class Backend:
    """Kernels, and where their tensors are."""

    name: str
    device: torch.device
    kernels: Kernels = field(repr=False)

    def __str__(self) -> str:
        return f"{self.name} on {self.device}"


TRUTH = Backend("reference", CPU, REFERENCE)
CORES = tuple(Backend(f"core {name}", CPU, CpuKernels(name)) for name in INSTRUCTION_SETS)
# The cores are last: after them, what they were compared with is no longer kept.
OTHERS = (Backend("reference", CUDA, REFERENCE), *CORES)
OTHERS_HERE = tuple(one for one in OTHERS if HAS_CUDA or one.device != CUDA)


def _list_params(backends: tuple[Backend, ...]) -> list[Any]:
    marks = (pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device"))
    return [
        pytest.param(backend, id=str(backend), marks=marks if backend.device == CUDA else ())
        for backend in backends
    ]


over_all = pytest.mark.parametrize("backend", _list_params((TRUTH, *OTHERS)))
over_others = pytest.mark.parametrize("backend", _list_params(OTHERS))
"""All but the one that the others are compared with."""
over_cores = pytest.mark.parametrize("backend", _list_params(CORES))
"""Those that start threads and read tensors' addresses."""
