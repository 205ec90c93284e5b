"""The papers' settings by name, whatever the constructors' defaults are, and Lion Cub."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from distlion.errors import InvalidArgumentError
from distlion.optim.distributed_lion import DistributedLion
from distlion.step.momentum import MomentumSync
from distlion.votes.majority import MajorityVote
from distlion.votes.quantized import QuantizedVote

_PAPERS: dict[str, dict[str, Any]] = {
    "2404.00438": {"aggregation": MajorityVote(), "momentum_sync": None},
    "2411.16462": {"aggregation": QuantizedVote(bits=2), "momentum_sync": MomentumSync(every=100)},
}


def paper_settings(paper: str) -> dict[str, Any]:
    """Return the arguments with which ``DistributedLion`` is a paper's method.

    Args:
        paper: "2404.00438" (Distributed Lion, majority vote) or "2411.16462" (Lion Cub, with the
            number of bits and the interval of ``lion_cub``). "arXiv:" may stand before it.

    Returns:
        ``betas``, ``cautious``, ``aggregation`` and ``momentum_sync``, for
        ``DistributedLion(params, lr, **settings)``. Learning rates and weight decay depend on the
        task. Findings compare "the paper's" betas, which are these.

    Raises:
        InvalidArgumentError: It is another paper.

    Example:
        >>> settings = distlion.paper_settings("2404.00438")
        >>> optimizer = distlion.DistributedLion(model.named_parameters(), lr=1e-4, **settings)

    Reference:
        Distributed Lion, arXiv:2404.00438; Lion Cub, arXiv:2411.16462
    """
    number = paper.removeprefix("arXiv:") if isinstance(paper, str) else ""
    if number not in _PAPERS:
        listed = " or ".join(map(repr, _PAPERS))
        raise InvalidArgumentError(f"paper={paper!r} is unknown. Expected {listed}")
    return {"betas": (0.9, 0.99), "cautious": False, **_PAPERS[number]}


def lion_cub(
    params: ParamsT,
    lr: float | Tensor = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    *,
    bits: int = 2,
    momentum_sync: MomentumSync | None = MomentumSync(every=100),
    **arguments: Any,
) -> DistributedLion:
    """Make a ``DistributedLion`` with the settings of Lion Cub.

    ``QuantizedVote(bits)``, scaled by the L1 norm, and ``MomentumSync``.

    Args:
        params: As for ``DistributedLion``.
        lr: As for ``DistributedLion``.
        betas: As for ``DistributedLion``, but by default the paper's.
        bits: Bits of a vote, 1 to 8.
        momentum_sync: Settings for averages of momenta; None for no averages.
        arguments: All other arguments of ``DistributedLion`` except ``aggregation``.

    Raises:
        InvalidArgumentError, UnsupportedTypeError: A value is out of range or of a wrong type.
        ProcessGroupError, ConfigMismatchError: As ``DistributedLion``.

    Notes:
        The default of ``bits`` comes from our own runs (benchmarks/results/comparison; 3 seeds,
        differences by seed). GPT of 1.1 million parameters, books, 4 workers, one learning rate:
        one bit ended 0.0075 +- 0.0011 nats above global Lion, two bits 0.0035 +- 0.0007, four bits
        0.0006 +- 0.0004. So the second bit wins back half of the loss; take four bits where the
        network has capacity. Averaging momenta every 100 steps, for 0.64 bits, gained 0.0005 +-
        0.0002 nats where each worker had books of its own; these runs, of 160 steps, average an
        element once. Where workers see different classes these defaults are not enough; see
        docs/how-to/skewed-data.md.

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
