"""Bugs of orthogonalized matrices that are cut over the ranks of a worker."""

from __future__ import annotations

from planted import Mutation

BITS = (
    "distributed/test_sharded_orthogonal.py::"
    "test_bfloat16_weights_and_absent_gradients_have_the_bits_of_whole_matrices",
)
DIAGNOSED = (
    "distributed/test_sharded_orthogonal.py::"
    "test_clipped_steps_are_diagnosed_by_the_directions_that_were_encoded",
)
FAILURES = "distributed/test_sharded_orthogonal_failures.py::"
NAN = (FAILURES + "TestNan",)
LACKS = (FAILURES + "test_a_worker_abstains_where_one_of_its_shards_lacks_a_gradient",)
TROUBLE = (FAILURES + "test_trouble_on_one_rank_is_raised_on_all_and_nothing_moves",)
NODES = ("distributed/test_nodes.py",)

CUT_MATRICES = (
    Mutation(
        "each shard of a matrix is orthogonalized by itself",
        "peers/routing.py",
        "        if self.inside is not None:\n            self._matrices",
        "        if self.inside is not None and False:\n            self._matrices",
        BITS,
    ),
    Mutation(
        "directions of the first step are encoded in all steps",
        "step/bucket.py",
        "            by_position, self.header, inputs if can_vote else None\n        )\n",
        "            by_position, self.header, inputs if can_vote else None\n        )\n"
        "        given = matrices.__dict__.setdefault('kept', given)\n",
        BITS,
    ),
    Mutation(
        "ranks take back the pieces that others have sent",
        "step/cut_matrices.py",
        "self._give(segments, returned.payloads, voted)",
        "self._give(segments, sent.payloads, voted)",
        BITS,
    ),
    Mutation(
        "an owner cuts its own piece out of a matrix for all ranks",
        "step/cut_matrices.py",
        "self._join(self._cut(whole, rank), self.owned[me], rank)",
        "self._join(self._cut(whole, me), self.owned[me], me)",
        BITS,
    ),
    Mutation(
        "a matrix whose pieces were put together has its rows for columns",
        "step/matrix_cuts.py",
        "CutMatrix(param.position, matrix, shape, boxes, dtype)",
        "CutMatrix(param.position, matrix[::-1], shape, boxes, dtype)",
        NODES,
    ),
    Mutation(
        "a shard that is not finite is blamed on all ranks of its worker",
        "step/cut_matrices.py",
        'if spoiled and inputs.nonfinite != "abstain":',
        'if not spoiled and inputs.nonfinite == "":',
        NAN,
    ),
    Mutation(
        "a worker votes on a matrix of which one shard lacks a gradient",
        "step/cut_matrices.py",
        "sent.present.bool().all(0)",
        "sent.present.bool().any(0)",
        LACKS,
    ),
    Mutation(
        "a worker that abstains from a matrix moves its momentum",
        "step/bucket.py",
        "[each.position not in dropped for each in own]",
        "[True for each in own]",
        LACKS,
    ),
    Mutation(
        "an error on one rank is not heard by those whose matrices it has",
        "step/cut_matrices.py",
        "    return find_errors(read, header, self.link.ranks), read",
        "    return header, read",
        TROUBLE,
    ),
    Mutation(
        "workers that give a step up leave others in the gather",
        "step/bucket.py",
        "            self._orthogonalize(self.matrices, None)\n",
        "            pass\n",
        TROUBLE,
    ),
    Mutation(
        "diagnoses read the direction of a shard",
        "step/diagnostics.py",
        "encoded.get(position, segment)",
        "segment",
        DIAGNOSED,
    ),
)
