"""Bugs to plant in the trial of overlap."""

from __future__ import annotations

from planted import Mutation

TESTS = ("distributed/test_overlap_trial.py",)
FILE = "voting/overlap_trial.py"

TRIAL = (
    Mutation(
        "trial of overlap: every worker decides by its own seconds",
        FILE,
        "(fmean(column) for column in zip(*found, strict=True))",
        "_SECONDS.unpack(own)",
        TESTS,
    ),
    Mutation("trial of overlap: one slow step decides", FILE, "median(end -", "fmean(end -", TESTS),
    Mutation(
        "trial of overlap: a slow turn decides",
        FILE,
        "min(self._seconds[True])",
        "max(self._seconds[True])",
        TESTS,
    ),
    Mutation(
        "trial of overlap: the slower one stays",
        FILE,
        "with_s < without_s",
        "with_s > without_s",
        TESTS,
    ),
    Mutation(
        "trial of overlap: turns never end",
        FILE,
        "self.is_over = True",
        "self.is_over = False",
        TESTS,
    ),
    Mutation(
        "trial of overlap: skipped steps do not count",
        "optim/distributed_lion.py",
        "            if self._settings.overlap:\n                peers.try",
        "            if self.committed_step > step:\n                peers.try",
        TESTS,
    ),
    Mutation(
        "trial of overlap: votes go on leaving during backward",
        "voting/peers.py",
        "        if self.network.trial.overlaps:\n",
        "        if self.settings.overlap:\n",
        TESTS,
    ),
    Mutation(
        "trial of overlap: buckets of the other turn stay",
        "voting/network.py",
        "        if changes:\n",
        "        if False:\n",
        TESTS,
    ),
    Mutation(
        "trial of overlap: a GradScaler is taken in a turn without overlap",
        "optim/distributed_lion.py",
        "        if self._settings.overlap:\n            peers.check",
        "        if peers.overlap is not None:\n            peers.check",
        TESTS,
    ),
)
