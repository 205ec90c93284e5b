"""Bugs to plant in the protocol, each of which the simulation must find."""

from __future__ import annotations

from planted import Mutation

SIMULATION = ("simulation/test_schedules.py::test_some_schedules_keep_all_rules",)

PROTOCOL = (
    Mutation(
        "damaged bytes pass for what was sent, simulated",
        "wire/frame.py",
        'whole = intact.numpy() & (fields["status"]',
        'whole = (fields["status"]',
        SIMULATION,
    ),
    Mutation(
        "an exchange waits far beyond its timeout, simulated",
        "wire/gloo.py",
        "deadline_s = time.monotonic() + link.timeout_s",
        "deadline_s = time.monotonic() + 5 * link.timeout_s",
        SIMULATION,
    ),
    Mutation(
        "a worker that cannot connect ends before the others agree on the dead rank",
        "wire/watch.py",
        '            found = self.agree_on_failure("silent")\n',
        '            found = Finding("silent", (1,))\n',
        ("simulation/test_found.py",),
    ),
    Mutation(
        "a busy worker is waited for no longer than a silent one, simulated",
        "wire/roll_call.py",
        "self._deadline_s = max(self._deadline_s, until_s)",
        "pass",
        ("wire/test_roll_call.py", *SIMULATION),
    ),
    Mutation(
        "a worker that will not come is waited for as a busy one",
        "wire/finding.py",
        "answer.stray is not None or _is_gone(answer, optimizer) for",
        "False for",
        ("wire/test_roll_call.py",),
    ),
    Mutation(
        "where all wait, the limit begins anew with each roll call",
        "wire/roll_call.py",
        "min(asked_s - waited_s + self._limit_s, last_s)",
        "min(asked_s + self._limit_s, last_s)",
        ("wire/test_roll_call.py",),
    ),
    Mutation(
        "an answer to an earlier roll call counts for a later one",
        "wire/roll_call.py",
        "if number < own.number:",
        "if False:",
        ("wire/test_roll_call.py",),
    ),
    Mutation(
        "who loses the store forgets what all agreed on, simulated",
        "wire/watch.py",
        "may leave.\n            if self._finding is None:",
        "may leave.\n            if True:",
        SIMULATION,
    ),
    Mutation(
        "workers of the server commit what it refuses, simulated",
        "wire/parameter_server.py",
        "    header = with_verdict(header, counted.verdict)\n",
        "",
        SIMULATION,
    ),
    Mutation(
        "a worker leaves the exchange once it finds an error, simulated",
        "step/bucket.py",
        "        if faults.armed:\n            inputs.after_encode()\n",
        "        header = self.header\n"
        "        if header.status is Status.NON_FINITE and inputs.rank == header.culprit:\n"
        '            raise GradientChangedError("not finite", is_recoverable=True)\n'
        "        if faults.armed:\n            inputs.after_encode()\n",
        SIMULATION,
    ),
    Mutation(
        "the last bucket's verdict is not heard, simulated",
        "optim/distributed_lion.py",
        "inputs.header.step, judge(buckets)",
        "inputs.header.step, judge(buckets[:1])",
        SIMULATION,
    ),
    Mutation(
        "averaged momenta are committed whatever came back, simulated",
        "optim/distributed_lion.py",
        "worst_of([verdict, run_exchanges(session.stages, buckets, inputs.header)])",
        "worst_of([verdict, run_exchanges(session.stages, buckets, inputs.header)][:1])",
        SIMULATION,
    ),
    Mutation(
        "a dead optimizer goes on, simulated",
        "step/lifecycle.py",
        "self._cause_of_death = self._cause_of_death or cause",
        "pass",
        SIMULATION,
    ),
)
