"""Bugs of overlap, of what it notices, and of the messages that it ends with."""

from __future__ import annotations

from planted import Mutation

CHANGED = ("distributed/test_changed_gradients.py",)
ARRIVALS = "voting/arrivals.py"

OVERLAP = (
    Mutation(
        "a gradient is sampled where it is a shard only",
        ARRIVALS,
        "        self._samples[position] = self._draw(local)\n        if param.is_sharded:\n",
        "        if param.is_sharded:\n            self._samples[position] = self._draw(local)\n",
        CHANGED,
    ),
    Mutation(
        "what samples show is not said",
        "voting/overlap.py",
        "changed = [*seen, *sampled.list_changed(flags)]",
        "changed = seen",
        CHANGED,
    ),
    Mutation(
        "samples are compared as numbers, so that a NaN is a change",
        ARRIVALS,
        "before.view(torch.uint8) != now.view(torch.uint8)",
        "before != now",
        CHANGED,
    ),
)
