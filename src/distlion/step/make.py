"""Shape, dtype and device of a tensor at the construction of an optimizer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Make(NamedTuple):
    """Shape, dtype and device of a dense tensor.

    Attributes:
        shape: Its sizes.
        dtype: Dtype of its elements.
        device: Its device.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Make:
        """Return the make of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def of_momentum(self, shape: torch.Size, asked: torch.dtype | None) -> Make:
        """Return the make of the part of a parameter's momentum that is kept.

        Args:
            shape: Shape of that part.
            asked: Its dtype; None for the parameter's, or float32 for float16, which would lose
                small gradients.
        """
        chosen = torch.float32 if self.dtype == torch.float16 else self.dtype
        return Make(shape, asked or chosen, self.device)

    def fits(self, tensor: object) -> bool:
        """Return whether a tensor is of this make."""
        return (
            isinstance(tensor, Tensor)
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.device == self.device
            and tensor.layout is torch.strided
        )

    def __str__(self) -> str:
        return describe_make(self)


def describe_make(found: object) -> str:
    """Describe a tensor or another object: "float32 of shape (3, 4) on cpu"."""
    if found is None:
        return "missing"
    if not isinstance(found, Tensor | Make):
        return f"a {type(found).__name__}"
    layout = torch.strided if isinstance(found, Make) else found.layout
    prefix = "" if layout is torch.strided else f"{layout}, "
    dtype = str(found.dtype).removeprefix("torch.")
    return f"{prefix}{dtype} of shape {tuple(found.shape)} on {found.device}"
