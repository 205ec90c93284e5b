"""Bugs of the network lab's congestion control: what hosts use, and what the machine keeps."""

from __future__ import annotations

from planted import Mutation

HOSTS = ("netlab/test_congestion.py",)

CONGESTION = (
    Mutation(
        "congestion: hosts inherit the machine's",
        "netlab/lab.py",
        "            set_congestion_control(plan.host_namespaces, congestion_control)\n",
        "",
        HOSTS,
    ),
    Mutation(
        "congestion: all processes of the machine stay allowed",
        "netlab/congestion.py",
        "            _ALLOWED.write_text(before)\n",
        "            pass\n",
        HOSTS,
    ),
    Mutation(
        "congestion: an unknown name is ignored",
        "netlab/congestion.py",
        "    if _read() != name:\n",
        "    if False:\n",
        HOSTS,
    ),
    Mutation(
        "congestion: the first of several lines is taken",
        "netlab/congestion.py",
        "if name.isidentifier():",
        "if True:",
        HOSTS,
    ),
    Mutation(
        "congestion: a chosen one is replaced",
        "netlab/congestion.py",
        "    if name is not None:\n        _set(namespaces, name)\n        return\n",
        "",
        HOSTS,
    ),
    Mutation(
        "congestion: a sweep does without its setting",
        "netlab/sweep.py",
        "            congestion_control=settings.congestion_control,\n",
        "",
        HOSTS,
    ),
)
