"""Bugs to plant in what refuses a worker whose inputs no step can compute with."""

from __future__ import annotations

from planted import Mutation

SPOILED = ("distributed/test_spoiled_inputs.py",)
FIXED = ("peers/test_fixed_groups.py",)

INPUTS = (
    Mutation(
        "a worker whose gradient cannot be read leaves the others waiting",
        "step/bucket.py",
        "            self.load_nothing(inputs.refuse(header, error))",
        "            raise",
        SPOILED,
    ),
    Mutation(
        "a parameter that was cast is not noticed",
        "step/param.py",
        "if not self.make.fits(self.param):",
        "if False:",
        SPOILED,
    ),
    Mutation(
        "a momentum may have any make",
        "step/param.py",
        "            and exp_avg.dtype is kept.dtype\n",
        "",
        SPOILED,
    ),
    Mutation(
        "kernels read gradients past a negative bit",
        "step/param.py",
        "grad.resolve_neg().contiguous()",
        "grad.contiguous()",
        FIXED,
    ),
    Mutation(
        "a rule changed in place is ignored and saved",
        "peers/fingerprint.py",
        "if now is not before and now != before:",
        "if False:",
        FIXED,
    ),
    Mutation(
        "a commit writes to memory that a parameter has left",
        "step/overlap.py",
        "if param.find_addresses() != before:",
        "if False:",
        SPOILED,
    ),
)
