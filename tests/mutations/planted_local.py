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
CHANGED = ("optim/test_local_steps_changed.py",)
REFUSED = ("distributed/test_local_steps_refused.py",)
ENDS = ("distributed/test_local_steps_ends.py",)
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
        "optim/local_votes.py",
        "on_commit=self._end_period,",
        "on_commit=lambda: None,",
        REAL,
    ),
    Mutation(
        "a period that all give up goes on",
        "optim/local_votes.py",
        "if self.common.committed_step == before:",
        "if False:",
        REAL,
    ),
    Mutation(
        "a worker whose common point was repaired goes on from where it was",
        "optim/local_votes.py",
        "if self.common.take_repair():",
        "if False:",
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
        "raise self._outcome.error",
        "pass",
        REAL,
    ),
    Mutation(
        "a late vote that is under way is not saved",
        "checkpoint/local.py",
        '"late_part": progress.turn,',
        '"late_part": None,',
        FILES,
    ),
    Mutation(
        "workers vote after other numbers of steps",
        "optim/local_votes.py",
        "more=[schedule.describe()],",
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
        "local.progress = self.progress",
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
    Mutation(
        "weights that are loaded after construction are a part of the next delta",
        "optim/local_period.py",
        "self._written = self._written or self._names[mark.param]",
        "pass",
        CHANGED,
    ),
    Mutation(
        "writes that the counter does not see are a part of the first delta",
        "optim/local_votes.py",
        "self.pairs.pairs, is_first=True",
        "self.pairs.pairs",
        CHANGED,
    ),
    Mutation(
        "what a user writes while a vote travels is a local step",
        "optim/local_votes.py",
        "self.period.note_begun([param for param, _ in pairs], self._late.begun)",
        "pass",
        REFUSED,
    ),
    Mutation(
        "what keeps one worker from a vote is heard by none",
        "optim/common_point.py",
        "return inputs.refused(self._problem)",
        "return inputs",
        REFUSED,
    ),
    Mutation(
        "workers vote a call of step() apart",
        "optim/common_point.py",
        'f"calls of step() so far: {self._calls}"',
        '"calls of step()"',
        REFUSED,
    ),
    Mutation(
        "a group that the inner optimizer refuses is voted on",
        "optim/local_votes.py",
        'self.common.agree_on("add_param_group()", problem)',
        "pass",
        REFUSED,
    ),
    Mutation(
        "states of different steps are loaded",
        "optim/local_state.py",
        "common.agree(CALL, problem, said)",
        "common.agree(CALL, problem)",
        REFUSED,
    ),
    Mutation(
        "checkpoints of different steps are loaded",
        "checkpoint/load.py",
        "parsed is not None and parsed.local is not None:",
        "False:",
        FILES,
    ),
    Mutation(
        "workers that are a call apart save a checkpoint",
        "checkpoint/save.py",
        "if local is not None:",
        "if False:",
        REFUSED,
    ),
    Mutation(
        "a vote without a step since the last moves all",
        "optim/local_votes.py",
        "while any(self.period.since):",
        "for _ in self.period.since:",
        REFUSED,
    ),
    Mutation(
        "a vote without a step since the last moves virtual workers",
        "virtual/local_steps.py",
        "while any(self._since):",
        "for _ in self._since:",
        VIRTUAL,
    ),
    Mutation(
        "a late vote of virtual workers that fails is taken",
        "virtual/local_steps.py",
        "            self._cast(turn)\n            self._begun, self._begun_turn = begun, turn",
        "            self._begun, self._begun_turn = begun, turn\n            self._cast(turn)",
        VIRTUAL,
    ),
    Mutation(
        "the end of a process cuts its late vote short",
        "optim/late_vote.py",
        "daemon=False",
        "daemon=True",
        ENDS,
    ),
    Mutation(
        "a late vote that nobody takes fails in silence",
        "optim/late_vote.py",
        "weakref.finalize(self, _log_untaken, self._outcome)",
        "pass",
        ENDS,
    ),
)
