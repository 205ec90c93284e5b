"""What a process says of its GPUs."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlion.errors import KernelBackendError
from distlion_lab.planning import accelerator
from distlion_lab.planning.accelerator import find_accelerators

H200 = SimpleNamespace(name="NVIDIA H200", total_memory=139 * 2**30)


def load(*, triton: str | None) -> Any:
    """Stand in for ``importlib.import_module``, with this version of Triton."""

    def load_module(name: str) -> Any:
        if name == "triton":
            return SimpleNamespace(__version__=triton)
        assert name == "distlion.kernels.gpu"
        if triton is None:
            raise KernelBackendError("Triton cannot be imported; pip install 'distlion[gpu]'")
        return None

    return load_module


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: H200)
    monkeypatch.setattr("torch.version.cuda", "12.8")


def test_a_gpu_is_described_with_its_kernels(
    with_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator.importlib, "import_module", load(triton="3.7.1"))
    found = find_accelerators()
    assert found.devices == ("cuda:0 NVIDIA H200, 139 GiB",)
    assert not found.missing
    assert "NVIDIA H200, 139 GiB; CUDA 12.8" in found.describe()
    assert "Triton 3.7.1" in found.describe()


def test_a_gpu_without_kernels_names_the_command_that_brings_them(
    with_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator.importlib, "import_module", load(triton=None))
    found = find_accelerators()
    assert found.devices
    assert found.triton is None
    assert "pip install 'distlion[gpu]'" in found.describe()


def test_an_untested_triton_is_a_warning(with_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = importlib.import_module("distlion.kernels.gpu")

    def load_module(name: str) -> Any:
        if name == "distlion.kernels.gpu":
            gpu.warn_of_version("99.0")
        return load(triton="99.0")(name)

    monkeypatch.setattr(accelerator.importlib, "import_module", load_module)
    assert "this is 99.0" in find_accelerators().warning


def test_without_a_gpu_it_says_why() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    found = find_accelerators()
    assert found.devices == ()
    assert found.describe().startswith("no GPU is used: torch")
