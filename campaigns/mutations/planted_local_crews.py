"""Bugs of local steps of a crew."""

from __future__ import annotations

from planted import Mutation

CREW = ("crew/test_local_steps.py",)
BEHIND = ("crew/test_local_steps_behind.py",)
CREW_REFUSED = ("crew/test_local_steps_refused.py",)

LOCAL_CREWS = (
    Mutation(
        "a newcomer of a crew has a say before it has taken a step",
        "local/votes.py",
        "if self.period.since and not self._abstains:",
        "if self.period.since:",
        CREW,
    ),
    Mutation(
        "a newcomer of a crew begins without the outer momentum",
        "crew/local_votes.py",
        "return self.stage.momentum.buffers",
        "return []",
        CREW,
    ),
    Mutation(
        "a newcomer of a crew goes on from its own parameters",
        "crew/local_votes.py",
        "        if epoch.takes_parameters:\n            self._begin",
        "        if epoch.takes_parameters and not epoch.is_behind:\n            self._begin",
        BEHIND,
    ),
    Mutation(
        "survivors of a crew leave out the vote that failed",
        "crew/local_votes.py",
        'if self._cast_vote() and (self.at == "step" or not self.period.since):',
        "if self._cast_vote() or True:",
        CREW,
    ),
    Mutation(
        "a newcomer of a crew counts the steps of its period itself",
        "crew/local_votes.py",
        'self.period.set_progress(calls - is_first, given["since"])',
        "pass",
        CREW,
    ),
    Mutation(
        "a newcomer of a crew keeps its own learning rate",
        "crew/local_votes.py",
        "            self.take_donor_groups()\n            self._take_place",
        "            self._take_place",
        CREW,
    ),
    Mutation(
        "survivors of a crew do not wait for those who still take local steps",
        "crew/optimizer.py",
        "return QUICK_S if self._local is None else self._settings.timeouts.step_s",
        "return QUICK_S if self._local is None else 0.0",
        CREW,
    ),
    Mutation(
        "a worker of a crew that missed a vote which all gave up is taken to be where they are",
        "crew/epoch.py",
        "return self.follows or (self.epoch, self.step, self.calls)",
        "return self.follows or (self.epoch, self.step, 0)",
        BEHIND,
    ),
    Mutation(
        "a worker of a crew that is behind in vote() takes part in a step of the others",
        "crew/local_votes.py",
        "while self.at and not self._is_first:",
        "while self.at:",
        BEHIND,
    ),
    Mutation(
        "a worker of a crew that is behind in step() is a step behind after vote()",
        "crew/local_votes.py",
        'if self._vote_at("step") == "vote":',
        'if self._vote_at("step") == "never":',
        BEHIND,
    ),
    Mutation(
        "a crew overwrites what was written to weights where it has nothing to vote on",
        "crew/local_votes.py",
        "        if problem is not None:\n            raise problem\n",
        "",
        CREW_REFUSED,
    ),
    Mutation(
        "a newcomer of a crew with other param groups finds out in the commit",
        "crew/local_votes.py",
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
    Mutation(
        "a worker that asks just before a vote of a crew waits for the next one",
        "crew/optimizer.py",
        "            membership.lookout.look_closely()\n",
        "            pass\n",
        CREW,
    ),
)
