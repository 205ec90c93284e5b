"""The backends that the kernels' tests run over, each with a device: one list for all of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from distlion.kernels import Kernels
from distlion.kernels.cpu import INSTRUCTION_SETS, CpuKernels

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process has Triton's kernels on the CPU, for which it is started on its own."""
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
HAS_CUDA = torch.cuda.is_available()
REFERENCE = Kernels()


def _patch_language_once_a_launch() -> None:
    """Let Triton's interpreter patch its language at a launch, not for each device function too.

    It looks through the whole language each time, which takes half of what a launch takes.
    """
    from triton import language
    from triton.runtime import interpreter

    own, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    if own.__module__ != interpreter.__name__ or not hasattr(interpreter, "_LangPatchScope"):
        return  # done before, or another version
    patched: set[int] = set()

    def patch(fn: Any) -> Any:
        seen = {id(value) for value in fn.__globals__.values()}
        found = seen & {id(language), id(language.core)}
        if found <= patched:
            return interpreter._LangPatchScope()
        patched.update(found)
        return own(fn)

    def launch_anew(executor: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(executor, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch, launch_anew


if INTERPRETS:
    _patch_language_once_a_launch()


@dataclass(frozen=True)
class Backend:
    """Kernels, and where their tensors are."""

    name: str
    device: torch.device
    kernels: Kernels = field(repr=False)

    @property
    def is_interpreted(self) -> bool:
        """Whether its kernels are thousands of times slower than others."""
        return self.name == "triton" and self.device == CPU

    def __str__(self) -> str:
        return f"{self.name} on {self.device}"


TRUTH = Backend("reference", CPU, REFERENCE)
CORES = tuple(Backend(f"core {name}", CPU, CpuKernels(name)) for name in INSTRUCTION_SETS)


def _list_triton() -> tuple[Backend, ...]:
    """List Triton's kernels where this process has them; to import them takes a second."""
    if not (INTERPRETS or HAS_CUDA):
        return ()
    from distlion.kernels.gpu import TritonKernels

    return (Backend("triton", CPU if INTERPRETS else CUDA, TritonKernels()),)


# The cores are last: after them, what they were compared with is no longer kept.
OTHERS = (*_list_triton(), Backend("reference", CUDA, REFERENCE), *CORES)


def _list_params(backends: tuple[Backend, ...]) -> list[Any]:
    on_cuda = (pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device"))
    params = []
    for backend in backends:
        marks = on_cuda if backend.device == CUDA else (pytest.mark.slow,) * backend.is_interpreted
        params.append(pytest.param(backend, id=str(backend), marks=marks))
    return params


over_all = pytest.mark.parametrize("backend", _list_params((TRUTH, *OTHERS)))
over_others = pytest.mark.parametrize("backend", _list_params(OTHERS))
"""All but the one that the others are compared with."""
over_cores = pytest.mark.parametrize("backend", _list_params(CORES))
"""Those that start threads."""
