"""The choice of Triton's kernels: never silent, and without them nothing else changes."""

from __future__ import annotations

import re
import sys
import warnings

import pytest
import torch

from backends import INTERPRETS
from distlion.errors import KernelBackendError
from distlion.kernels import choose_kernels, dispatch

pytest.importorskip("triton")
if INTERPRETS:
    pytest.skip("these are about compiled kernels", allow_module_level=True)

gpu = pytest.importorskip("distlion.kernels.gpu")

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")


def test_triton_is_the_choice_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTLION_KERNELS", raising=False)
    kernels = choose_kernels(CUDA)
    assert isinstance(kernels, gpu.TritonKernels)
    assert choose_kernels(CUDA) is kernels


def test_plain_kernels_are_the_choice_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTLION_KERNELS", raising=False)
    assert choose_kernels(META) is dispatch.PLAIN
    monkeypatch.setenv("DISTLION_KERNELS", "triton")
    with pytest.raises(KernelBackendError, match="'triton': no such kernels for meta"):
        choose_kernels(META)


def test_compiled_kernels_are_refused_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTLION_KERNELS", "triton")
    with pytest.raises(KernelBackendError, match="TRITON_INTERPRET=1 is not set"):
        choose_kernels(CPU)


def test_missing_triton_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTLION_KERNELS", raising=False)
    for name in [name for name in sys.modules if name.startswith("distlion.kernels.gpu")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(dispatch, "_load_triton", dispatch._load_triton.__wrapped__)
    with pytest.raises(KernelBackendError, match=r"distlion\[gpu\].*DISTLION_KERNELS=reference"):
        choose_kernels(CUDA)


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0", "2.3.1+git1234"])
def test_a_version_of_triton_that_was_not_tested_is_a_warning(version: str) -> None:
    with pytest.warns(UserWarning, match=rf"tested with Triton .*, this is {re.escape(version)}"):
        gpu.warn_of_version(version)


@pytest.mark.parametrize("version", ["3.7.1", "3.8.0", "3.9.0+git77"])
def test_a_version_of_triton_that_was_tested_is_none(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gpu.warn_of_version(version)
