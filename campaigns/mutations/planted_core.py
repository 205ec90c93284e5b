"""Bugs of the vote without a network: who votes, what a vote weighs, of which epoch it is."""

from __future__ import annotations

from planted import Mutation

TOYS = ("votes/test_toys.py",)

CORE = (
    Mutation(
        "core: a weight is not counted",
        "votes/bucket_vote.py",
        "self.roster.weigh(present) if self._is_weighted else present",
        "present",
        TOYS,
    ),
    Mutation(
        "core: votes that count as several are one",
        "votes/bucket_vote.py",
        "return self.roster.weigh(present).sum(0)",
        "return present.sum(0)",
        TOYS,
    ),
    Mutation(
        "core: a weight is that of the worker before",
        "votes/roster.py",
        "times = torch.tensor(self.weights, ",
        "times = torch.tensor(self.weights[-1:] + self.weights[:-1], ",
        TOYS,
    ),
    Mutation(
        "core: estimates weigh alike",
        "votes/bucket_vote.py",
        "weights = self.roster.weights",
        "weights = [1] * self.roster.n_voters",
        TOYS,
    ),
    Mutation(
        "core: replies have room for owners, not for votes",
        "votes/bucket_vote.py",
        "rule.reply_planes(roster.n_votes)",
        "rule.reply_planes(roster.n_shards)",
        TOYS,
    ),
    Mutation(
        "core: bytes of another epoch are read",
        "wire/frame.py",
        '        ("epoch", like.epoch),\n',
        "",
        ("wire/test_frame.py",),
    ),
    Mutation(
        "core: virtual workers' counter has heard nothing",
        "virtual/bucket.py",
        "self.vote.import_states(torch.stack(told).to(device))",
        "self.vote.import_states(0 * torch.stack(told).to(device))",
        ("checkpoint/test_resume_virtual.py",),
    ),
    Mutation(
        "core: virtual workers forget what they have voted",
        "virtual/bucket.py",
        "        self.vote.note()\n",
        "        pass\n",
        ("virtual/test_cluster_equals_processes.py",),
    ),
    Mutation(
        "core: who counts anew does not take what it is told",
        "votes/feedback.py",
        "self._everybody = told.contiguous().view(torch.float32).clone()",
        "pass",
        ("distributed/test_estimates.py",),
    ),
    Mutation(
        "core: a state of several names is told in another order",
        "votes/bucket_vote.py",
        "values.view(len(names), bucket.n_shards, shard_elements).transpose(0, 1)",
        "values.view(bucket.n_shards, len(names), shard_elements)",
        ("votes/test_told.py",),
    ),
)
