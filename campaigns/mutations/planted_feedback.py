"""Bugs of votes with error feedback."""

from __future__ import annotations

from planted import Mutation

ESTIMATES = ("distributed/test_estimates.py",)
OPS = ("kernels/test_feedback.py", "kernels/test_conformance_feedback.py")

FEEDBACK = (
    Mutation(
        "a worker forgets what its vote has said",
        "votes/bucket_vote.py",
        "for move in (self._move_own, self._move_counted):",
        "for move in (self._move_counted,):",
        ESTIMATES,
    ),
    Mutation(
        "who counts forgets what votes have said",
        "votes/bucket_vote.py",
        "for move in (self._move_own, self._move_counted):",
        "for move in (self._move_own,):",
        ESTIMATES,
    ),
    Mutation(
        "votes that are never committed have been heard",
        "votes/feedback.py",
        "self._move_counted = partial(kernels.add_steps_of_all, estimates, said, scales)",
        "kernels.add_steps_of_all(estimates, said, scales)",
        ESTIMATES,
    ),
    Mutation(
        "a state is loaded and nobody sends its estimates",
        "peers/routing.py",
        "if not is_first:",
        "if False:",
        ESTIMATES,
    ),
    Mutation(
        "a load that fails on the network leaves half of a state",
        "optim/saved_state.py",
        "optimizer.state, optimizer.param_groups = before",
        "pass",
        ESTIMATES,
    ),
    Mutation(
        "a rest beyond the range of a float is said to be finite",
        "kernels/reference.py",
        "finite[index] & mean.isfinite()",
        "finite[index]",
        OPS,
    ),
    Mutation(
        "ranks of a node do not commit what they have said",
        "step/nodes.py",
        "apply = part.vote.commit if is_own else part.vote.apply",
        "part.vote.note = lambda: None; apply = part.vote.commit if is_own else part.vote.apply",
        ESTIMATES,
    ),
    Mutation(
        "a loaded state has no estimates",
        "optim/saved_state.py",
        "keys = (*of_all, *find_rule(saved).worker_state)",
        "keys = of_all",
        ESTIMATES,
    ),
    Mutation(
        "a checkpoint has no estimates",
        "checkpoint/contents.py",
        "for key in list_kept(entry):",
        "for key in list_kept(entry)[:1]:",
        ("checkpoint/test_resume_virtual.py",),
    ),
    Mutation(
        "what is as large as the mean is a small one",
        "kernels/reference.py",
        "sizes >= mean",
        "sizes > mean",
        OPS,
    ),
    Mutation(
        "a sum of estimates of exactly 0 is a minus",
        "kernels/counting.py",
        "sign[run.words] |= ties",
        "pass",
        OPS,
    ),
    Mutation(
        "a plain sum of steps leaves out who is absent",
        "kernels/counting.py",
        "after = torch.zeros_like(total) if estimates is None else estimates[own].clone()",
        "after = torch.zeros_like(total) if estimates is None or not present[worker].any() "
        "else estimates[own].clone()",
        OPS,
    ),
    Mutation(
        "a plain residual moves where nothing was sent",
        "kernels/reference.py",
        "torch.where(finite[index], after, residual)",
        "after",
        OPS,
    ),
    Mutation(
        "a plain level of a stochastic sign is cut toward 0",
        "kernels/reference.py",
        ".floor().clamp(-(LOTS // 2), LOTS // 2)",
        ".trunc().clamp(-(LOTS // 2), LOTS // 2)",
        OPS,
    ),
    Mutation(
        "an absent worker's estimate does not count",
        "kernels/counting.py",
        "everybody = voted.expand(len(packed), -1).contiguous()",
        "everybody = present",
        OPS,
    ),
)
