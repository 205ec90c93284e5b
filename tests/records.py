"""Records of parameters, as an optimizer makes them, without an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distlion import MajorityVote
from distlion.layout import place_parameters
from distlion.step.param import Make, VotingParam


def make_records(
    params: Sequence[Tensor | int], names: Sequence[str] | None = None
) -> list[VotingParam]:
    """Place parameters, or new ones of so many elements, with momenta of zeros."""
    tensors = [
        param if isinstance(param, Tensor) else nn.Parameter(torch.zeros(param)) for param in params
    ]
    slots = place_parameters(
        names or [f"p{index}" for index in range(len(tensors))],
        [tensor.numel() for tensor in tensors],
    )
    state: dict[Tensor, dict[str, Any]] = {
        tensor: {"exp_avg": torch.zeros_like(tensor)} for tensor in tensors
    }
    return [
        VotingParam(
            tensor,
            index,
            0,
            slots[index],
            MajorityVote(),
            state,
            ((0, tensor.numel()),),
            Make.of(tensor),
            Make.of(tensor),
        )
        for index, tensor in enumerate(tensors)
    ]
