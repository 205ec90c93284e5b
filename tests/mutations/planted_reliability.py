"""Bugs to plant in how workers are compared with the others, and in votes weighed by that."""

from __future__ import annotations

from planted import Mutation

WATCH, WEIGHED = "options/reliability.py", "lab/training/weighed_votes.py"
LOOKS = ("options/test_reliability.py",)
LAB = ("lab/training/test_weighed_votes.py",)

RELIABILITY = (
    Mutation(
        "agreement: a worker's own vote is among the others'",
        WATCH,
        "products = signs * (signs.sum(0) - signs)",
        "products = signs * signs.sum(0)",
        LOOKS,
    ),
    Mutation(
        "agreement: a tie of the others is a disagreement",
        WATCH,
        "(products != 0).sum(1).tolist()",
        "(signs != 0).sum(1).tolist()",
        LOOKS,
    ),
    Mutation(
        "agreement: a worker that is absent votes with plus",
        WATCH,
        ".nan_to_num(0.0)",
        ".nan_to_num(1.0)",
        LOOKS,
    ),
    Mutation(
        "agreement: nobody is judged after the first looks",
        WATCH,
        "deque[float](maxlen=LOOKS)",
        "deque[float]()",
        LOOKS,
    ),
    Mutation(
        "agreement: a worker is compared with a fixed share",
        WATCH,
        "if mean < usual - LARGEST_GAP",
        "if mean < 0.45",
        LOOKS,
    ),
    Mutation(
        "agreement: the last look is judged, not the mean",
        WATCH,
        "worker: fmean(shares)",
        "worker: shares[-1]",
        LOOKS,
    ),
    Mutation(
        "agreement: a step without a vote is a look",
        WATCH,
        "if compared > 0:",
        "if compared >= 0:",
        LOOKS,
    ),
    Mutation(
        "agreement: workers with few looks are judged",
        WATCH,
        "if len(shares) == LOOKS",
        "if len(shares) >= LOOKS - 1",
        LOOKS,
    ),
    Mutation(
        "agreement: of two workers both are named",
        WATCH,
        "_LEAST_WORKERS = 3",
        "_LEAST_WORKERS = 2",
        LOOKS,
    ),
    Mutation(
        "agreement: a worker is named in every step",
        WATCH,
        "self._named.update(low)",
        "pass",
        LOOKS,
    ),
    Mutation(
        "agreement: looks of one parameter are judged",
        WATCH,
        "agreed = sum(each[worker][0] for each in counts)",
        "agreed = sum(each[worker][0] for each in counts[:1])",
        LOOKS,
    ),
    Mutation(
        "agreement: other workers inherit looks",
        "options/diagnostics.py",
        "if earlier is not None and earlier._voters == voters:",
        "if earlier is not None:",
        LOOKS,
    ),
    Mutation(
        "agreement: looks begin anew with more parameters",
        "options/diagnostics.py",
        "            self._watch = earlier._watch\n",
        "            pass\n",
        LOOKS,
    ),
    Mutation(
        "agreement: ranks do not warn",
        "session/session.py",
        "            self.lifecycle.afterwards.append(self.follow_up.warn)\n",
        "            pass\n",
        ("distributed/test_disagreeing_workers.py",),
    ),
    Mutation(
        "weighed votes: the gate knows a worker's own vote",
        WEIGHED,
        "products = votes * (votes.sum(0) - votes)",
        "products = votes * votes.sum(0)",
        LAB,
    ),
    Mutation(
        "weighed votes: who disagrees counts against",
        WEIGHED,
        ".logit().clamp(min=0.0)",
        ".logit()",
        LAB,
    ),
    Mutation(
        "weighed votes: where no worker agrees none counts",
        WEIGHED,
        "return weights if bool(weights.any()) else torch.ones_like(weights)",
        "return weights",
        LAB,
    ),
    Mutation(
        "weighed votes: ties are those of worker 0",
        WEIGHED,
        "Coins(self._run.seed, self._done, 0).tie",
        "Coins(self._run.seed, self._done, 0).zero",
        LAB,
    ),
    Mutation(
        "weighed votes: agreement is not remembered",
        WEIGHED,
        "self.agreement.mul_(DECAY)",
        "self.agreement.mul_(0.0)",
        LAB,
    ),
)
