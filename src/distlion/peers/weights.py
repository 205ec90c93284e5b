"""Weights: the number of times that each worker's vote counts, agreed before the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distlion.failures import Status, make_error, name_ranks
from distlion.peers.handshake import gather_problems
from distlion.step.ranks import Ranks
from distlion.step.settings import Settings
from distlion.votes.roster import MOST_VOTES, Roster
from distlion.wire.transport import Transport

_UNUSABLE = 1
"""A weight of 1 is written as 0, so that records of workers that count alike have no weight."""


def encode_weight(settings: Settings) -> int:
    """Return this worker's weight for the handshake's record: unsigned 32 bits."""
    if settings.find_weight_problem():
        return _UNUSABLE
    return 0 if settings.weight == 1 else settings.weight


def agree_on_weights(
    link: Transport, ranks: Ranks, settings: Settings, told: Sequence[int], *, step: int
) -> Ranks:
    """Put all ranks' weights into the roster of voters; every rank must call it.

    If all votes count once, nothing is sent.

    Args:
        link: All ranks.
        ranks: All ranks of the optimizer.
        settings: The optimizer's settings.
        told: ``encode_weight`` of each rank, in order.
        step: The step that errors name.

    Returns:
        The same ranks, whose roster has the weights; ``ranks`` itself where all are 1.

    Raises:
        StepInputError: A weight cannot be used, the ranks of a worker have several, or all of them
            add up to too much; the same on every rank, with the ranks concerned.
    """
    if not any(told):
        return ranks
    culprits, said = gather_problems(link, _find_problem(ranks, settings, told), step=step)
    if culprits:
        raise make_error(Status.INPUT, rank=link.rank, step=step, culprits=culprits, problem=said)
    weights = tuple(told[rank] or 1 for rank in ranks.between)
    return replace(ranks, members=replace(ranks.roster, weights=weights))


def _find_problem(ranks: Ranks, settings: Settings, told: Sequence[int]) -> str:
    """Explain why this rank cannot vote with these weights; return "" if it can."""
    if problem := settings.find_weight_problem():
        return problem
    inside = [told[rank] or 1 for rank in ranks.inside]
    if len(set(inside)) > 1 and all(told[rank] != _UNUSABLE for rank in ranks.inside):
        return (
            f"weight={settings.weight}: {name_ranks(ranks.inside)} act as one worker and have the "
            f"weights {inside}. Expected the same weight on all of them"
        )
    n_votes = sum(told[rank] or 1 for rank in ranks.between)
    if settings.weight > 1 and n_votes > MOST_VOTES:
        return (
            f"weight={settings.weight}: the weights of all workers add up to {n_votes:,}. Expected "
            f"{MOST_VOTES:,} at most. Only ratios matter: divide all weights by the same number"
        )
    return ""


def describe_weights(roster: Roster) -> list[str]:
    """List a line with the weights, equal on all workers; no line if all are 1."""
    if not roster.is_weighted:
        return []
    return [f"weights of workers: {', '.join(map(str, roster.weights))}"]
