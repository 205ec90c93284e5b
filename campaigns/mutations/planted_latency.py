"""Bugs of the network lab's latency: when frames leave, where they go, which process is left."""

from __future__ import annotations

from planted import Mutation

LAB = ("netlab/test_latency.py",)

LATENCY = (
    Mutation(
        "latency: frames leave at once",
        "netlab/forward.py",
        "due = time.monotonic() + self._latency_s",
        "due = time.monotonic()",
        LAB,
    ),
    Mutation(
        "latency: every frame goes everywhere",
        "netlab/forward.py",
        "known = self._behind.get(target)",
        "known = None",
        LAB,
    ),
    Mutation(
        "latency: the bridge forwards too",
        "netlab/lab.py",
        "self._wires.build(joins=not latency_s)",
        "self._wires.build()",
        LAB,
    ),
    Mutation(
        "latency: the process outlives its lab",
        "netlab/lab.py",
        "            stop_switch(state.plan)\n",
        "            pass\n",
        LAB,
    ),
    Mutation(
        "latency: the process outlives its owner",
        "netlab/forward.py",
        "for number in [*self._ports, *([] if owner is None else [owner])]:",
        "for number in self._ports:",
        LAB,
    ),
    Mutation(
        "latency: a lab without its process is used",
        "netlab/lab.py",
        "if state.latency_s and not find_switch(state.plan):",
        "if False:",
        LAB,
    ),
    Mutation(
        "latency: twice of it passes",
        "netlab/forward.py",
        "due = time.monotonic() + self._latency_s",
        "due = time.monotonic() + 2 * self._latency_s",
        LAB,
    ),
)
