"""Bugs to plant in crews whose members have several processes."""

from __future__ import annotations

from planted import Mutation

MACHINES = "crew/test_machines.py"
LOST = (f"{MACHINES}::test_machine_that_loses_a_process_leaves_and_another_comes",)
LATE = (
    f"{MACHINES}::test_machine_commits_a_step_on_all_its_processes_although_another_one_is_lost",
)
WHOLE = (f"{MACHINES}::test_machines_of_a_crew_take_the_steps_of_whole_parameters",)

MACHINE_MUTATIONS = (
    Mutation(
        "machine: a process commits a step without asking the others of its machine",
        "optim/distributed_lion.py",
        "        verdict = session.meetings.share_verdict(verdict, inputs.header)\n",
        "",
        LOST,
    ),
    Mutation(
        "machine: process 1 takes the shard of process 0",
        "crew/lanes.py",
        "between=tuple(range(self.lane, size, self.number)),",
        "between=tuple(\n"
        "                sorted(\n"
        "                    each if each // self.number == epoch.place else each ^ 1\n"
        "                    for each in range(self.lane, size, self.number)\n"
        "                )\n"
        "            ),",
        WHOLE,
    ),
    Mutation(
        "machine: momenta are rounded as members change",
        "crew/optimizer.py",
        "            membership.enter(epoch, seconds=",
        "            for param in self._all_params():\n"
        "                if 'exp_avg' in (entry := self.state[param]):\n"
        "                    entry['exp_avg'].copy_(entry['exp_avg'].half())\n"
        "            membership.enter(epoch, seconds=",
        LATE,
    ),
    Mutation(
        "machine: a process enters the epoch that it was told of first",
        "crew/lanes.py",
        'return f"{self._n_found}/{what}"',
        "return what",
        LOST,
    ),
    Mutation(
        "machine: a process gives a step up although its own machine is whole",
        "wire/watch.py",
        "        if among is None or not self.alarmed.is_set():\n",
        "        if True:\n",
        LATE,
    ),
    Mutation(
        "machine: it stays although a process of it is lost",
        "crew/lanes.py",
        "        for lane in self._heartbeats.find_silent(others):\n",
        "        for lane in ():\n",
        ("crew/test_lanes.py",),
    ),
    Mutation(
        "machine: all its processes visit the same examples",
        "crew/sampler.py",
        "place = self._crew.rank * self._crew.n_lanes + self._crew.lane",
        "place = self._crew.rank",
        ("crew/test_lanes.py",),
    ),
    Mutation(
        "machine: processes at different steps go on",
        "crew/lanes.py",
        "        if any(each != told[0] for each in told):\n",
        "        if False:\n",
        ("crew/test_lanes.py",),
    ),
    Mutation(
        "machine: a process waits for ever for one that has left",
        "crew/lanes.py",
        "                self._check_others()\n",
        "                pass\n",
        ("crew/test_lanes.py",),
    ),
    Mutation(
        "machine: others are told nothing where no epoch is found",
        "crew/lanes.py",
        "            self._tell(reason)\n            raise\n",
        "            raise\n",
        ("crew/test_lanes.py",),
    ),
    Mutation(
        "machine: those that begin have different numbers of processes",
        "crew/membership.py",
        "if each.member.kind == first.kind\n        and",
        "if",
        ("crew/test_lanes.py",),
    ),
)
