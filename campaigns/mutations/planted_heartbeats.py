"""Bugs to plant in the heartbeats of crews."""

from __future__ import annotations

from planted import Mutation

SILENT = "crew/test_silent.py"
HEARD = ("wire/test_heartbeats.py",)

HEARTBEATS = (
    Mutation(
        "crew: a process whose main thread is dead sends heartbeats",
        "crew/lifeline.py",
        "if place is not None and self.is_led:",
        "if place is not None:",
        (f"{SILENT}::test_heartbeats_end_with_the_threads_that_may_train",),
    ),
    Mutation(
        "crew: a heartbeat of an earlier epoch counts",
        "crew/store.py",
        'return f"epoch {number}"',
        'return "epoch"',
        (f"{SILENT}::test_heartbeats_count_in_their_epoch_only",),
    ),
    Mutation(
        "crew: a worker sends heartbeats for an epoch that it has left",
        "crew/lifeline.py",
        "        self._place = None\n\n    @property",
        "        pass\n\n    @property",
        (f"{SILENT}::test_heartbeats_end_as_a_worker_leaves_its_epoch",),
    ),
    Mutation(
        "crew: one that computes for long is given up, whatever its heartbeats",
        "wire/heartbeats.py",
        "silent_s + passed_s if word == last else 0.0",
        "silent_s + passed_s",
        HEARD,
    ),
    Mutation(
        "crew: heartbeats come from steps alone, so that one that computes for long is given up",
        "crew/lifeline.py",
        "            pulse.send()\n",
        "",
        (f"{SILENT}::test_member_that_computes_for_long_keeps_its_place",),
    ),
    Mutation(
        "crew: one that was stopped itself takes the others for silent by their heartbeats",
        "wire/heartbeats.py",
        "min(now_s - self._looked_s, _LONGEST_LOOK_S)",
        "now_s - self._looked_s",
        HEARD,
    ),
    Mutation(
        "crew: all members listen to the heartbeats of the first ones",
        "wire/heartbeats.py",
        "(rank + place) % world_size",
        "place",
        HEARD,
    ),
    Mutation(
        "crew: one that waits does not listen to heartbeats",
        "wire/watch.py",
        "            is_alarmed = self._hears_silence()\n",
        "            pass\n",
        (f"{SILENT}::test_process_whose_main_thread_has_ended_is_given_up",),
    ),
    Mutation(
        "crew: one without heartbeats commits the step in which it was given up",
        "wire/watch.py",
        "patience_s = min(limit_s, self._heartbeats.silence_s)",
        "patience_s = limit_s",
        (f"{SILENT}::test_member_that_is_stopped_is_given_up_and_let_in_again",),
    ),
    Mutation(
        "crew: survivors go on, however few they are",
        "crew/membership.py",
        "    left = [member.id for member in before.members if member.id not in lost]\n",
        "    left = [member.id for member in before.members if member.id not in lost]\n"
        "    min_workers = 1\n",
        ("crew/test_losses.py::test_one_worker_never_trains_alone",),
    ),
)
