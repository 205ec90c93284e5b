"""Bugs to plant in how a worker of a crew ends: by an error, or because it has finished."""

from __future__ import annotations

from planted import Mutation

LEFT = ("crew/test_left.py",)

ENDINGS = (
    Mutation(
        "crew: a worker leaves without a word, and its connections stay open",
        "crew/optimizer.py",
        "            self._watch.leave(self._watch.turns.now.number + 1, why)\n",
        "            pass\n",
        LEFT,
    ),
    Mutation(
        "crew: who has finished does not tell those who train on",
        "crew/crew.py",
        "                optimizer.announce_end(why)\n",
        "                pass\n",
        LEFT,
    ),
    Mutation(
        "crew: who has finished asks those who train on to be let in",
        "crew/crew.py",
        "if optimizer.is_left_out():",
        "if False:",
        LEFT,
    ),
    Mutation(
        "crew: the process group of an optimizer that was freed stays behind",
        "crew/crew.py",
        "            membership.lanes.disconnect(membership.lanes.alone, has_failed=False)\n",
        "            pass\n",
        LEFT,
    ),
    Mutation(
        "crew: a worker that cannot finish keeps its connections",
        "crew/crew.py",
        "        finally:\n            self._leave(error)\n",
        "        else:\n            self._leave(error)\n",
        LEFT,
    ),
    Mutation(
        "crew: who has finished ends with an error where the store was stopped",
        "crew/crew.py",
        "if not was_away and not isinstance(error, DistStoreError):",
        "if not was_away:",
        (
            "simulation/test_found_in_crews.py"
            "::test_a_worker_that_has_finished_outlasts_a_store_that_is_stopped",
        ),
    ),
)
