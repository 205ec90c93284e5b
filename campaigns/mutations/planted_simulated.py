"""Bugs of joins and of heartbeats, once more: the simulation of crews must find them too."""

from __future__ import annotations

from dataclasses import replace

from planted import Mutation
from planted_heartbeats import HEARTBEATS
from planted_joins import JOIN_MUTATIONS

FROM_DONORS = "simulation/test_simulated_joins.py"
CATCHES_UP = f"{FROM_DONORS}::test_a_newcomer_that_nothing_strikes_catches_up_with_its_first_donor"
WHOLE = f"{FROM_DONORS}::test_nothing_is_copied_while_a_commit_is_under_way"
TWO_EPOCHS = f"{FROM_DONORS}::test_replies_of_two_epochs_are_read_by_the_roster_of_each"
MAIN_THREAD = (
    "simulation/test_found_in_crews.py::"
    "test_others_go_on_without_a_process_whose_main_thread_has_ended"
)

_PLANTED = {mutation.name: mutation for mutation in (*JOIN_MUTATIONS, *HEARTBEATS)}


def _simulate(name: str, test: str) -> Mutation:
    return replace(_PLANTED[name], name=f"{name}, simulated", tests=(test,))


SIMULATED = (
    _simulate("join: a reply is missing from those that wait to be sent", CATCHES_UP),
    _simulate("join: a reply is replayed twice", CATCHES_UP),
    _simulate("join: a piece is copied while a commit goes on", WHOLE),
    Mutation(
        "join: replies of an epoch are read by the roster of the one before, simulated",
        "crew/replies.py",
        "members[0].rule.start(layout, reply.roster)",
        "members[0].rule.start(layout, vars(self).setdefault('first', reply.roster))",
        (TWO_EPOCHS,),
    ),
    Mutation(
        "crew: a closer look takes bytes of an earlier epoch for those of this one, simulated",
        "wire/frame.py",
        '        ("epoch", like.epoch),\n',
        "",
        ("simulation/test_schedules.py::test_some_crews_keep_all_rules",),
    ),
    _simulate("join: a newcomer takes its donor's momentum", CATCHES_UP),
    _simulate("crew: a process whose main thread is dead sends heartbeats", MAIN_THREAD),
)
