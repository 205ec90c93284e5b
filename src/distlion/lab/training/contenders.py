"""The methods that a comparison knows, by name, and named selections of them."""

from __future__ import annotations

from distlion.errors import InvalidArgumentError
from distlion.lab.names import suggest
from distlion.lab.training.averagers import AVERAGER_NAMES, find_averager
from distlion.lab.training.contender import Contender
from distlion.lab.training.periodic import PERIODIC_NAMES, describe_steps, find_periodic
from distlion.lab.training.vote_names import describe_betas, list_plain_votes
from distlion.lab.training.voters import VOTER_NAMES, find_voter

METHOD_NAMES = (*VOTER_NAMES, *PERIODIC_NAMES, *AVERAGER_NAMES)
"""For messages and help."""


def find_contender(name: str) -> Contender:
    """Return the method of a name.

    Raises:
        InvalidArgumentError: There is none.
    """
    contender = find_averager(name) or find_periodic(name) or find_voter(name)
    if contender is None:
        # In those of a pattern, letters in capitals stand for something.
        known = [*list_plain_votes(), *(each for each in METHOD_NAMES if each.islower())]
        hint = suggest(name, known, all_in="distlion compare --help")
        form = describe_betas(name) or describe_steps(name)
        raise InvalidArgumentError(f"method {name!r} is unknown; {hint}{form}")
    return contender
