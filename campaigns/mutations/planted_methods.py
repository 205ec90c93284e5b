"""Bugs in how a name becomes a method."""

from __future__ import annotations

from planted import METHODS, Mutation

NAMES = (
    Mutation(
        "train reads names that average momenta",
        "lab/training/methods.py",
        "method = None if SYNC.fullmatch(name) else find_mean(name) or _find_vote(name)",
        "method = find_mean(name) or _find_vote(name)",
        METHODS,
    ),
    Mutation(
        "train knows methods that only a comparison knows",
        "lab/training/methods.py",
        "if method is None or method.start is None:",
        "if method is None:",
        METHODS,
    ),
)
