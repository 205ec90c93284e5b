"""Weights: the number of times that each worker's vote counts, agreed before the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distlion.failures import name_ranks
from distlion.peers.meetings import refuse_inputs
from distlion.step.ranks import Ranks
from distlion.step.settings import Settings
from distlion.votes.roster import MOST_VOTES, Roster
from distlion.wire.ask import ask_texts
from distlion.wire.transport import Transport

_UNUSABLE = 0


def agree_on_weights(link: Transport, ranks: Ranks, settings: Settings, *, step: int) -> Ranks:
    """Put all ranks' weights into the roster of voters; every rank must call it.

    Args:
        link: All ranks.
        ranks: All ranks of the optimizer.
        settings: The optimizer's settings.
        step: The step that errors name.

    Returns:
        The same ranks, whose roster has the weights; ``ranks`` itself where all are 1.

    Raises:
        StepInputError: A weight cannot be used, the ranks of a worker have several, or all of them
            add up to too much; the same on every rank, with the ranks concerned.
    """
    own = _UNUSABLE if settings.find_weight_problem() else settings.weight
    told = list(map(int, ask_texts(link, str(own), step=step)))
    if set(told) == {1}:
        return ranks
    refuse_inputs(link, _find_problem(ranks, settings, told), step=step)
    weights = tuple(told[rank] for rank in ranks.between)
    return replace(ranks, members=replace(ranks.roster, weights=weights))


def _find_problem(ranks: Ranks, settings: Settings, told: Sequence[int]) -> str:
    """Explain why this rank cannot vote with these weights; return "" if it can."""
    if problem := settings.find_weight_problem():
        return problem
    inside = [told[rank] for rank in ranks.inside]
    if len(set(inside)) > 1 and _UNUSABLE not in inside:
        return (
            f"weight={settings.weight}: {name_ranks(ranks.inside)} act as one worker and have the "
            f"weights {inside}. Expected the same weight on all of them"
        )
    n_votes = sum(told[rank] for rank in ranks.between)
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
