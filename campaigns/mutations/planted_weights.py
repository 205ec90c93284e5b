"""Bugs of weights: how often a vote counts, who says so, and who agrees."""

from __future__ import annotations

from planted import Mutation

COUNTS = (
    "kernels/test_conformance_count.py::test_votes_that_count_several_times_are_counted_alike",
)
INTERPRETED = ("kernels/test_interpreted.py::test_every_op_is_that_of_the_reference",)
CLUSTER = ("virtual/test_weighted_cluster.py",)
SCALED = ("votes/test_scaled_rules.py",)
SUMS = ("votes/test_packed_sums.py",)
WORKERS = ("distributed/test_weights.py",)
EVERY_RULE = (
    "distributed/test_weights.py::test_every_rule_in_every_pattern_is_that_of_the_oracle",
)

WEIGHTS = (
    Mutation(
        "weights: doubling takes them",
        "step/settings.py",
        "if weight > 1 and isinstance(pattern, Exchange) and pattern.counts_in_parts:",
        "if False:",
        CLUSTER,
    ),
    Mutation(
        "weights: auto chooses doubling beside them",
        "wire/cost.py",
        "each.carries(shape, weighted=weighted)",
        "each.carries(shape)",
        ("wire/test_choice.py",),
    ),
    Mutation(
        "weights: agreement counts votes",
        "step/diagnostics.py",
        "            counts.append(count_agreement([row[:n] for row in mine]))\n",
        "            rows_of = self._counted_rows\n"
        "            counts.append(count_agreement([mine[row][:n] for row in rows_of]))\n",
        CLUSTER,
    ),
    Mutation(
        "weights: the reference counts each vote once",
        "kernels/words.py",
        "voters = voters.repeat_interleave(times[voters].to(torch.int64))",
        "pass",
        COUNTS,
    ),
    Mutation(
        "weights: Triton counts each vote once",
        "kernels/gpu/count.py",
        "            for _ in range(times):\n",
        "            for _ in range(tl.minimum(times, 1)):\n",
        INTERPRETED,
        interprets=True,
    ),
    Mutation(
        "weights: Triton takes the workers present for votes",
        "kernels/gpu/launch.py",
        "n_present = present.sum(0, dtype=np.int64)",
        "n_present = (present != 0).sum(0, dtype=np.int64)",
        INTERPRETED,
        interprets=True,
    ),
    Mutation(
        "weights: packed sums count each vote once",
        "votes/bucket_vote.py",
        "        if vote.roster.is_weighted:\n",
        "        if False:\n",
        ("wire/test_recursive_doubling.py",),
    ),
    Mutation(
        "weights: votes of some workers alone are counted",
        "votes/roster.py",
        "        if len(self.weights) != len(present):\n",
        "        if len(self.weights) < len(present):\n",
        SUMS,
    ),
    Mutation(
        "weights: owners of shards say how many workers were present",
        "wire/all_reduce.py",
        "present = reducer.count_present(voting)",
        "present = voting.sum(0)",
        EVERY_RULE,
    ),
    Mutation(
        "weights: who counts everything says how many workers were present",
        "wire/all_gather.py",
        "present = reducer.count_present(voting)",
        "present = voting.sum(0)",
        EVERY_RULE,
    ),
    Mutation(
        "weights: virtual workers say how many of them were present",
        "virtual/bucket.py",
        "counted.count_present(self.present)",
        "self.present.sum(0)",
        CLUSTER,
    ),
    Mutation(
        "weights: signs of deltas count once",
        "votes/scaled.py",
        "self.roster.weigh(present), self.bucket",
        "present, self.bucket",
        SCALED,
    ),
    Mutation(
        "weights: scales of deltas count once",
        "votes/scaled.py",
        "mean_scales(scales[rows, :, 0], present[rows])",
        "mean_scales(scales[:, :, 0], present)",
        SCALED,
    ),
    Mutation(
        "weights: rows that are counted are as many as the worker before has votes",
        "votes/roster.py",
        "for _ in range(weight))",
        "for _ in range(self.weights[row - 1]))",
        SCALED,
    ),
    Mutation(
        "weights: virtual workers that stay lose theirs",
        "virtual/members.py",
        "known.get(each, 1)",
        "1",
        CLUSTER,
    ),
    Mutation(
        "weights: a diagnosis counts workers",
        "step/diagnostics.py",
        "            mine = [mine[row] for row in counted]\n",
        "            pass\n",
        CLUSTER,
    ),
    Mutation(
        "weights: one that cannot be used is kept secret",
        "peers/weights.py",
        "own = _UNUSABLE if settings.find_weight_problem() else settings.weight",
        "own = 1 if settings.find_weight_problem() else settings.weight",
        WORKERS,
    ),
    Mutation(
        "weights: ranks of a node may differ in theirs",
        "peers/weights.py",
        "if len(set(inside)) > 1 and",
        "if False and",
        WORKERS,
    ),
    Mutation(
        "weights: nobody adds them up",
        "peers/weights.py",
        "n_votes > MOST_VOTES:",
        "n_votes > 256 * MOST_VOTES:",
        WORKERS,
    ),
    Mutation(
        "weights: nodes take the weights of the first ranks",
        "peers/weights.py",
        "tuple(told[rank] for rank in ranks.between)",
        "tuple(told[rank] for rank in range(len(ranks.between)))",
        WORKERS,
    ),
    Mutation(
        "weights: frames do not carry them",
        "peers/weights.py",
        "    if not roster.is_weighted:\n",
        "    if True:\n",
        WORKERS,
    ),
    Mutation(
        "weights: momenta are averaged beside them",
        "step/settings.py",
        "if weight > 1 and self.momentum_sync is not None:",
        "if False:",
        WORKERS,
    ),
    Mutation(
        "weights: buckets are built before they are known",
        "peers/session.py",
        "            self.routing.take_ranks(self.ranks)\n",
        "",
        WORKERS,
    ),
    Mutation(
        "weights: a weight of local steps is left out",
        "local/local_steps.py",
        "            weight=weight,\n",
        "",
        WORKERS,
    ),
    Mutation(
        "weights: a weight of a param group is ignored",
        "step/hyperparameters.py",
        '        "weight",\n',
        "",
        ("peers/test_fixed_groups.py",),
    ),
)
