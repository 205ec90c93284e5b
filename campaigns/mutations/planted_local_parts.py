"""Bugs of parts that take turns to vote, and of local steps of a crew."""

from __future__ import annotations

from planted import Mutation

VIRTUAL_PARTS = ("virtual/test_virtual_parts.py",)
REAL_PARTS = ("distributed/test_local_steps_in_parts.py",)
CREW = ("crew/test_local_steps.py",)
BEHIND = ("crew/test_local_steps_behind.py",)
CREW_REFUSED = ("crew/test_local_steps_refused.py",)
FILES = ("checkpoint/test_local_steps_saved.py",)

LOCAL_PARTS = (
    Mutation(
        "coins of a part are numbered by all votes",
        "local/outer_step.py",
        "number = inputs.header.step // self._n_parts",
        "number = inputs.header.step",
        REAL_PARTS,
    ),
    Mutation(
        "coins of a part of virtual workers are numbered by all votes",
        "virtual/collection.py",
        "self._number, turn = divmod(step, count_turns(params))",
        "self._number, turn = step, step % count_turns(params)",
        VIRTUAL_PARTS,
    ),
    Mutation(
        "a vote on a part sends all parameters",
        "peers/routing.py",
        "[bucket for bucket in self.buckets if bucket.params[0].turn == turn]",
        "list(self.buckets)",
        REAL_PARTS,
    ),
    Mutation(
        "parts share buckets",
        "step/param.py",
        "return self.rule, self.make.dtype, self.make.device, self.turn",
        "return self.rule, self.make.dtype, self.make.device, 0",
        REAL_PARTS,
    ),
    Mutation(
        "a vote out of turn forgets the parts after the first",
        "local/votes.py",
        "while any(self.period.since):",
        "if any(self.period.since):",
        REAL_PARTS,
    ),
    Mutation(
        "parts keep their numbers where parameters are added",
        "local/votes.py",
        "self.pairs.turns = [param.turn for param in self.common.session.params]\n        # Param",
        "self.pairs.turns += [0]\n        # Param",
        REAL_PARTS,
    ),
    Mutation(
        "a part takes a tensor more than its share",
        "local/outer_step.py",
        "n_open * (2 * held + size) > 2 * left",
        "n_open * held >= left",
        VIRTUAL_PARTS,
    ),
    Mutation(
        "the last parts may be empty",
        "local/outer_step.py",
        "is_closer_without or n_left < n_open",
        "is_closer_without",
        VIRTUAL_PARTS,
    ),
    Mutation(
        "a late vote on a part is taken by another",
        "checkpoint/contents.py",
        "turn=late if begun else None",
        "turn=0 if begun else None",
        FILES,
    ),
    Mutation(
        "a diagnosis is planned for all parts",
        "step/diagnostics.py",
        "if param.turn == turn]",
        "]",
        REAL_PARTS,
    ),
    Mutation(
        "a newcomer of a crew has a say before it has taken a step",
        "local/votes.py",
        "if self.period.since[turn] and not self._abstains:",
        "if self.period.since[turn]:",
        CREW,
    ),
    Mutation(
        "a newcomer of a crew begins without the outer momentum",
        "crew/local_steps.py",
        "return self.stage.momentum.buffers",
        "return []",
        CREW,
    ),
    Mutation(
        "a newcomer of a crew goes on from its own parameters",
        "crew/local_steps.py",
        "        if epoch.takes_parameters:\n            self._begin_anew(",
        "        if epoch.takes_parameters and not epoch.is_behind:\n            self._begin_anew(",
        CREW,
    ),
    Mutation(
        "survivors of a crew leave out the vote that failed",
        "crew/local_steps.py",
        'if self._cast_vote() and (self.at == "step" or not any(self.period.since)):',
        "if self._cast_vote() or True:",
        CREW,
    ),
    Mutation(
        "a newcomer of a crew counts the steps of its period itself",
        "crew/local_steps.py",
        'self.period.set_progress(calls - is_first, given["since"])',
        "pass",
        CREW,
    ),
    Mutation(
        "a newcomer of a crew keeps its own learning rate",
        "crew/local_steps.py",
        "            self.take_donor_groups()\n            self._take_place",
        "            self._take_place",
        CREW,
    ),
    Mutation(
        "survivors of a crew do not wait for those who still take local steps",
        "crew/optimizer.py",
        "return QUICK_S if self._local is None else self.silence_s",
        "return QUICK_S if self._local is None else 0.0",
        CREW,
    ),
    Mutation(
        "a worker of a crew that missed a vote which all gave up is taken to be where they are",
        "crew/epoch.py",
        "return self.epoch, self.step, self.calls",
        "return self.epoch, self.step, 0",
        BEHIND,
    ),
    Mutation(
        "a worker of a crew that is behind in vote() takes part in a step of the others",
        "crew/local_steps.py",
        "while self.at and not self._is_first:",
        "while self.at:",
        BEHIND,
    ),
    Mutation(
        "a worker of a crew that is behind in step() is a step behind after vote()",
        "crew/local_steps.py",
        'if self._vote_at("step") == "vote":',
        'if self._vote_at("step") == "never":',
        BEHIND,
    ),
    Mutation(
        "a crew overwrites what was written to weights where it has nothing to vote on",
        "crew/local_steps.py",
        "        if problem is not None:\n            raise problem\n",
        "",
        CREW_REFUSED,
    ),
    Mutation(
        "a newcomer of a crew with other param groups finds out in the commit",
        "crew/local_steps.py",
        'check_groups(self._inner.param_groups, given["inner"])',
        "pass",
        CREW_REFUSED,
    ),
    Mutation(
        "a load that fails puts a crew back",
        "crew/local_steps.py",
        "        self._open_votes = partial(",
        "        self._membership = membership\n        self._open_votes = partial(",
        ("crew/test_local_steps_saved.py",),
    ),
)
