"""Bugs around local steps outside of the optimizer: messages, real workers, forecasts."""

from __future__ import annotations

from planted import Mutation

AROUND_LOCAL_STEPS = (
    Mutation(
        "what was not sent does not decay",
        "lab/baselines/top_bits.py",
        'residual = self.decay * state["residual"] + grad',
        'residual = state["residual"] + grad',
        ("lab/baselines/test_top_bits.py",),
    ),
    Mutation(
        "evaluation leaves the common point in the model",
        "lab/training/delta_worker.py",
        "            _copy(kept, own)",
        "            pass",
        ("lab/training/test_delta_worker.py",),
    ),
    Mutation(
        "a forecast pays a whole vote in each step",
        "lab/planning/local_steps.py",
        "step_s = base_s + vote_s / every",
        "step_s = base_s + vote_s",
        ("lab/planning/test_local_steps_plan.py",),
    ),
    Mutation(
        "a comparison of local steps is told the name of their rule",
        "lab/cli/beside.py",
        "return rule if every is None else find_delta_rule(rule, every=int(every)).name",
        "return rule",
        ("lab/cli/test_beside.py",),
    ),
)
