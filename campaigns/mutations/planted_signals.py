"""Bugs to plant in what waits for signals, and in what tells others of them."""

from __future__ import annotations

from planted import Mutation

UNIT = ("test_signals.py",)
STEPS = ("distributed/test_interrupts.py",)
STARTS = ("lab/training/test_interrupted_starts.py",)

SIGNALS = (
    Mutation(
        "signals: Ctrl-C cuts a step",
        "step/lifecycle.py",
        "deferred_signals(what) if self.is_ready else",
        "deferred_signals(what) if False else",
        STEPS,
    ),
    Mutation(
        "signals: overlap hears none that comes to another thread",
        "step/overlap.py",
        "            future.exception(LISTEN_S)\n",
        "            future.exception()\n",
        (f"{STEPS[0]}::test_an_interrupted_step_is_committed_by_all_and_the_others_hear_who_left",),
    ),
    Mutation(
        "signals: construction waits for its end",
        "step/lifecycle.py",
        "deferred_signals(what) if self.is_ready else",
        "deferred_signals(what) if True else",
        (f"{STEPS[0]}::test_an_interrupt_ends_construction_at_once_and_for_all",),
    ),
    Mutation(
        "signals: an interrupted worker goes on",
        "step/lifecycle.py",
        "if signals.error is not None and not self._ranks.is_alone:",
        "if False:",
        STEPS,
    ),
    Mutation(
        "signals: whoever leaves aborts the step that others are at",
        "wire/watch.py",
        'left["turn"] <= self.turns.now.number',
        "True",
        ("wire/test_store.py",),
    ),
    Mutation(
        "signals: a worker whose own error ends it tells nobody",
        "step/lifecycle.py",
        "if is_own and not self._watch.has_settled:",
        "if False:",
        ("distributed/test_fail_stop_alive.py",),
    ),
    Mutation(
        "signals: nobody looks who has left before connections are made",
        "peers/session.py",
        "            link.check_present(step=step)\n",
        "",
        (f"{STEPS[0]}::test_an_interrupt_ends_construction_at_once_and_for_all",),
    ),
    Mutation(
        "signals: a second one waits too", "signals.py", "self._gives_way and", "False and", UNIT
    ),
    Mutation(
        "signals: a handler that was replaced comes back",
        "signals.py",
        "if signal.getsignal(number) is keeping:",
        "if True:",
        UNIT,
    ),
    Mutation(
        "signals: the start of a process is cut short",
        "lab/training/processes.py",
        '@deferred_signals("the start of a process", gives_way=False)\n',
        "",
        STARTS,
    ),
    Mutation(
        "signals: the end of processes is cut short",
        "lab/training/processes.py",
        '@deferred_signals("the end of processes", gives_way=False)\n',
        "",
        STARTS,
    ),
    Mutation(
        "signals: a closed terminal ends no worker",
        "lab/training/processes.py",
        '("SIGTERM", "SIGHUP")',
        '("SIGTERM",)',
        STARTS,
    ),
)
