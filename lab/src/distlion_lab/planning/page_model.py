"""Data for the planner's page, so that its closed forms hold no number of their own."""

from __future__ import annotations

from typing import Any

from distlion import layout
from distlion.kernels import ReplyFormat
from distlion.votes import RULES, ScaledVote
from distlion.wire import MOST_BYTES_AT_ONCE
from distlion.wire.cost import BUCKET_S, LEAST_OVERLAP_BUCKETS, MOST_OVERLAP_BUCKETS
from distlion_lab.planning import gradient_all_reduce, local_steps, machine, planner, votes
from distlion_lab.planning.gradient_all_reduce import BASELINES
from distlion_lab.planning.line import payload_share

_A_FEW, _MANY = 3, 1023


def build_page_model() -> dict[str, Any]:
    """Return rules, baselines and constants as JSON types, for ``planner.js``.

    Lists are in the order of ``compare_methods``, so that equally fast methods rank alike.
    """
    return {
        "rules": [_describe_rule(named.rule) for named in RULES.values() if named.listed],
        "baselines": [
            {"method": baseline.name, "bits": baseline.bits, "algorithm": baseline.algorithm}
            for baseline in BASELINES
        ],
        "delta_rule": _describe_rule(ScaledVote()),
        "periods": list(local_steps.PERIODS),
        "local_share": local_steps.SHARE,
        "price": local_steps.PRICE,
        "site_rates": list(local_steps.SITE_RATES),
        "site_latencies_s": list(local_steps.SITE_LATENCIES_S),
        "threshold": planner.THRESHOLD,
        "payload_share": payload_share(),
        "block_bytes": layout.PLANE_BYTES,
        "block_elements": layout.BLOCK_WORDS * layout.WORD_ELEMENTS,
        "word_elements": layout.WORD_ELEMENTS,
        "align_bytes": layout.ALIGN_BYTES,
        "header_bytes": layout.HEADER_BYTES,
        "float_bytes": layout.FLOAT_BYTES,
        "most_bytes_at_once": MOST_BYTES_AT_ONCE,
        "bucket_elements": votes.BUCKET_ELEMENTS,
        "ddp_bucket_bytes": gradient_all_reduce.DDP_BUCKET_BYTES,
        "least_overlap_buckets": LEAST_OVERLAP_BUCKETS,
        "overlap_bucket_s": BUCKET_S,
        "most_overlap_buckets": MOST_OVERLAP_BUCKETS,
        "read_to_encode_bytes": machine.READ_TO_ENCODE_BYTES,
        "momentum_bytes": machine.MOMENTUM_BYTES,
        "apply_bytes": machine.APPLY_BYTES,
        "orthogonalize_operations": machine.ORTHOGONALIZE_OPERATIONS,
        "state_bytes": machine.STATE_BYTES,
        "counted_state_bytes": machine.COUNTED_STATE_BYTES,
    }


def _describe_rule(rule: Any) -> dict[str, Any]:
    """Describe a rule by its planes; a reply of counts has as many as the number of workers."""
    grows = rule.reply_planes(_A_FEW) != rule.reply_planes(_MANY)
    return {
        "method": votes.name_rule(rule),
        "vote_planes": rule.vote_planes,
        "n_scales": rule.n_scales,
        "n_reply_scales": rule.n_reply_scales,
        "keeps_state": bool(rule.worker_state),
        "reply_planes": None if grows else rule.reply_planes(_A_FEW),
        "has_partial_sums": rule.vote_format.has_partial_sums,
        "has_counts": rule.reply_format is ReplyFormat.COUNT,
    }
