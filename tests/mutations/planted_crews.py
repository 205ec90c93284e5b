"""Bugs to plant in how crews come together, each of which the simulation must find."""

from __future__ import annotations

from planted import Mutation

CREWS = ("simulation/test_schedules.py::test_some_crews_keep_all_rules",)
FOUND = ("simulation/test_found_in_crews.py",)

CREW_MUTATIONS = (
    Mutation(
        "crew: who is ahead by steps is first, whatever its epoch",
        "crew/epoch.py",
        "key=lambda member: (-member.epoch, -member.step, member.id)",
        "key=lambda member: (-member.step, member.id)",
        CREWS,
    ),
    Mutation(
        "crew: who is at the same step of an earlier epoch is not behind",
        "crew/member.py",
        "        return self.epoch, self.step\n",
        "        return bool(self.epoch), self.step\n",
        CREWS,
    ),
    Mutation(
        "crew: the last one to decide on the next epoch stands",
        "crew/epoch.py",
        'if before.store.compare_set(_DECISION, "", proposal).decode() == proposal:',
        "before.store.set(_DECISION, proposal)\n    if True:",
        FOUND,
    ),
    Mutation(
        "crew: the next epoch has the next number, whoever else has taken it",
        "crew/epoch.py",
        'decision = {"epoch": rendezvous.store.add(_EPOCHS, 1), "members": members}',
        'decision = {"epoch": before.number + 1, "members": members}',
        CREWS,
    ),
    Mutation(
        "crew: survivors go on, however few they are",
        "crew/epoch.py",
        "if own.id not in left or len(left) < min_workers:",
        "if own.id not in left:",
        CREWS,
    ),
    Mutation(
        "crew: who is a step behind keeps its parameters",
        "crew/optimizer.py",
        "taken = list(zip(own, new, strict=True)) if epoch.is_behind else []",
        "is_new = epoch.members[epoch.place].epoch == 0\n"
        "        taken = list(zip(own, new, strict=True)) if is_new else []",
        CREWS,
    ),
    Mutation(
        "crew: parameters are taken while the epoch may still fail",
        "crew/optimizer.py",
        "new = [param.clone() for param in own] if epoch.is_behind else own",
        "new = own",
        CREWS,
    ),
    Mutation(
        "crew: hyperparameters of an epoch that failed are kept",
        "crew/optimizer.py",
        "                group.update(values)\n            raise",
        "                pass\n            raise",
        CREWS,
    ),
    Mutation(
        "crew: a worker counts as whole before it is",
        "crew/optimizer.py",
        "        workers = connect(epoch,",
        "        self._whole_epoch = epoch.number\n        workers = connect(epoch,",
        CREWS,
    ),
    Mutation(
        "crew: the first one does not see that somebody is new",
        "crew/optimizer.py",
        "if epoch.has_newcomers and epoch.members[0].epoch and",
        "if epoch.place and epoch.has_newcomers and epoch.members[0].epoch and",
        CREWS,
    ),
    Mutation(
        "crew: who counts hears nothing of what votes have said",
        "crew/optimizer.py",
        "        session.routing.tell_counters(step=step)\n",
        "",
        CREWS,
    ),
    Mutation(
        "crew: a step that was committed is taken for one that was not",
        "crew/optimizer.py",
        "            if self.committed_step == before:\n                self.form(self._lost)",
        "            if True:\n                self.form(self._lost)",
        CREWS,
    ),
    Mutation(
        "crew: an epoch that could not be formed is decided on again",
        "crew/optimizer.py",
        "                    crew.sit_out(epoch, failures)\n                lost = None\n",
        "                    crew.sit_out(epoch, failures)\n",
        FOUND,
    ),
    Mutation(
        "crew: nobody leaves an epoch for a newcomer with the others",
        "crew/optimizer.py",
        "header = with_error(inputs.header, Status.EPOCH_OVER, culprit=inputs.rank)",
        "header = inputs.header",
        CREWS,
    ),
    Mutation(
        "crew: a first worker of a round that is lost ends all others",
        "crew/rendezvous.py",
        "except DistStoreError as error:",
        "except ZeroDivisionError as error:",
        FOUND,
    ),
    Mutation(
        "crew: who sits out holds the others up",
        "crew/crew.py",
        "                self._rendezvous.leave()\n                self._ended.wait(seconds)",
        "                self._ended.wait(seconds)",
        FOUND,
    ),
    Mutation(
        "crew: the end is waited for with those who are gone",
        "crew/crew.py",
        "elif now_s - heard[each][1] > limit_s:",
        "elif False:",
        FOUND,
    ),
    Mutation(
        "crew: who is one too many ends every epoch",
        "crew/lookout.py",
        "if self._rendezvous.count_places(len(epoch.members)) <= 0:",
        "if False:",
        FOUND,
    ),
    Mutation(
        "crew: who has left its epoch tells others that it trains",
        "crew/lookout.py",
        "        with self._changing:\n            self._epoch = None\n",
        "        pass\n",
        FOUND,
    ),
    Mutation(
        "crew: who asks is seen, and never let in",
        "crew/epoch.py",
        "asks = list_ready(rendezvous.store, settings)[: rendezvous.count_places(len(records))]",
        "asks = []",
        CREWS,
    ),
    Mutation(
        "crew: who has not decided answers too",
        "crew/epoch.py",
        'if before.store.compare_set(_DECISION, "", proposal).decode() == proposal:',
        'if before.store.compare_set(_DECISION, "", proposal):',
        CREWS,
    ),
    Mutation(
        "crew: others begin an epoch without some, which train on by themselves",
        "crew/lookout.py",
        "self._is_left_behind |= is_left_behind",
        "pass",
        ("crew/test_newcomers.py",),
    ),
    Mutation(
        "crew: strangers are let in",
        "crew/lookout.py",
        "answer(store, [ask for ask in asks if ask.member.settings != own.settings], {})",
        "",
        ("crew/test_newcomers.py",),
    ),
    Mutation(
        "crew: bytes that were damaged end the worker that finds them",
        "crew/optimizer.py",
        "except (*_LOST, CorruptFrameError) as error:",
        "except _LOST as error:",
        CREWS,
    ),
)
