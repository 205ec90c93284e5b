"""Replicas: made equal by a broadcast, compared by digests."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from distlion.errors import (
    ConfigMismatchError,
    CorruptFrameError,
    ReplicaMismatchError,
    StepError,
)
from distlion.exchange import minority
from distlion.failures import name_ranks
from distlion.kernels import choose_kernels
from distlion.options import Settings
from distlion.session.connections import Connections
from distlion.session.routing import Routing
from distlion.step import Ranks, VotingParam, local_tensor
from distlion.transport import Transport, gather_bytes

logger = logging.getLogger("distlion")

NAMED_DIFFERENCES = 5
FINDING_BYTES = 1024
"""Bytes of a finding that travel to those who hold other shards."""


class Replicas:
    """The parameters that all workers hold, equal to the last bit.

    Args:
        ranks: All ranks of the optimizer.
        settings: The optimizer's.
        connections: Its process groups.
        routing: Its routes: counters may have to be told anew.

    Attributes:
        are_compared: Whether they have been found equal since they were last loaded.
    """

    def __init__(
        self, ranks: Ranks, settings: Settings, connections: Connections, routing: Routing
    ) -> None:
        self._connections, self._routing = connections, routing
        self._settings, self._is_sharded = settings, ranks.is_sharded
        self.are_compared = False

    def take_over(
        self, params: Sequence[VotingParam], everything: Sequence[Tensor], *, step: int
    ) -> None:
        """Overwrite parameters with those of the group's first rank.

        Args:
            params: All trainable parameters, in an order to be compared with that of others.
            everything: What is overwritten.
            step: The step that errors name.

        Raises:
            ConfigMismatchError: Some workers have the same values in another order.
        """
        timeout_s, link_of = self._settings.init_timeout_s, self._connections.link_replicas
        with self._as_one(timeout_s, step=step):
            compare_order(link_of(timeout_s), params, step=step)
        self.are_compared = False
        broadcast_params(link_of(timeout_s), everything, step=step)

    def compare(self, params: Sequence[VotingParam], *, step: int) -> int:
        """Compare digests of all parameters, and perhaps repair; return the bytes sent for it.

        Momenta are never compared: they differ by design.

        Raises:
            ReplicaMismatchError: They differ; on every rank.
        """
        timeout_s = self._settings.step_timeout_s
        link = self._connections.link_replicas(timeout_s)
        was_repaired = False
        with self._as_one(timeout_s, step=step):
            was_repaired = verify_replicas(link, params, self._settings.on_divergence, step=step)
        # What counters keep may be why they differed. Of shards, some ranks have repaired none.
        if was_repaired and not self._is_sharded:
            self._routing.tell_counters(step=step)
        self.are_compared = True
        return link.counted.sent_bytes

    @contextmanager
    def _as_one(self, timeout_s: float, *, step: int) -> Iterator[None]:
        """Let an error that only those find who hold the same shards be raised on all ranks."""
        if not self._is_sharded:
            yield
            return
        found: StepError | None = None
        try:
            yield
        except (ReplicaMismatchError, ConfigMismatchError, CorruptFrameError) as error:
            found = error
        share_finding(self._connections.link_all(timeout_s), found, step=step)


def broadcast_params(link: Transport, params: Sequence[Tensor], *, step: int) -> None:
    """Overwrite parameters with those of the group's first rank."""
    for param in params:
        own = local_tensor(param).detach()
        if own.numel():
            row = own.contiguous().to(link.wire_device)
            link.broadcast(row.view(-1).view(torch.uint8), step=step).wait()
            if row.data_ptr() != own.data_ptr():
                own.copy_(row)


def digest_params(params: Sequence[VotingParam]) -> Tensor:
    """Digest each parameter: (n_params,) int64 on the CPU, read once from each device."""
    digests = torch.empty(len(params), dtype=torch.int64)
    for device in {param.device for param in params}:
        placed = [param for param in params if param.device == device]
        rows = choose_kernels(device).digests([param.local() for param in placed])
        digests[[param.position for param in placed]] = rows.cpu()
    return digests


def compare_order(link: Transport, params: Sequence[VotingParam], *, step: int) -> None:
    """Compare the order of parameters by their values, before these are overwritten.

    Workers whose seeds are equal have equal values. Where one has them in another order, its
    parameters are swapped, which names alone may not show. Where seeds differ, or the values of the
    parameters that were swapped are alike, nothing can be found out.

    Raises:
        ConfigMismatchError: On every rank; names the first parameter, and the ranks.
    """
    rows = [tuple(row) for row in _gather_digests(link, params, step=step).tolist()]
    first = rows[0]
    alike = [rank for rank, row in enumerate(rows) if sorted(row) == sorted(first)]
    others = [rank for rank in alike if rows[rank] != first]
    if not others:
        return
    there = rows[others[0]]
    where = name_ranks([link.ranks[member] for member in others])
    index = next(index for index, digest in enumerate(first) if there[index] != digest)
    culprits = tuple(link.ranks[member] for member in minority(rows))
    raise ConfigMismatchError(
        f"workers have the same parameters in different orders: what is {params[index].name} on "
        f"rank {link.ranks[0]} is {params[there.index(first[index])].name} on {where}; give every "
        "worker the same order, and names, as in model.named_parameters(), which are compared",
        rank=link.ranks[link.rank],
        step=step,
        culprits=culprits,
    )


