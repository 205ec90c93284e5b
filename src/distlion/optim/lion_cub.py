"""Lion Cub: votes of a few bits, and momenta averaged now and then."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from distlion.aggregation import QuantizedVote
from distlion.optim.distributed_lion import DistributedLion
from distlion.optim.momentum_sync import MomentumSync


def lion_cub(
    params: ParamsT,
    lr: float | Tensor = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    *,
    bits: int = 2,
    momentum_sync: MomentumSync | None = MomentumSync(every=100),  # noqa: B008, frozen
    **arguments: Any,
) -> DistributedLion:
    """Make a ``DistributedLion`` with the settings of Lion Cub.

    ``QuantizedVote(bits)``, scaled by the L1 norm, and ``MomentumSync``.

    Args:
        params: As for ``DistributedLion``.
        lr: As for ``DistributedLion``.
        betas: As for ``DistributedLion``.
        bits: Bits of a vote, 1 to 8.
        momentum_sync: When and where momenta are averaged; None for never.
        arguments: All others of ``DistributedLion``; not ``aggregation``.

    Raises:
        InvalidArgumentError, UnsupportedTypeError: A value is out of range or of a wrong type.
        ProcessGroupError, ConfigMismatchError: As ``DistributedLion``.

    Notes:
        The paper's recipe, in our odd levels: the fewest bits above a sign, and momenta averaged
        within 100 steps. Runs that choose between these and other defaults have not been made yet;
        ``distlion compare --preset lion-cub`` makes them.

    Example:
        >>> optimizer = distlion.lion_cub(model.named_parameters(), lr=1e-4, weight_decay=0.1)

    Reference:
        Lion Cub, arXiv:2411.16462
    """
    return DistributedLion(
        params,
        lr,
        betas,
        aggregation=QuantizedVote(bits=bits),
        momentum_sync=momentum_sync,
        **arguments,
    )
