"""What makes replicas equal and shows that they are: handshake, broadcast, digests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from distlion.errors import ConfigMismatchError, ReplicaMismatchError
from distlion.exchange import PROTOCOL_VERSION, Link, minority
from distlion.kernels import choose_kernels
from distlion.voting.segments import write_back

NAMED_DIFFERENCES = 5


def digest_lines(lines: Sequence[str]) -> bytes:
    """Digest a description: 32 bytes."""
    return hashlib.sha256("\n".join(lines).encode()).digest()


def digest_settings(lines: Sequence[str]) -> int:
    """Digest a description for a header: unsigned 64 bits."""
    return int.from_bytes(digest_lines(lines)[:8], "little")


def shake_hands(link: Link, lines: Sequence[str], *, step: int) -> None:
    """Compare this worker's description of parameters and settings with everybody's.

    Records of a fixed size are compared first, since tensors whose sizes differ between ranks can
    abort a process inside the network library. Only where they differ do the descriptions
    themselves travel.

    Raises:
        ConfigMismatchError: On every rank; names the first line that differs, and the ranks.
    """
    text = "\n".join(lines).encode()
    record = (
        PROTOCOL_VERSION.to_bytes(8, "little")
        + len(text).to_bytes(8, "little")
        + digest_lines(lines)
    )
    records = gather_bytes(link, record, step=step)
    if len(set(records)) > 1:
        longest = max(int.from_bytes(other[8:16], "little") for other in records)
        raise_difference(link, lines, longest, step=step)


def explain_difference(link: Link, lines: Sequence[str], *, step: int) -> None:
    """Find out what differs after frames have shown that something does; every rank calls it.

    Raises:
        ConfigMismatchError: Always.
    """
    length = len("\n".join(lines).encode())
    lengths = gather_bytes(link, length.to_bytes(8, "little"), step=step)
    raise_difference(
        link, lines, max(int.from_bytes(other, "little") for other in lengths), step=step
    )


def raise_difference(link: Link, lines: Sequence[str], longest: int, *, step: int) -> None:
    """Gather all descriptions, padded to ``longest`` bytes, and raise what differs first."""
    padded = "\n".join(lines).encode().ljust(longest, b"\0")
    texts = [other.rstrip(b"\0").decode() for other in gather_bytes(link, padded, step=step)]
    for values in zip_longest(*(text.split("\n") for text in texts), fillvalue="(nothing)"):
        if len(set(values)) > 1:
            culprits = minority(values)
            raise ConfigMismatchError(
                f"workers disagree: {_spell(values)}; give every worker the same parameters, "
                "settings and version",
                rank=link.rank,
                step=step,
                culprits=culprits,
            )
    raise ConfigMismatchError(
        "workers run different protocol versions; install the same distlion everywhere",
        rank=link.rank,
        step=step,
    )


def _spell(values: Sequence[str]) -> str:
    """Name the ranks that hold each value: "lr: 0.1 on ranks 0, 2, but lr: 0.2 on rank 1"."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return ", but ".join(f"{value} on {spell_ranks(ranks)}" for value, ranks in holders.items())


def spell_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in a message: "rank 1", "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def gather_bytes(link: Link, data: bytes, *, step: int) -> list[bytes]:
    """Gather ``data``, of equal length on all ranks, in rank order."""
    # A clone: Gloo's thread, which lets go of it last, could not free Python's memory at exit.
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone().to(link.device)
    everybody = torch.empty((link.world_size, len(data)), dtype=torch.uint8, device=link.device)
    link.all_gather(everybody, own, step=step).wait()
    return [bytes(row.cpu().numpy()) for row in everybody]


def broadcast_params(
    links: Mapping[torch.device, Link], params: Sequence[Tensor], *, step: int
) -> None:
    """Overwrite parameters with those of the group's first rank."""
    for param in params:
        if param.numel():
            row = param.detach().contiguous()
            links[param.device].broadcast(row.view(-1).view(torch.uint8), step=step).wait()
            write_back(param, row)


def digest_params(params: Sequence[Tensor]) -> Tensor:
    """Digest each parameter: (n_params,) int64 on the CPU, read once from each device."""
    digests = torch.empty(len(params), dtype=torch.int64)
    for device in {param.device for param in params}:
        positions = [index for index, param in enumerate(params) if param.device == device]
        rows = [params[position].detach().contiguous() for position in positions]
        digests[positions] = choose_kernels(device).digests(rows).cpu()
    return digests


def verify_replicas(
    link: Link, params: Sequence[Tensor], names: Sequence[str], *, step: int
) -> None:
    """Compare digests of the parameters' bits.

    Raises:
        ReplicaMismatchError: On every rank; names the parameters and the ranks that differ from the
            majority.
    """
    own = digest_params(params).to(link.device)
    everybody = own.new_empty(link.world_size, len(params))
    link.all_gather(everybody, own, step=step).wait()
    differing = (everybody != everybody[0]).any(0).nonzero().flatten().tolist()
    if not differing:
        return
    culprits = sorted(
        {rank for column in differing for rank in minority(everybody[:, column].tolist())}
    )
    blame = (
        f"{spell_ranks(culprits)} left the majority"
        if culprits
        else "there is no majority that could say who is right"
    )
    listed = ", ".join(names[column] for column in differing[:NAMED_DIFFERENCES])
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
    )
