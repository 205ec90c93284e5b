"""Bugs to plant in how a newcomer catches up while the others train."""

from __future__ import annotations

from planted import Mutation

REPLIES = ("crew/test_replies.py",)
DONOR = ("crew/test_donor.py",)
OFFERS = ("crew/test_offers.py",)
NEWCOMERS = ("crew/test_newcomers.py",)
JOINING = ("crew/test_joining.py",)
STRUCK = "crew/test_struck_joins.py"

JOIN_MUTATIONS = (
    Mutation(
        "join: a newcomer follows a donor that the others train without",
        "crew/catch_up.py",
        "        if not donor_trains:\n",
        "        if False:\n",
        ("simulation/test_simulated_joins.py", *DONOR),
    ),
    Mutation(
        "join: a newcomer whose rule keeps state catches up without it",
        "crew/catch_up.py",
        "        if rule.worker_state:\n",
        "        if False:\n",
        NEWCOMERS,
    ),
    Mutation(
        "join: a newcomer that copies momenta catches up without them",
        "crew/catch_up.py",
        'if newcomers != "zeros":',
        'if newcomers == "mean":',
        NEWCOMERS,
    ),
    Mutation(
        "join: a newcomer that takes local steps catches up between votes",
        "crew/optimizer.py",
        "is_local=local is not None",
        "is_local=False",
        ("crew/test_local_steps.py",),
    ),
    Mutation(
        "join: a newcomer that is two steps behind is let in",
        "crew/catch_up.py",
        "self.step >= self._head - 1",
        "self.step >= self._head - 2",
        DONOR,
    ),
    Mutation(
        "join: a newcomer is let in before it has caught up",
        "crew/catch_up.py",
        "        return catch_up.is_close\n",
        "        return True\n",
        DONOR,
    ),
    Mutation(
        "join: a member that was left behind tells newcomers that their donor does not train",
        "crew/lookout.py",
        "if not is_left_behind:  # who is",
        "if True:  # who is",
        ("crew/test_admission.py",),
    ),
    Mutation(
        "join: attempts in which a newcomer falls behind are not counted",
        "crew/catch_up.py",
        "self._tries_behind += catch_up.is_behind",
        "self._tries_behind += 0",
        DONOR,
    ),
    Mutation(
        "join: replies are copied for newcomers that have come",
        "crew/donor.py",
        "[feed for feed in self._feeds if feed.is_running]\n        if not feeds",
        "self._feeds\n        if not feeds",
        DONOR,
    ),
    Mutation(
        "join: announcements in a store that has come back empty are overlooked",
        "crew/offers.py",
        "if newest < self._next - 1:",
        "if False:",
        OFFERS,
    ),
    Mutation(
        "join: a member that serves newcomers offers itself as fast as one that serves none",
        "crew/lookout.py",
        "list_due(store, lambda: donor.n_served)",
        "list_due(store, lambda: 0)",
        OFFERS,
    ),
    Mutation(
        "join: a member that serves newcomers never offers itself again",
        "crew/offers.py",
        "elif looks >= count_served() and",
        "elif count_served() == 0 and",
        OFFERS,
    ),
    Mutation(
        "join: a member gives its old parameters with the others' number of steps",
        "crew/optimizer.py",
        "            self._donor.stop()  # before",
        "            pass  # before",
        ("simulation/test_simulated_joins.py",),
    ),
    Mutation(
        "join: a piece that busy cores have held up slows the ones after it",
        "crew/donor.py",
        "min(self._recent)",
        "max(self._recent)",
        DONOR,
    ),
    Mutation(
        "join: a reply is missing from those that wait to be sent",
        "crew/donor.py",
        "        self._waiting.append(reply)\n",
        "        if reply.step % 3:\n            self._waiting.append(reply)\n",
        DONOR,
    ),
    Mutation(
        "join: a missing reply is not noticed",
        "crew/replies.py",
        "if any(piece.step < reply.step for piece in before if piece.step is not None):",
        "if False:",
        REPLIES,
    ),
    Mutation(
        "join: a reply is replayed twice",
        "crew/replies.py",
        "                    if piece.step == reply.step:\n                        moved",
        "                    if piece.step is not None:\n                        moved",
        REPLIES,
    ),
    Mutation(
        "join: a piece is copied while a commit goes on",
        "crew/donor.py",
        "        self.lock.__enter__()\n        self._holds = True\n",
        "        self._holds = False\n",
        DONOR,
    ),
    Mutation(
        "join: pieces have the number of steps with which the stream began",
        "crew/donor.py",
        "            step = donor.read_step()\n            values",
        "            step = vars(self).setdefault('first', donor.read_step())\n            values",
        DONOR,
    ),
    Mutation(
        "join: a newcomer follows a donor that is not among the most advanced",
        "crew/epoch.py",
        "donor is not None and donor.epoch > 0 and donor.progress == best",
        "donor is not None and donor.epoch > 0",
        DONOR,
    ),
    Mutation(
        "join: a reply of another epoch's roster is read by this one's",
        "crew/replies.py",
        "members[0].rule.start(layout, reply.roster)",
        "members[0].rule.start(layout, Roster.of(4))",
        REPLIES,
    ),
    Mutation(
        "join: a newcomer takes its donor's momentum",
        "crew/optimizer.py",
        ' and self._membership.newcomers != "zeros":\n'
        "            taken += self._fetch_momenta(epoch)\n",
        ":\n            chosen, self._membership.newcomers = self._membership.newcomers, 'donor'\n"
        "            taken += self._fetch_momenta(epoch)\n"
        "            self._membership.newcomers = chosen\n",
        JOINING,
    ),
    Mutation(
        "join: a newcomer that gives up keeps what has come",
        "crew/catch_up.py",
        "            param.copy_(kept)\n",
        "            pass\n",
        DONOR,
    ),
    Mutation(
        "join: a slow newcomer has replies without end",
        "crew/donor.py",
        "if len(self._waiting) >= self._donor.replay_steps:",
        "if False:",
        DONOR,
    ),
    Mutation(
        "join: the hyperparameters of replay are those of the first step",
        "crew/replies.py",
        "            tuple(inputs.coefficients),\n",
        "            tuple(each._replace(lr=1e-2) for each in inputs.coefficients),\n",
        JOINING,
    ),
    Mutation(
        "join: whoever dials is sent the parameters",
        "crew/side_link.py",
        'if not _is_same(asked.get("proof"), sign(f"{name}/dials", nonce)):',
        "if False:",
        DONOR,
    ),
    Mutation(
        "join: members commit no step while their newcomer does not answer",
        "crew/donor.py",
        "        link.receive(0)  # it has come:",
        "        with donor.lock:\n            link.receive(0)  # it has come:",
        (f"{STRUCK}::test_members_go_on_without_a_newcomer_that_is_stopped_as_it_catches_up",),
        is_slow=True,
    ),
    Mutation(
        "join: a newcomer waits for a silent donor without end",
        "crew/side_link.py",
        "connection.settimeout(SILENT_S)",
        "connection.settimeout(None)",
        (f"{STRUCK}::test_a_newcomer_whose_donor_is_stopped_catches_up_with_another_one",),
        is_slow=True,
    ),
    Mutation(
        "join: a member that is lost as all leave their epoch ends the others",
        "peers/session.py",
        "losses = PeerLostError, StepTimeoutError, CorruptFrameError",
        "losses = (CorruptFrameError,)",
        (f"{STRUCK}::test_a_newcomer_is_let_in_although_a_member_dies_as_all_leave",),
    ),
    Mutation(
        "join: a newcomer is let in whose donor was lost meanwhile",
        "crew/membership.py",
        "if each.member.donor is None or each.member.donor in _find_most_advanced(records)",
        "if True",
        (f"{STRUCK}::test_a_newcomer_is_let_in_although_a_member_is_stopped_as_all_leave",),
        is_slow=True,
    ),
)
