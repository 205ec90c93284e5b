"""Bugs of local steps, and of the votes on how far workers came."""

from __future__ import annotations

from planted import Mutation

RULES = ("aggregation/test_scaled_rules.py",)
VIRTUAL = ("virtual/test_virtual_local_steps.py",)
ALONE = ("optim/test_local_steps_alone.py",)
REAL = (
    "distributed/test_local_steps_of_workers.py",
    "distributed/test_local_steps_later.py",
)
FILES = ("checkpoint/test_local_steps_saved.py",)

LOCAL_STEPS = (
    Mutation(
        "a scale is that of the whole vote, in every shard",
        "vote/scaling.py",
        "scales[shard][index]",
        "scales[0][index]",
        RULES,
    ),
    Mutation(
        "a scale is a mean over all shards of a parameter",
        "vote/scaling.py",
        "sizes, slot.n_elements * max",
        "sizes, self.bucket.slots[index].n_elements * max",
        RULES,
    ),
    Mutation(
        "workers that abstain count in the mean scale",
        "aggregation/scaled.py",
        "here.sum(0).clamp(min=1)",
        "len(here)",
        RULES,
    ),
    Mutation(
        "a worker forgets what its vote did not say",
        "aggregation/residual.py",
        "residual.copy_(after)",
        "pass",
        RULES,
    ),
    Mutation(
        "stochastic votes of all workers are drawn alike",
        "kernels/coin.py",
        "LOT_DOMAIN + self.voter",
        "LOT_DOMAIN",
        RULES,
    ),
    Mutation(
        "a lot is drawn anew for the same word in each slot",
        "kernels/lots.py",
        "divmod(slot.first_word * WORD_ELEMENTS + slot.first_bit, 4)",
        "divmod(slot.bucket_word * 0, 4)",
        RULES,
    ),
    Mutation(
        "a rule that says how far moves every element of Lion",
        "optim/arguments.py",
        "rule.n_reply_scales and not takes_scales",
        "False",
        RULES,
    ),
    Mutation(
        "a delta begins at a common point that the parameter cannot hold",
        "optim/common_point.py",
        "begun = common.to(param.dtype).to(torch.float32)",
        "begun = common",
        VIRTUAL,
    ),
    Mutation(
        "the outer momentum begins anew with every vote",
        "optim/outer_step.py",
        "buffer.mul_(step.momentum).add_(outcome)",
        "buffer.copy_(outcome)",
        VIRTUAL,
    ),
    Mutation(
        "the inner optimizer goes on from where it was before the vote",
        "optim/local_steps.py",
        "on_commit=self._end_period,",
        "on_commit=lambda: None,",
        REAL,
    ),
    Mutation(
        "a period that all give up goes on",
        "optim/local_steps.py",
        "if votes.committed_step == before or",
        "if",
        REAL,
    ),
    Mutation(
        "a worker whose common point was repaired goes on from where it was",
        "optim/local_steps.py",
        'or votes.settings.on_divergence == "repair"',
        "or False",
        REAL,
    ),
    Mutation(
        "a worker that overflows leaves out the count of its step",
        "optim/inner_step.py",
        "        return None\n    if scale",
        "        raise FloatingPointError\n    if scale",
        ALONE,
    ),
    Mutation(
        "gradients are unscaled by nobody",
        "optim/inner_step.py",
        "param.grad.mul_(factor.to(param.grad.device))",
        "pass",
        ALONE,
    ),
    Mutation(
        "what a worker moves while a vote travels is lost",
        "optim/late_vote.py",
        "moved = target + (param.detach().float() - begun.float())",
        "moved = target",
        VIRTUAL,
    ),
    Mutation(
        "a late vote that fails is as if it had been committed",
        "optim/late_vote.py",
        "raise self._error",
        "pass",
        REAL,
    ),
    Mutation(
        "a late vote that is under way is not saved",
        "checkpoint/local.py",
        '"is_late": begun is not None,',
        '"is_late": False,',
        FILES,
    ),
    Mutation(
        "workers vote after other numbers of steps",
        "optim/local_steps.py",
        'more=[f"local steps: a vote every {every}, taken {delay} later"],',
        "more=[],",
        REAL,
    ),
    Mutation(
        "a load that some worker refuses leaves others its inner state",
        "optim/local_state.py",
        "with restoring(inner):",
        "with reading_state():",
        REAL,
    ),
    Mutation(
        "a load forgets where in its period a worker was",
        "checkpoint/local.py",
        "local.set_progress(self.local_step, self.begun)",
        "pass",
        FILES,
    ),
    Mutation(
        "a load leaves workers at the common point",
        "checkpoint/local.py",
        "params[index].copy_(value)",
        "pass",
        FILES,
    ),
    Mutation(
        "what a failed load has changed of local steps stays",
        "checkpoint/local.py",
        "if local is not None:\n        kept +=",
        "if False:\n        kept +=",
        FILES,
    ),
)
