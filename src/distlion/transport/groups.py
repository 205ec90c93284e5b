"""Process groups: those of torch that a user makes, and Gloo groups of our own."""

from __future__ import annotations

import ctypes
import os
import re
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from distlion.errors import ProcessGroupError

HOST = torch.device("cpu")


def carries_host_memory(process_group: dist.ProcessGroup) -> bool:
    """Return whether a group carries tensors of the CPU; one made for NCCL alone does not."""
    backends = f"{HOST.type}:gloo"  # what torch does not know is a Gloo group of ours
    if isinstance(process_group, dist.ProcessGroup):
        backends = str(dist.get_backend_config(process_group))
    return any(backend.startswith(f"{HOST.type}:") for backend in backends.split(","))


def tidy(error: Exception) -> str:
    """Say what torch says of an error: a sentence, without the source path that Gloo opens with."""
    sentence = str(error).split("\n")[0].split(". ")[0]
    return re.sub(r"\[[^\[\]]*\.(cc|cpp|h|hpp):\d+\]\s*", "", sentence)


_kept: dict[object, float] = {}
"""Groups that nobody else may need, and since when."""


def outlive_interpreter(container: object) -> None:
    """Never destroy a container, nor what it holds: an interpreter ends without waiting for it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(container))


outlive_interpreter(_kept)


def keep(process_group: object) -> None:
    """Keep a group that failed: its destructor waits for peers that may be silent.

    Gloo cannot abort a collective, so that an interpreter would not come to its end.
    """
    _kept.setdefault(process_group, time.monotonic())


def take_kept(*, since_s: float) -> list[object]:
    """Stop keeping the groups that failed longer ago than this; return them."""
    before = time.monotonic() - since_s
    groups = [group for group, kept_s in _kept.copy().items() if kept_s < before]
    for group in groups:
        _kept.pop(group, None)
    return groups


def store_of(process_group: dist.ProcessGroup) -> Any:
    """Return the store through which a group met; of one that outlives workers, this start's part.

    torchrun's agent keeps one store through all restarts, and in it the alarms, turns and addresses
    of workers that are gone.
    """
    if process_group in _stores:
        return _stores[process_group]
    # Public since torch 2.13 or so; the older way is private, and the same.
    if hasattr(process_group, "get_group_store"):
        store = process_group.get_group_store()
    else:
        store = dist.distributed_c10d._get_process_group_store(process_group)
    start = find_start()
    return store if start is None else PrefixStore(f"start {start}", store)


def find_start() -> str | None:
    """Return which start of torchrun this is, where its agents keep one store through all of them.

    Where they do not, a host that has come later counts its starts from 0, unlike the others.
    """
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT") if is_kept else None


def keep_store(process_group: dist.ProcessGroup, store: Any) -> None:
    """Let this be the store of a group, whichever start of torchrun its members are at."""
    _stores[process_group] = store


def drop_store(process_group: dist.ProcessGroup) -> None:
    """Forget the store of a group that is given up."""
    _stores.pop(process_group, None)


def own_group(
    process_group: dist.ProcessGroup,
    *,
    name: str,
    timeout_s: float,
    connect_timeout_s: float | None = None,
    ranks: Sequence[int] | None = None,
) -> dist.ProcessGroup:
    """Make a Gloo group of workers of another group; all of them must call it.

    It has the methods of any group, and ends when it is let go of. ``dist.new_group`` does not make
    it: that one names groups of some ranks by how many groups a process is in, which may differ
    between ranks, all the more with ours among them; they would wait for each other in vain.

    Args:
        process_group: Where the workers are from.
        name: Of the group, unlike that of any other made of ``process_group``.
        timeout_s: The longest that an operation on it may take.
        connect_timeout_s: For making it; None: as long.
        ranks: Of its members in ``process_group``, this process among them; None for all.

    Raises:
        ProcessGroupError: Some worker did not come to make it.
    """
    members = range(process_group.size()) if ranks is None else ranks
    store = PrefixStore(f"distlion/{name}", store_of(process_group))
    rank, timeout = members.index(process_group.rank()), timedelta(seconds=timeout_s)
    connect_s = timeout_s if connect_timeout_s is None else connect_timeout_s
    try:
        gloo = ProcessGroupGloo(store, rank, len(members), timedelta(seconds=connect_s))
    except RuntimeError as error:
        raise ProcessGroupError(
            f"no connections between ranks {', '.join(map(str, members))} came about within "
            f"{connect_s:g} s ({tidy(error)}); is each of them still running, and can it reach "
            "the others?"
        ) from error
    gloo._set_default_timeout(timeout)
    group = cast(dist.ProcessGroup, gloo)
    _stores[group] = store
    _limits_s[group] = timeout_s
    return group


_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()
"""The store of each group of our own, which torch does not know, and of those of a crew."""


def pair_group(
    process_group: dist.ProcessGroup, peer: int, *, timeout_s: float
) -> dist.ProcessGroup:
    """Return the Gloo group of this process and one other of a group; both make it the first time.

    Args:
        process_group: Where both are from.
        peer: The other's rank in it.
        timeout_s: For making it; operations on it may take as long as those of ``process_group``.

    Raises:
        ProcessGroupError: The other did not come to make it.
    """
    pairs = _pairs.setdefault(process_group, {})
    if peer not in pairs:
        ranks = sorted((process_group.rank(), peer))
        name = f"pair {ranks[0]} {ranks[1]}"
        limit_s = _limits_s.get(process_group, timeout_s)
        pairs[peer] = own_group(
            process_group, name=name, timeout_s=limit_s, connect_timeout_s=timeout_s, ranks=ranks
        )
    return pairs[peer]


def list_pairs(process_group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """List the groups of two that this process has made of a group."""
    return list(_pairs.get(process_group, {}).values())


_limits_s: weakref.WeakKeyDictionary[dist.ProcessGroup, float] = weakref.WeakKeyDictionary()
"""The longest that an operation may take on each group of our own."""

_pairs: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""The groups of two made of each group, by the rank of the other process."""


def _keep_all() -> None:
    """In a fork: never end a group, whose threads are in the other process."""
    for group in list(_stores):
        outlive_interpreter(group)


os.register_at_fork(after_in_child=_keep_all)
