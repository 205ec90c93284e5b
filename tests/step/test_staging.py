"""What a device reports is raised under a name."""

from __future__ import annotations

import pytest
import torch

from distlion.errors import DeviceError, InvalidArgumentError
from distlion.step.staging import name_failure

DEVICE = torch.device("cuda", 1)


class CompilationError(Exception):
    """As Triton's, which is no RuntimeError."""


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: x\nmore"), CompilationError("x")])
def test_a_failure_names_device_and_cause(error: Exception) -> None:
    with (
        pytest.raises(
            DeviceError, match=r"cuda:1 failed while votes were encoded, or before: .*x;"
        ),
        name_failure(DEVICE, "votes were encoded"),
    ):
        raise error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), InvalidArgumentError("no")])
def test_what_has_a_name_keeps_it(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, name_failure(DEVICE, "votes were encoded"):
        raise error
    assert caught.value is error
