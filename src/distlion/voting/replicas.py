"""What makes replicas equal and shows that they are: broadcast and digests."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from distlion.errors import ConfigMismatchError, CorruptFrameError, ReplicaMismatchError
from distlion.exchange import Link, minority
from distlion.kernels import choose_kernels
from distlion.voting.handshake import name_ranks
from distlion.voting.param import VotingParam

logger = logging.getLogger("distlion")

NAMED_DIFFERENCES = 5


def broadcast_params(
    links: Mapping[torch.device, Link], params: Sequence[Tensor], *, step: int
) -> None:
    """Overwrite parameters with those of the group's first rank."""
    for param in params:
        if param.numel():
            row = param.detach().contiguous()
            links[param.device].broadcast(row.view(-1).view(torch.uint8), step=step).wait()
            if not param.is_contiguous():
                param.detach().copy_(row)


def digest_params(params: Sequence[VotingParam]) -> Tensor:
    """Digest each parameter: (n_params,) int64 on the CPU, read once from each device."""
    digests = torch.empty(len(params), dtype=torch.int64)
    for device in {param.device for param in params}:
        placed = [param for param in params if param.device == device]
        rows = choose_kernels(device).digests([param.local() for param in placed])
        digests[[param.position for param in placed]] = rows.cpu()
    return digests


def compare_order(link: Link, params: Sequence[VotingParam], *, step: int) -> None:
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
    index = next(index for index, digest in enumerate(first) if there[index] != digest)
    culprits = minority(rows)
    raise ConfigMismatchError(
        f"workers have the same parameters in different orders: what is {params[index].name} on "
        f"rank 0 is {params[there.index(first[index])].name} on {name_ranks(others)}; give every "
        "worker the same order, and names, as in model.named_parameters(), which are compared",
        rank=link.rank,
        step=step,
        culprits=culprits,
    )


def _gather_digests(link: Link, params: Sequence[VotingParam], *, step: int) -> Tensor:
    """Gather digests, each rank's with a checksum: (ranks, n_params) int64 on the CPU.

    Damage on the way to one rank would look to that rank alone like replicas that differ, after
    which all could go on: it would retry a step that the others have left.
    """
    digests = digest_params(params)
    own = torch.cat([digests, digests.new_tensor([_checksum(digests)])]).to(link.device)
    everybody = own.new_empty(link.world_size, own.numel())
    link.all_gather(everybody, own, step=step).wait()
    rows = everybody.cpu()
    damaged = [rank for rank, row in enumerate(rows) if _checksum(row[:-1]) != row[-1]]
    if damaged:
        raise CorruptFrameError(
            f"digests of parameters from {name_ranks(damaged)} were damaged on the way",
            rank=link.rank,
            step=step,
            culprits=tuple(damaged),
        )
    return rows[:, :-1]


def _checksum(digests: Tensor) -> int:
    return zlib.crc32(digests.numpy().tobytes())


def verify_replicas(
    link: Link,
    params: Sequence[VotingParam],
    on_divergence: Literal["raise", "repair"] = "raise",
    *,
    step: int,
) -> None:
    """Compare digests of the parameters' bits.

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
        return
    culprits = sorted(
        {rank for column in differing for rank in minority(everybody[:, column].tolist())}
    )
    if on_divergence == "repair":
        holders = {column: _majority_holder(everybody[:, column].tolist()) for column in differing}
        if None not in holders.values():
            _repair(link, params, holders, culprits, step=step)
            verify_replicas(link, params, step=step)
            return
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
        rank=link.rank,
        step=step,
        culprits=tuple(culprits),
        is_recoverable=True,
    )


def _majority_holder(digests: Sequence[int]) -> int | None:
    """Return the lowest rank that holds what more than half of all hold; None without such."""
    others = minority(digests)
    return min(set(range(len(digests))) - set(others)) if others else None


def _repair(
    link: Link,
    params: Sequence[VotingParam],
    holders: Mapping[int, int | None],
    culprits: Sequence[int],
    *,
    step: int,
) -> None:
    """Overwrite parameters with those of the majority, on all ranks: their bits are equal there."""
    for column, source in holders.items():
        assert source is not None  # whoever calls has looked
        row = params[column].local()
        link.broadcast(row.view(-1).view(torch.uint8), step=step, source=source).wait()
        params[column].write_back(row)
    logger.warning(
        "[rank %d, step %d] replicas differed in %s: repaired on %s, from rank %s",
        link.rank,
        step,
        ", ".join(params[column].name for column in holders),
        name_ranks(culprits),
        ", ".join(sorted({str(source) for source in holders.values()})),
    )
