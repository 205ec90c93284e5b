"""Bugs of small transfers that travel together."""

from __future__ import annotations

from planted import Mutation

SHARING = ("wire/test_sharing.py",)

TOGETHER = (
    Mutation(
        "sharing: rows of a later transfer are those of the first",
        "wire/sharing.py",
        "                at += out.shape[1]\n",
        "",
        SHARING,
    ),
    Mutation(
        "sharing: buckets that travel together get each other's rows",
        "wire/sharing.py",
        "            for out, _ in self._parts:\n",
        "            for out, _ in reversed(self._parts):\n",
        SHARING,
    ),
    Mutation(
        "sharing: a transfer joins one that has left",
        "wire/gloo.py",
        "if shared is None or not shared.is_held:",
        "if shared is None:",
        SHARING,
    ),
    Mutation(
        "sharing: during backward votes wait for the step",
        "step/overlap.py",
        "Pipeline[Bucket](at_once=True)",
        "Pipeline[Bucket]()",
        SHARING,
    ),
    Mutation(
        "sharing: an exchange whose transfer is held waits at once",
        "step/bucket.py",
        "            if not self._is_held(each):\n",
        "            if each is not None:\n",
        SHARING,
    ),
    Mutation(
        "sharing: a message is waited for, and received, twice",
        "wire/sharing.py",
        "        if self._has_ended:\n            return\n",
        "",
        SHARING,
    ),
    Mutation(
        "sharing: ranks of one worker hold transfers of different sizes",
        "peers/connections.py",
        "shares = shares and self._inside is None",
        "shares = True",
        ("distributed/test_node_parts.py",),
    ),
)
