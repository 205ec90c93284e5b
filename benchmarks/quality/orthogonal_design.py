"""The study of votes on orthogonalized directions: its parts, in the order of its protocol."""

from __future__ import annotations

import study_path  # noqa: F401
from design import Part
from settings import CAUTIOUS, MASKED, MOST_SEEDS, ORTHOGONAL, SHORT

BY_FAN_IN = "orthogonal-fan-in-betas-90-95"
EVERY = tuple(
    f"majority-orthogonal-each-{name}-betas-90-95" for name in ("1", "2-stale", "2-lion", "4-lion")
)
RULES = ("ternary-orthogonal-betas-90-95", "library-feedback-2-orthogonal-betas-90-95")
_BOTH, _ALL = ("adamw", "orthogonal"), ("adamw", "orthogonal", "muon", "muon-sign")
_UNEVEN = ((0.1, 0, 1.0), (1.0, 0, 1.0), (None, 2, -1.0))

ORTHOGONAL_PARTS = (
    Part("o-text", ("text-small-1k",), methods=(SHORT, CAUTIOUS), families=_BOTH),
    Part("o-images", ("images-3",), methods=(SHORT, CAUTIOUS), families=_BOTH),
    Part(
        "o-workers", ("text-small-1k",), workers=(8, 32), methods=(CAUTIOUS, MASKED), families=_BOTH
    ),
    Part("o-wider", ("text-medium-1k",), methods=(CAUTIOUS,), families=_BOTH),
    Part("o-longer", ("text-small-4k",), methods=(CAUTIOUS,), families=_BOTH),
    Part("o-aim", ("text-medium-4k",), methods=(), families=_BOTH, seeds=MOST_SEEDS),
    Part("o-means", ("text-small-1k", "images-3"), methods=(), families=_ALL),
    Part("o-rules", ("text-small-1k",), methods=RULES, families=("orthogonal",)),
    Part(
        "o-rates",
        ("text-width-64", "text-width-128", "text-width-256"),
        methods=(ORTHOGONAL, BY_FAN_IN),
        is_screened=True,
    ),
    Part("o-every", ("text-small-1k",), methods=EVERY, is_screened=True),
    Part("o-others", ("text-others-1k",), methods=(), families=_BOTH, seeds=(1, 2, 3)),
    Part("o-images-workers", ("images-3",), workers=(8, 32), methods=(CAUTIOUS,), families=_BOTH),
    Part(
        "o-conditions",
        ("images-3",),
        workers=(8,),
        methods=("global-adamw", CAUTIOUS, ORTHOGONAL),
        conditions=_UNEVEN,
    ),
    Part(
        "o-aim-8", ("text-medium-4k",), workers=(8,), methods=(), families=_BOTH, seeds=MOST_SEEDS
    ),
    Part("o-images-longer", ("images-10",), methods=(CAUTIOUS,), families=_BOTH),
    Part("o-images-longest", ("images-30",), methods=(CAUTIOUS,), families=_BOTH),
    Part("o-longest", ("text-small-16k",), methods=(CAUTIOUS,), families=_BOTH),
    Part("o-widest", ("text-large-1k",), methods=(CAUTIOUS,), families=(*_BOTH, "muon")),
    Part(
        "o-rates-wide",
        ("text-width-384", "text-width-768"),
        methods=(ORTHOGONAL, BY_FAN_IN),
        is_screened=True,
    ),
)
"""Cheap parts first; from ``o-longest`` on they wait for a GPU."""
