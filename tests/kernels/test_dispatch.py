"""The choice of kernels: never silent."""

import sys

import pytest
import torch

from distlion.errors import KernelBackendError
from distlion.kernels import Kernels, check_denormals, choose_kernels, dispatch
from distlion.kernels.cpu import INSTRUCTION_SETS, CpuKernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_core_is_the_choice_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTLION_KERNELS", raising=False)
    kernels = choose_kernels(CPU)
    assert isinstance(kernels, CpuKernels)
    assert kernels.instruction_set == INSTRUCTION_SETS[-1]
    assert choose_kernels(CPU) is kernels


def test_the_core_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTLION_KERNELS", "cpu")
    assert isinstance(choose_kernels(CPU), CpuKernels)


def test_the_plain_kernels_are_the_choice_where_they_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DISTLION_KERNELS", "reference")
    assert choose_kernels(CPU) is dispatch.PLAIN
    assert choose_kernels(CUDA) is dispatch.PLAIN


def test_the_core_is_refused_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTLION_KERNELS", "cpu")
    with pytest.raises(KernelBackendError, match="'cpu': no such kernels for cuda"):
        choose_kernels(CUDA)


def test_a_core_that_was_not_built_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTLION_KERNELS", raising=False)
    monkeypatch.setitem(sys.modules, "distlion.kernels._cpu", None)
    monkeypatch.delitem(sys.modules, "distlion.kernels.cpu")
    monkeypatch.setattr(dispatch, "_load_core", dispatch._load_core.__wrapped__)
    with pytest.raises(KernelBackendError, match="cannot be imported"):
        choose_kernels(CPU)
    monkeypatch.setenv("DISTLION_KERNELS", "reference")
    assert choose_kernels(CPU) is dispatch.PLAIN


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


PLAIN_OPS_OF_TRITON = {
    "encode_rests",
    "encode_lots",
    "move_residuals",
    "add_steps",
    "add_steps_of_all",
    "count_steps",
    "add_outer_momentum",
    "write_frames",
    "read_frames",
}
"""Ops that Triton's kernels take from the reference, by plain torch on the device or the host."""


def test_no_backend_takes_a_plain_op_without_a_word() -> None:
    parts = [vars(part) for part in Kernels.__mro__ if part is not object]
    ops = {name for part in parts for name in part if not name.startswith("_")}
    assert len(ops) > 20
    assert ops <= set(vars(CpuKernels))
    gpu = pytest.importorskip("distlion.kernels.gpu", exc_type=KernelBackendError)
    assert ops - set(vars(gpu.TritonKernels)) == PLAIN_OPS_OF_TRITON
