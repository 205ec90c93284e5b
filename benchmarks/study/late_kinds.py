"""Local steps whose outcomes are taken later, or whose parameters take turns to vote."""

from __future__ import annotations

import re

from distlion.votes import SCALED_RULES
from distlion_lab.training.delta_votes import PLAIN, DeltaVotes
from distlion_lab.training.inner import ADAMW
from distlion_lab.training.workers import MethodRun

_LATE = re.compile(
    r"local-(?P<every>\d+)-scaled-plain(-parts-(?P<parts>[2-9]))?(-late-(?P<delay>[1-9]))?"
)


def build_late(name: str, run: MethodRun) -> DeltaVotes | None:
    """Build ``local-K-scaled-plain`` with ``-parts-P``, ``-late-D`` or both behind it.

    Returns:
        The workers; None where the name has neither.
    """
    match = _LATE.fullmatch(name)
    if match is None or not (match["parts"] or match["delay"]):
        return None
    return DeltaVotes(
        run,
        every=int(match["every"]),
        delay=int(match["delay"] or 0),
        parts=int(match["parts"] or 1),
        rule=SCALED_RULES["scaled"],
        make_inner=ADAMW.make,
        outer=PLAIN,
    )
