"""The papers' settings by name, whatever the constructors' defaults are."""

from __future__ import annotations

from typing import Any

from distlion.errors import InvalidArgumentError
from distlion.step.momentum_sync import MomentumSync
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
