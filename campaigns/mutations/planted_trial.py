"""Bugs to plant in the trial of overlap."""

from __future__ import annotations

from planted import Mutation

TESTS = ("distributed/test_overlap_trial.py",)
FILE = "step/overlap_trial.py"

TRIAL = (
    Mutation(
        "trial of overlap: every worker decides by its own seconds",
        FILE,
        "zip(*found, strict=True)",
        "zip(list(found)[link.rank], strict=True)",
        TESTS,
    ),
    Mutation("trial of overlap: one slow step decides", FILE, "median(end -", "fmean(end -", TESTS),
    Mutation(
        "trial of overlap: a slow stretch decides",
        FILE,
        "medians = [median(each)",
        "medians = [fmean(each)",
        TESTS,
    ),
    Mutation("trial of overlap: the slower one stays", FILE, "_s < 0", "_s > 0", TESTS),
    Mutation(
        "trial of overlap: stretches never end",
        FILE,
        "self.is_over = True",
        "self.is_over = False",
        TESTS,
    ),
    Mutation(
        "trial of overlap: skipped steps do not count",
        "optim/distributed_lion.py",
        "            if self._settings.overlap:\n                session.try",
        "            if self.committed_step > step:\n                session.try",
        TESTS,
    ),
    Mutation(
        "trial of overlap: votes go on leaving during backward",
        "peers/session.py",
        "step=step) and self.overlap is not None:\n"
        "            self.overlap.take(self.routing.buckets, waits=not "
        "self.routing.trial.overlaps)",
        "step=step) and self.overlap is not None:\n"
        "            self.overlap.take(self.routing.buckets, waits=False)",
        TESTS,
    ),
    Mutation(
        "trial of overlap: buckets of the other stretch stay",
        "peers/routing.py",
        "        if changes:\n",
        "        if False:\n",
        TESTS,
    ),
    Mutation(
        "trial of overlap: a GradScaler is taken in a stretch without overlap",
        "optim/distributed_lion.py",
        "        if self._settings.overlap:\n            session.check",
        "        if session.routing.trial.overlaps:\n            session.check",
        TESTS,
    ),
    Mutation(
        "trial of overlap: rates may change in a stretch without overlap",
        "step/overlap.py",
        "            if self._waits:\n                self._begin_step()\n",
        "            if self._waits:\n",
        TESTS,
    ),
    Mutation(
        "trial of overlap: it goes on with other parameters",
        "peers/session.py",
        "        self.routing.begin_trial()\n",
        "",
        TESTS,
    ),
)
