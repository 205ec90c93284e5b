"""Muon for hidden weight matrices, and AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distlion.kernels import matrix_shape, orthogonalize

MOMENTUM = 0.95
_RMS = 0.2


def scale_update(shape: tuple[int, int]) -> float:
    """Return what an orthogonalized update of a matrix is multiplied with."""
    return _RMS * math.sqrt(max(shape))


class MuonWithAdamW(torch.optim.AdamW):
    """Muon on orthogonalized param groups, AdamW on the others, with one learning rate.

    Equation:
        m = 0.95 m + 0.05 g;  U = orthogonalize(0.95 m + 0.05 g)
        x = (1 - lr weight_decay) x - lr * 0.2 sqrt(max(rows, columns)) U
        (Muon, K. Jordan et al., 2024, with Nesterov's momentum; the factor gives U about the size
        of an update of AdamW, arXiv:2502.16982)

    Args:
        groups: Param groups as ``group_params`` returns them. ``orthogonalize`` chooses Muon; other
            keys of votes are ignored.
        lr: Learning rate.
        betas: Of AdamW.
        weight_decay: Decoupled weight decay.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        *,
        weight_decay: float,
    ) -> None:
        super().__init__(groups, lr, betas, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do a step; gradients of matrices are None afterwards, which is how AdamW skips them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group.get("orthogonalize", False):
                for param in group["params"]:
                    if param.grad is not None:
                        self._move(param, group["lr"], group["weight_decay"])
                    param.grad = None
        super().step()
        return loss

    def _move(self, param: Tensor, lr: float, weight_decay: float) -> None:
        state, grad = self.state[param], param.grad
        assert grad is not None  # checked by the caller
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - MOMENTUM)
        shape = matrix_shape(param.shape)
        assert shape is not None  # only matrices are orthogonalized
        update = orthogonalize(grad.lerp(momentum, MOMENTUM).reshape(shape)).view(param.shape)
        param.mul_(1 - lr * weight_decay).sub_(update * (lr * scale_update(shape)))
