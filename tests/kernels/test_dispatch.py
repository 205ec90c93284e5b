"""The choice of kernels: never silent."""

import pytest
import torch

from distlion.errors import KernelBackendError
from distlion.kernels import check_denormals, choose_kernels


def test_kernels_that_do_not_exist_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTLION_KERNELS", "quantum")
    with pytest.raises(KernelBackendError, match="quantum"):
        choose_kernels(torch.device("cpu"))


def test_a_big_endian_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(KernelBackendError, match="little-endian"):
        choose_kernels(torch.device("cpu"))


def test_a_process_that_flushes_denormals_is_refused() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        with pytest.raises(KernelBackendError, match="set_flush_denormal"):
            check_denormals()
    finally:
        torch.set_flush_denormal(False)
