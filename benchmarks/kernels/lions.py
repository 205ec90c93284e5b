"""Other Lions, in place: p, g and m are parameter, gradient and momentum."""

from __future__ import annotations

from collections.abc import Sequence

import lion_pytorch
import torch
from torch import Tensor

BETA1, BETA2, LR, WEIGHT_DECAY = 0.9, 0.99, 1e-4, 0.1


def lion_in_place(p: Tensor, g: Tensor, m: Tensor) -> None:
    c = m.mul(BETA1).add_(g, alpha=1 - BETA1).sign_()
    p.mul_(1 - LR * WEIGHT_DECAY).add_(c, alpha=-LR)
    m.mul_(BETA2).add_(g, alpha=1 - BETA2)


def lion_as_published(p: Tensor, g: Tensor, m: Tensor) -> None:
    """Follow https://github.com/google/automl/blob/master/lion/lion_pytorch.py."""
    p.mul_(1 - LR * WEIGHT_DECAY)
    update = m * BETA1 + g * (1 - BETA1)
    p.add_(update.sign_(), alpha=-LR)
    m.mul_(BETA2).add_(g, alpha=1 - BETA2)


def lion_by_lerp(p: Tensor, g: Tensor, m: Tensor, *, buffer: Tensor) -> None:
    """Make one pass of each mean, and write directions where the last ones were."""
    c = torch.lerp(g, m, BETA1, out=buffer).sign_()
    p.mul_(1 - LR * WEIGHT_DECAY).add_(c, alpha=-LR)
    m.lerp_(g, 1 - BETA2)


def encode_in_torch(g: Tensor, m: Tensor, *, shifts: Tensor) -> Tensor:
    """Pack the signs of directions, 8 in a byte, as encode_signs does 64 in a word."""
    positive = m * BETA1 + g * (1 - BETA1) > 0
    return (positive.view(-1, 8).to(torch.uint8) << shifts).sum(1, dtype=torch.uint8)


def commit_in_torch(p: Tensor, g: Tensor, m: Tensor, packed: Tensor, *, shifts: Tensor) -> None:
    signs = ((packed.unsqueeze(1) >> shifts) & 1).view(-1).float() * 2 - 1
    p.mul_(1 - LR * WEIGHT_DECAY).add_(signs, alpha=-LR)
    m.mul_(BETA2).add_(g, alpha=1 - BETA2)


def lion_foreach(params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor]):
    directions = torch._foreach_mul(exp_avgs, BETA1)
    torch._foreach_add_(directions, grads, alpha=1 - BETA1)
    torch._foreach_sign_(directions)
    torch._foreach_mul_(params, 1 - LR * WEIGHT_DECAY)
    torch._foreach_add_(params, directions, alpha=-LR)
    torch._foreach_mul_(exp_avgs, BETA2)
    torch._foreach_add_(exp_avgs, grads, alpha=1 - BETA2)


def build_lion_pytorch(tensors: Sequence[tuple[Tensor, Tensor, Tensor]]) -> lion_pytorch.Lion:
    """Build the optimizer of the package lion-pytorch over (parameter, gradient, momentum)."""
    params = [torch.nn.Parameter(p) for p, _, _ in tensors]
    optimizer = lion_pytorch.Lion(params, lr=LR, betas=(BETA1, BETA2), weight_decay=WEIGHT_DECAY)
    for param, (_, g, m) in zip(params, tensors, strict=True):
        param.grad = g
        optimizer.state[param]["exp_avg"] = m
    return optimizer