def _gather_digests(link: Transport, params: Sequence[VotingParam], *, step: int) -> Tensor:
    """Gather digests, each rank's with a checksum: (ranks, n_params) int64 on the CPU.

    Damage on the way to one rank would look to that rank alone like replicas that differ, after
    which all could go on: it would retry a step that the others have left.
    """
    digests = digest_params(params)
    own = torch.cat([digests, digests.new_tensor([_checksum(digests)])])
    everybody = own.new_empty(link.n_members, own.numel())
    link.all_gather(everybody, own, step=step).wait()
    damaged = [
        link.ranks[member] for member, row in enumerate(everybody) if _checksum(row[:-1]) != row[-1]
    ]
    if damaged:
        raise CorruptFrameError(
            f"digests of parameters from {name_ranks(damaged)} were damaged on the way",
            rank=link.ranks[link.rank],
            step=step,
            culprits=tuple(damaged),
        )
    return everybody[:, :-1]


def _checksum(digests: Tensor) -> int:
    return zlib.crc32(digests.numpy().tobytes())


def verify_replicas(
    link: Transport,
    params: Sequence[VotingParam],
    on_divergence: Literal["raise", "repair"] = "raise",
    *,
    step: int,
) -> bool:
    """Compare digests of the parameters' bits; return whether some were repaired.

    Args:
        link: Between all workers.
        params: The trainable parameters.
        on_divergence: "repair" copies what differs from the lowest rank of the majority, and
            compares again.
        step: The step that errors name.

    Raises:
        ReplicaMismatchError: On every rank; names the parameters and the ranks that differ from the
            majority.
        CorruptFrameError: Digests were damaged on the way here; the others may not know.
    """
    everybody = _gather_digests(link, params, step=step)
    differing = (everybody != everybody[0]).any(0).nonzero().flatten().tolist()
    if not differing:
        return False
    culprits = sorted(
        {
            link.ranks[member]
            for column in differing
            for member in minority(everybody[:, column].tolist())
        }
    )
    if on_divergence == "repair":
        holders = {column: _majority_holder(everybody[:, column].tolist()) for column in differing}
        if None not in holders.values():
            _repair(link, params, holders, culprits, step=step)
            verify_replicas(link, params, step=step)
            return True
    blame = (
        f"{name_ranks(culprits)} left the majority"
        if culprits
        else "there is no majority that could say who is right"
    )
    listed = ", ".join(params[column].name for column in differing[:NAMED_DIFFERENCES])
    more = (
        f" and {len(differing) - NAMED_DIFFERENCES} more"
        if len(differing) > NAMED_DIFFERENCES
        else ""
    )
    raise ReplicaMismatchError(
        f"replicas differ in {listed}{more}: {blame}; was a parameter changed outside the "
        "optimizer, or the model loaded on some ranks only? Restart from a checkpoint",
        rank=link.ranks[link.rank],
        step=step,
        culprits=tuple(culprits),
        is_recoverable=True,
    )


def share_finding(link: Transport, found: StepError | None, *, step: int) -> None:
    """Raise on all ranks what those found who hold the same shards, and others could not.

    Args:
        link: Between all ranks.
        found: What was found here; None for nothing.
        step: The step that errors name.
    """
    kinds: dict[str, type[StepError]] = {
        each.__name__: each
        for each in (ReplicaMismatchError, ConfigMismatchError, CorruptFrameError)
    }
    blamed = [] if found is None else found.culprits
    said = "" if found is None else f"{type(found).__name__}\n{_join(blamed)}\n{found}"
    own = said.encode(errors="replace")[:FINDING_BYTES].ljust(FINDING_BYTES, b"\0")
    everybody = gather_bytes(link, own, step=step)
    rows = [row.rstrip(b"\0").decode(errors="replace") for row in everybody]
    if found is not None:
        raise found
    finders = [rank for rank, row in enumerate(rows) if row]
    if finders:
        name, named, text = rows[finders[0]].split("\n", 2)
        raise kinds[name](
            f"{name_ranks(finders)} found, in other shards: {text}",
            rank=link.ranks[link.rank],
            step=step,
            culprits=tuple(int(rank) for rank in named.split()),
            is_recoverable=name == ReplicaMismatchError.__name__,
        )


def _join(ranks: Sequence[int]) -> str:
    """List ranks in one line, as many as leave room for what was found."""
    return " ".join(map(str, ranks[: FINDING_BYTES // 16]))


def _majority_holder(digests: Sequence[int]) -> int | None:
    """Return the lowest rank that holds what more than half of all hold; None without such."""
    others = minority(digests)
    return min(set(range(len(digests))) - set(others)) if others else None


def _repair(
    link: Transport,
    params: Sequence[VotingParam],
    holders: Mapping[int, int | None],
    culprits: Sequence[int],
    *,
    step: int,
) -> None:
    """Overwrite parameters with those of the majority, on all ranks: their bits are equal there."""
    sources = set()
    for column, source in holders.items():
        assert source is not None  # whoever calls has looked
        sources.add(str(link.ranks[source]))
        own = params[column].local().detach()
        row = own.to(link.wire_device)
        link.broadcast(row.view(-1).view(torch.uint8), step=step, source=source).wait()
        if row is not own:
            own.copy_(row)
        params[column].write_back(own)
    logger.warning(
        "[rank %d, step %d] replicas differed in %s: repaired on %s, from rank %s",
        link.ranks[link.rank],
        step,
        ", ".join(params[column].name for column in holders),
        name_ranks(culprits),
        ", ".join(sorted(sources)),
    )
