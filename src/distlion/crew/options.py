"""The options that a crew's optimizer refuses, and the limits that it sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distlion.crew.lane_shards import check_lane_options
from distlion.crew.lanes import Lanes, OneLane
from distlion.crew.membership import Membership
from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.step.arguments import check_record
from distlion.step.param import is_dtensor
from distlion.step.timeouts import Timeouts

REFUSED = {
    "process_group": "the crew makes a process group for each epoch",
    "nodes": "a node comes and goes as a whole, as a member of several processes: pass "
    "Crew(member=...) in its place",
    "momentum_sync": "the momenta that are averaged would change with the members",
}
FORMING_S = 30.0
"""``Timeouts.init_s`` of a crew: for each collective that forms an epoch, and so for the wait for a
silent member."""


def check_options(options: Mapping[str, Any], lanes: OneLane) -> None:
    """Refuse options that no crew can have, or not one of such members.

    Raises:
        InvalidArgumentError: There is one; or torch has a group, and this member is one process.
    """
    for name, reason in REFUSED.items():
        if options.get(name) is not None:
            raise InvalidArgumentError(f"{name}= cannot be used in a crew: {reason}")
    if isinstance(lanes, Lanes):
        check_lane_options(options)
    elif dist.is_initialized():
        raise InvalidArgumentError(
            "there is a process group, and the crew makes one for each epoch; leave "
            "init_process_group() out, or pass Crew(member=...) if its processes are one member"
        )


def check_whole(params: Iterable[Tensor]) -> None:
    """Refuse shards for a member of one process.

    Raises:
        UnsupportedTypeError: A parameter is a DTensor.
    """
    if any(is_dtensor(param) for param in params):
        raise UnsupportedTypeError(
            "the parameters are DTensors, and this member is one process, which holds whole "
            "parameters; pass Crew(member=mesh) for a member of several"
        )


def list_buffers(buffers: Iterable[Tensor]) -> list[Tensor]:
    """List the buffers that a newcomer takes.

    Raises:
        UnsupportedTypeError: One is not a tensor.
    """
    listed = list(buffers)
    for each in listed:
        if not isinstance(each, Tensor):
            raise UnsupportedTypeError(
                f"buffers has a {type(each).__name__}: expected tensors, such as model.buffers()"
            )
    return listed


def limit_forming(timeouts: Timeouts) -> Timeouts:
    """Return limits with one for what forms an epoch."""
    check_record("timeouts", timeouts, Timeouts)
    return timeouts if timeouts.init_s is not None else replace(timeouts, init_s=FORMING_S)


def list_lines(
    membership: Membership, groups: Sequence[Mapping[str, Any]], buffers: Sequence[Tensor]
) -> list[str]:
    """List what members must share beside settings: processes, rules, and shapes of buffers."""
    lines = [f"newcomers: {membership.newcomers}", membership.lanes.describe()]
    lines += [f"rule of group {n}: {group['aggregation']!r}" for n, group in enumerate(groups)]
    return lines + [f"buffer {n}: {tuple(t.shape)}, {t.dtype}" for n, t in enumerate(buffers)]
