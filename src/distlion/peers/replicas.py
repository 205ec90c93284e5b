"""Replicas of the parameters: made equal by a broadcast, compared by digests."""

from __future__ import annotations

import json
import logging
import math
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
from distlion.failures import name_ranks
from distlion.kernels.dispatch import choose_kernels
from distlion.peers.connections import Connections
from distlion.peers.routing import Routing
from distlion.step.param import VotingParam, list_plain, local_tensor, view_row
from distlion.step.ranks import Ranks
from distlion.step.settings import Settings
from distlion.wire.ask import ask, ask_texts, find_problem
from distlion.wire.transport import Transport
from distlion.wire.verdict import minority

logger = logging.getLogger("distlion")

_IN_SOME_SHARDS = (ReplicaMismatchError, ConfigMismatchError, CorruptFrameError)
"""Errors that only the ranks with the same shards find."""
NAMED_DIFFERENCES = 5
EARLY_CHECKS = (10, 100)
"""Steps after the first comparison at which replicas are compared again, also between checks."""
PIECE_BYTES = 4 << 20
"""Bytes of one broadcast: 3.4 s at 10 Mbit/s, so that no timeout depends on the model."""


class ReplicatedParams:
    """The parameters that all workers hold, bitwise identical.

    Args:
        ranks: All ranks of the optimizer.
        settings: The optimizer's settings.
        connections: Its process groups.
        routing: Its routes; counters may need the rules' state again.

    Attributes:
        are_compared: Whether they have been found equal since they were last loaded.
        due_step: Number of committed steps at which to compare them next; infinite for never, and
            before the first comparison.
        were_repaired: Whether some were repaired; the code that acts on it resets it.
    """

    def __init__(
        self, ranks: Ranks, settings: Settings, connections: Connections, routing: Routing
    ) -> None:
        self._connections, self._routing = connections, routing
        self._settings, self._is_sharded = settings, ranks.is_sharded or ranks.come_and_go
        self._is_alone, self._first_step = ranks.is_alone, 0
        self._n_copies = ranks.node_size
        self.are_compared = self.were_repaired = False
        self.due_step: float = math.inf

    def take_over(
        self, params: Sequence[VotingParam], everything: Sequence[Tensor], *, step: int
    ) -> None:
        """Overwrite parameters with the values of the group's first rank; alone, change nothing.

        Args:
            params: All trainable parameters; their order is compared with other workers'.
            everything: All parameters to overwrite.
            step: The step that errors name.

        Raises:
            ConfigMismatchError: Some workers have the same values in another order.
        """
        if self._is_alone:
            return
        timeout_s, link_of = self._settings.timeouts.start_s, self._connections.link_replicas
        with self._as_one(timeout_s, step=step):
            compare_order(link_of(timeout_s), params, step=step)
        self.are_compared = False
        broadcast_params(link_of(timeout_s), everything, step=step)

    def catch_up(self, params: Mapping[Tensor, str], alike: Sequence[int], *, step: int) -> None:
        """Overwrite parameters that differ from the first rank's, on ranks that lag.

        Args:
            params: All parameters, with their names.
            alike: The workers that do not lag; their parameters must equal the first one's.
            step: The step that errors name.

        Raises:
            ReplicaMismatchError: They do not.
            CorruptFrameError: A rank received damaged values.
        """
        ranks = [each * self._n_copies + copy for each in alike for copy in range(self._n_copies)]
        with self._as_one(self._settings.timeouts.start_s, step=step):
            self._catch_up(params, ranks, step=step)
        self._set_due(step)
        self.are_compared = True

    def _catch_up(self, params: Mapping[Tensor, str], alike: Sequence[int], *, step: int) -> None:
        link = self._connections.link_replicas(self._settings.timeouts.start_s)
        tensors, names = list(params), list(params.values())
        everybody = _gather_digests(link, digest_tensors(tensors), step=step)
        _raise_differing(link, names, everybody, alike, step=step)
        differing, _ = _find_differing(link, everybody, range(link.n_members))
        has_all = link.rank in alike and link.rank > 0
        for column in differing:
            # A rank that has it already ignores the copy, which could be damaged on the way.
            broadcast_params(link, [tensors[column]], step=step, is_ignored=has_all)
        if differing:
            everybody = _gather_digests(link, digest_tensors(tensors), step=step)
            if (everybody != everybody[0]).any():
                raise CorruptFrameError(
                    "parameters were damaged on their way to workers that had fallen behind",
                    rank=link.ranks[link.rank],
                    step=step,
                )

    def _set_due(self, step: int) -> None:
        """Set the next step to compare at; set-up code that runs late does harm in the first ones.

        Args:
            step: Number of steps committed, equal on all ranks.
        """
        if not self.are_compared:
            self._first_step = step
        every = self._settings.replicas.check_every
        if every is not None:
            early = [self._first_step + after for after in EARLY_CHECKS if after < every]
            self.due_step = min(
                each for each in (*early, (step // every + 1) * every) if each > step
            )

    def compare(self, params: Sequence[VotingParam], *, step: int) -> int:
        """Compare digests of all parameters, and repair if allowed; return the bytes sent for it.

        Momenta are never compared: they differ by design.

        Raises:
            ReplicaMismatchError: They differ; on every rank.
        """
        timeout_s = self._settings.timeouts.step_s
        link = self._connections.link_replicas(timeout_s)
        was_repaired = False
        self._set_due(step)
        with self._as_one(timeout_s, step=step):
            was_repaired = verify_replicas(
                link, params, self._settings.replicas.on_mismatch, step=step
            )
        # Counters' state may have caused the difference. With shards, some ranks repaired none.
        if was_repaired and not self._is_sharded:
            self._routing.send_rule_state(step=step)
        self.are_compared = True
        self.were_repaired |= was_repaired
        return link.counted.sent_bytes

    @contextmanager
    def _as_one(self, timeout_s: float, *, step: int) -> Iterator[None]:
        """Raise on all ranks an error that only the ranks with the same shards find."""
        if not self._is_sharded:
            yield
            return
        found: StepError | None = None
        try:
            yield
        except _IN_SOME_SHARDS as error:
            found = error
        share_finding(self._connections.link_all(timeout_s), found, step=step)


def broadcast_params(
    link: Transport, params: Sequence[Tensor], *, step: int, is_ignored: bool = False
) -> None:
    """Overwrite parameters with the values of the group's first rank.

    Args:
        link: The link between all workers.
        params: The parameters.
        step: The step that errors name.
        is_ignored: True: take part, and keep own values; not on the first rank.
    """
    for own in (each for param in params for each in list_plain(local_tensor(param).detach())):
        row = own.contiguous().to(link.wire_device)
        broadcast_tensor(link, row, step=step, is_ignored=is_ignored)
        if not is_ignored and row.data_ptr() != own.data_ptr():
            own.copy_(row)


def broadcast_tensor(
    link: Transport, row: Tensor, *, step: int, source: int = 0, is_ignored: bool = False
) -> None:
    """Overwrite a contiguous tensor, which the network can read, with the one of ``source``.

    Args:
        link: The link between all workers.
        row: The tensor.
        step: The step that errors name.
        source: The rank that has the values.
        is_ignored: True: take part, and leave the tensor as it is; not on ``source``.
    """
    if row.numel():
        for piece in torch.split(view_row(row, torch.uint8), PIECE_BYTES):
            into = torch.empty_like(piece) if is_ignored else piece
            link.broadcast(into, step=step, source=source).wait()


def digest_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Digest each tensor: (n,) int64 on the CPU, read once from each device."""
    parts = [list_plain(tensor) for tensor in tensors]
    plain = [each for part in parts for each in part]
    digests = torch.empty(len(plain), dtype=torch.int64, device="cpu")
    for device in {tensor.device for tensor in plain}:
        placed = [index for index, tensor in enumerate(plain) if tensor.device == device]
        rows = choose_kernels(device).digests([_as_words(plain[index]) for index in placed])
        digests[placed] = rows.cpu()
    if all(len(part) == 1 for part in parts):
        return digests
    split = torch.split(digests, [len(part) for part in parts])
    folded = [fold_digests(each) for each in split]
    return torch.stack(folded)


def fold_digests(digests: Tensor) -> Tensor:
    """Return one digest, () int64, of those of what a tensor wraps; a single one as it is."""
    odd = torch.arange(1, 2 * len(digests), 2, dtype=torch.int64, device=digests.device)
    return (digests * odd).sum()


def _as_words(tensor: Tensor) -> Tensor:
    """View elements of more than 4 bytes, as in some frozen parameters, as 4-byte words."""
    own = tensor.detach().contiguous()
    return view_row(own, torch.int32) if own.element_size() > 4 else own


def digest_params(params: Sequence[VotingParam]) -> Tensor:
    """Digest each parameter, by its position: (n_params,) int64 on the CPU."""
    ordered = sorted(params, key=lambda param: param.position)
    return digest_tensors([param.local() for param in ordered])


def compare_order(link: Transport, params: Sequence[VotingParam], *, step: int) -> None:
    """Compare the order of parameters by their values, before these are overwritten.

    Workers with equal seeds have equal values. If one has them in another order, its parameters are
    swapped, which names alone may not show. If seeds differ, or swapped parameters have equal
    values, this finds nothing.

    Raises:
        ConfigMismatchError: On every rank; names the first parameter, and the ranks.
    """
    everybody = _gather_digests(link, digest_params(params), step=step)
    rows = [tuple(row) for row in everybody.tolist()]
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


def _gather_digests(link: Transport, digests: Tensor, *, step: int) -> Tensor:
    """Gather each rank's digests: (ranks, n_params) int64 on the CPU."""
    rows = ask(link, digests.numpy().tobytes(), step=step)
    return torch.stack([torch.frombuffer(bytearray(row), dtype=torch.int64) for row in rows])


def verify_replicas(
    link: Transport,
    params: Sequence[VotingParam],
    on_mismatch: Literal["raise", "repair"] = "raise",
    *,
    step: int,
) -> bool:
    """Compare digests of the parameters' bits; return whether some were repaired.

    Args:
        link: The link between all workers.
        params: The trainable parameters.
        on_mismatch: "repair" copies parameters that differ from the majority's lowest rank, and
            compares again.
        step: The step that errors name.

    Raises:
        ReplicaMismatchError: On every rank; names the parameters and the ranks that differ from the
            majority.
        CorruptFrameError: Digests were damaged on the way here; the others may not know.
    """
    everybody = _gather_digests(link, digest_params(params), step=step)
    everywhere = range(link.n_members)
    differing, culprits = _find_differing(link, everybody, everywhere)
    if not differing:
        return False
    if on_mismatch == "repair":
        holders = {column: _majority_holder(everybody[:, column].tolist()) for column in differing}
        if None not in holders.values():
            _repair(link, params, holders, culprits, step=step)
            verify_replicas(link, params, step=step)
            return True
    _raise_differing(link, [param.name for param in params], everybody, everywhere, step=step)
    return False


def _find_differing(
    link: Transport, everybody: Tensor, members: Sequence[int]
) -> tuple[list[int], tuple[int, ...]]:
    """Return the parameters that differ between members, and the ranks outside the majority."""
    rows = everybody[list(members)]
    differing = (rows != rows[0]).any(0).nonzero().flatten().tolist()
    culprits = {
        link.ranks[members[row]]
        for column in differing
        for row in minority(rows[:, column].tolist())
    }
    return differing, tuple(sorted(culprits))


def _raise_differing(
    link: Transport, names: Sequence[str], everybody: Tensor, members: Sequence[int], *, step: int
) -> None:
    differing, culprits = _find_differing(link, everybody, members)
    if not differing:
        return
    blame = f"the minority is {name_ranks(culprits)}" if culprits else "there is no majority"
    listed = ", ".join(names[column] for column in differing[:NAMED_DIFFERENCES])
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
        culprits=culprits,
        is_recoverable=True,
    )


def share_finding(link: Transport, found: StepError | None, *, step: int) -> None:
    """Raise on all ranks an error that only the ranks with the same shards can find.

    Args:
        link: The link between all ranks.
        found: The error found here; None for none.
        step: The step that errors name.
    """
    said = ""
    if found is not None:
        said = json.dumps([type(found).__name__, found.culprits, str(found)])
    finders, told = find_problem(ask_texts(link, said, step=step))
    if found is not None:
        raise found
    if finders:
        name, culprits, text = json.loads(told)
        kind = next(each for each in _IN_SOME_SHARDS if each.__name__ == name)
        raise kind(
            f"{name_ranks(finders)} found, in other shards: {text}",
            rank=link.ranks[link.rank],
            step=step,
            culprits=tuple(culprits),
            is_recoverable=kind is ReplicaMismatchError,
        )


def _majority_holder(digests: Sequence[int]) -> int | None:
    """Return the lowest rank of the majority; None without a majority."""
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
    """Overwrite parameters with the majority's on all ranks; the majority's bits stay."""
    sources = set()
    for column, source in holders.items():
        assert source is not None  # callers have checked
        sources.add(str(link.ranks[source]))
        own = params[column].local().detach()
        row = own.to(link.wire_device)
        broadcast_tensor(link, row, step=step, source=source)
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
