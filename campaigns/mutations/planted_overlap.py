"""Bugs of overlap, of what it notices, and of the messages that it ends with."""

from __future__ import annotations

from planted import Mutation

CHANGED = ("distributed/test_changed_gradients.py",)
FOUND = "fuzz/test_fuzz.py::test_a_program_that_found_something_ends_as_it_must"
PAUSES = ("distributed/test_pauses.py",)
GROUPS = ("distributed/test_two_groups.py",)
ARRIVALS = "step/arrivals.py"
OVERLAP_FILE = "step/overlap.py"

OVERLAP = (
    Mutation(
        "a gradient is sampled where it is a shard only",
        ARRIVALS,
        "        self._samples[position] = self._draw(local)\n        if param.is_sharded:\n",
        "        if param.is_sharded:\n            self._samples[position] = self._draw(local)\n",
        CHANGED,
    ),
    Mutation(
        "all samples of a gradient are in one column",
        ARRIVALS,
        "begins + within.long()",
        "begins",
        ("step/test_arrivals.py",),
    ),
    Mutation(
        "what samples show is not said",
        "step/overlap.py",
        "changed = [*seen, *sampled.list_changed(flags)]",
        "changed = seen",
        CHANGED,
    ),
    Mutation(
        "samples are compared as numbers, so that a NaN is a change",
        ARRIVALS,
        "before.view(torch.uint8) != now.view(torch.uint8)",
        "before != now",
        CHANGED,
    ),
    Mutation(
        "a pause ends with one that is inside of it",
        OVERLAP_FILE,
        "self._paused = before",
        "self._paused = False",
        (*PAUSES, f"{FOUND}[no_sync within no_sync]"),
    ),
    Mutation(
        "a pause ends with new buckets",
        OVERLAP_FILE,
        "        self._buckets, self._waits = buckets, waits\n",
        "        self._buckets, self._waits, self._paused = buckets, waits, False\n",
        PAUSES,
    ),
    Mutation(
        "drafts of estimates are held until the next step",
        "votes/bucket_vote.py",
        "self._move_own = self._move_counted = None",
        "pass",
        ("distributed/test_estimates.py",),
    ),
    Mutation(
        "who waits on another group of the same ranks is late",
        "wire/finding.py",
        "    if strays and waiting and not silent:\n",
        "    if False:\n",
        GROUPS,
    ),
    Mutation(
        "who waits on another group of the same ranks is not told",
        "wire/watch.py",
        "            twin._take_over(found)",
        "            pass",
        GROUPS,
    ),
    Mutation(
        "a group that failed long ago explains why a worker is late",
        "wire/watch.py",
        "twin._settled_s > self._entered_s[1]",
        "twin.has_settled",
        GROUPS,
    ),
    Mutation(
        "what one rank lacks is told with its key",
        "wire/ask.py",
        "values = [one.get(key) for one in said]",
        'values = [one.get(key, f"no {key}") for one in said]',
        ("peers/test_messages.py",),
    ),
    Mutation(
        "a step that is refused forgets the votes that have left",
        "optim/distributed_lion.py",
        "            session.fingerprint.passing = ()\n",
        "            [bucket.clear() for bucket in session.routing.buckets]\n",
        ("distributed/test_overlap.py",),
    ),
)
