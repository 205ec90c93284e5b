"""Process groups: a user's groups of torch, and distlion's own Gloo groups."""

from __future__ import annotations

import ctypes
import os
import re
import time
import weakref
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from distlion.errors import ProcessGroupError
from distlion.wire.sockets import SocketGroup

HOST = torch.device("cpu")


def carries_host_memory(process_group: dist.ProcessGroup) -> bool:
    """Return whether a group carries CPU tensors; one made for NCCL alone does not."""
    backends = f"{HOST.type}:gloo"  # a group that torch does not know is one of distlion's
    if isinstance(process_group, dist.ProcessGroup):
        backends = str(dist.get_backend_config(process_group))
    return any(backend.startswith(f"{HOST.type}:") for backend in backends.split(","))


def tidy(error: Exception) -> str:
    """Return torch's message of an error as a sentence, without Gloo's leading source path."""
    sentence = str(error).split("\n")[0].split(". ")[0]
    return re.sub(r"\[[^\[\]]*\.(cc|cpp|h|hpp):\d+\]\s*", "", sentence)


_kept: dict[object, float] = {}
"""Groups that may have no other user, and the times since when."""


def outlive_interpreter(container: object) -> None:
    """Never destroy a container or its items, so that the interpreter exits without a wait."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(container))


outlive_interpreter(_kept)


def keep(process_group: object) -> None:
    """Keep a group that failed: its destructor waits for peers that may be silent.

    Gloo cannot abort a collective, so that the interpreter would not exit.
    """
    _kept.setdefault(process_group, time.monotonic())


def take_kept(*, since_s: float, unless: Collection[object] = ()) -> list[object]:
    """Stop keeping the groups that failed longer ago than this, but for some; return them."""
    before = time.monotonic() - since_s
    old = [group for group, kept_s in _kept.copy().items() if kept_s < before]
    groups = [group for group in old if not any(group is each for each in unless)]
    for group in groups:
        _kept.pop(group, None)
    return groups


def store_of(process_group: dist.ProcessGroup) -> Any:
    """Return the store through which a group met, or this start's part of a longer-lived store.

    torchrun's agent keeps one store through all restarts, with the alarms, turns and addresses of
    workers that are gone.
    """
    if process_group in _stores:
        return _stores[process_group]
    # Public since about torch 2.13; the older way is private and gives the same.
    if hasattr(process_group, "get_group_store"):
        store = process_group.get_group_store()
    else:
        store = dist.distributed_c10d._get_process_group_store(process_group)
    start = find_start()
    return store if start is None else PrefixStore(f"start {start}", store)


def find_start() -> str | None:
    """Return the number of torchrun's start, if its agents keep one store through all starts.

    Otherwise a host that came later counts its starts from 0, unlike the others.
    """
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT") if is_kept else None


def find_limit(process_group: dist.ProcessGroup) -> float:
    """Return the seconds that an operation on host memory may take on a group."""
    if process_group in _limits_s:
        return _limits_s[process_group]
    backend: Any = process_group._get_backend(HOST)
    limit_s: float = backend.options._timeout.total_seconds()
    return limit_s


def keep_store(process_group: dist.ProcessGroup, store: Any) -> None:
    """Set a group's store, regardless of its members' starts of torchrun."""
    _stores[process_group] = store


def drop_store(process_group: dist.ProcessGroup) -> None:
    """Forget the store of an abandoned group."""
    _stores.pop(process_group, None)
    _apart.discard(process_group)


def own_group(
    process_group: dist.ProcessGroup,
    *,
    name: str,
    timeout_s: float,
    connect_timeout_s: float | None = None,
    ranks: Sequence[int] | None = None,
    wire: str = "gloo",
) -> dist.ProcessGroup:
    """Make a group of workers of another group; all of them must call it.

    It has the methods of any group, and ends when it is freed. ``dist.new_group`` is no
    alternative, as it names groups by the number of groups a process is in. That number may differ
    between ranks, and more so with these groups, so that they would wait for each other in vain.

    Args:
        process_group: The group of the workers.
        name: Name of the new group, unique among groups made of ``process_group``.
        timeout_s: Limit of an operation on it.
        connect_timeout_s: Seconds to make it; None for ``timeout_s``.
        ranks: Ranks of its members in ``process_group``, including this one; None for all.
        wire: "gloo", or "tcp" for a ``SocketGroup``.

    Raises:
        ProcessGroupError: Some worker did not take part.
    """
    members = range(process_group.size()) if ranks is None else ranks
    store = PrefixStore(f"distlion/{name}", store_of(process_group))
    connect_s = timeout_s if connect_timeout_s is None else connect_timeout_s
    rank = members.index(process_group.rank())
    return _connect(store, rank, members, timeout_s=timeout_s, connect_s=connect_s, wire=wire)


def group_apart(
    store: Any, rank: int, size: int, *, timeout_s: float, connect_timeout_s: float
) -> dist.ProcessGroup:
    """Make a Gloo group beside torch's groups, of processes that torch has no group of.

    It counts as registered until ``drop_store``.

    Args:
        store: The store of this group alone.
        rank: This process's rank in it.
        size: Number of its members.
        timeout_s: Limit of an operation on it.
        connect_timeout_s: Seconds to make it.

    Raises:
        ProcessGroupError: Some process did not take part.
    """
    group = _connect(store, rank, range(size), timeout_s=timeout_s, connect_s=connect_timeout_s)
    _apart.add(group)
    return group


def is_apart(process_group: object) -> bool:
    """Return whether a group was made by ``group_apart``, and not dropped since."""
    return process_group in _apart


def stand_in(owner: object, process_group: dist.ProcessGroup | None) -> None:
    """Let a group stand for all workers of a run, in place of torch's default group.

    Args:
        owner: Who makes such groups; it counts as long as it lives.
        process_group: The group; None while there is none.
    """
    _stand_ins[owner] = None if process_group is None else weakref.ref(process_group)


def has_stand_in() -> bool:
    """Return whether torch's default group has only some of the run's workers."""
    return bool(_stand_ins)


def find_stand_in() -> dist.ProcessGroup | None:
    """Return the group that stands for all workers; None while there is none."""
    groups = [each() for each in list(_stand_ins.values()) if each is not None]
    return next((each for each in groups if each is not None), None)


def _connect(
    store: Any,
    rank: int,
    members: Sequence[int],
    *,
    timeout_s: float,
    connect_s: float,
    wire: str = "gloo",
) -> dist.ProcessGroup:
    made: Any
    try:
        if wire == "tcp":
            made = SocketGroup(store, rank, len(members), timeout_s=connect_s, names=members)
        else:
            made = ProcessGroupGloo(store, rank, len(members), timedelta(seconds=connect_s))
            made._set_default_timeout(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise ProcessGroupError(
            f"ranks {', '.join(map(str, members))} did not connect within "
            f"{connect_s:g} s ({tidy(error)}); is each of them still running, and can it reach "
            "the others?"
        ) from None
    group = cast(dist.ProcessGroup, made)
    _stores[group] = store
    _limits_s[group] = timeout_s
    return group


_apart: weakref.WeakSet[Any] = weakref.WeakSet()
_stand_ins: weakref.WeakKeyDictionary[object, weakref.ref[dist.ProcessGroup] | None] = (
    weakref.WeakKeyDictionary()
)


_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()
"""The store of each of distlion's own groups, which torch does not know, and of crews' groups."""


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
    """Keep all groups in a fork, as their threads are in the other process."""
    for group in list(_stores):
        outlive_interpreter(group)


os.register_at_fork(after_in_child=_keep_all)
