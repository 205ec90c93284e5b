"""Buffers that become equal on all workers: the mean of running statistics, rank 0's others."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from distlion.errors import (
    ConfigMismatchError,
    PeerLostError,
    ProcessGroupError,
    StepTimeoutError,
    UnsupportedTypeError,
)
from distlion.numpy_numbers import as_python
from distlion.signals import deferred_signals
from distlion.step.arguments import check_seconds
from distlion.step.param import is_dtensor, view_row
from distlion.step.ranks import Ranks
from distlion.wire.ask import ask_texts, find_difference
from distlion.wire.gloo import Gloo
from distlion.wire.groups import (
    carries_host_memory,
    find_limit,
    find_stand_in,
    has_stand_in,
    own_group,
)
from distlion.wire.roll_call import BUSY_TIMEOUT_S
from distlion.wire.transport import Transport
from distlion.wire.turns import NO_OPTIMIZER, Turn

_CALL = "average_buffers()"
_BYTES_AT_ONCE = 16 << 20
"""Most bytes of buffers sent together, so that a gather among many workers needs little memory."""
_WITH_A_MEAN = frozenset({"running_mean", "running_var"})
_OF_STATISTICS = _WITH_A_MEAN | {"num_batches_tracked"}
"""The buffers of torch's norms, and of other modules that keep running statistics as they do."""
# Calls are counted per group: on other groups a process may have made more than its peers.
_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_own_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)
"""Gloo groups of workers whose own group cannot carry buffers."""
_CALL_S, _FIRST_CALL_S = 60, 300
"""Seconds of silence, as for an optimizer's steps and for its construction."""


@torch.no_grad()
def average_buffers(
    model: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    *,
    timeout_s: float | None = None,
    busy_timeout_s: float = BUSY_TIMEOUT_S,
) -> None:
    """Make buffers equal on all workers, such as BatchNorm's statistics; all must call it.

    Voting workers do not synchronize buffers. Call this after the model is built where ranks draw
    buffers at random, before evaluation, and before ``save_checkpoint``.

    Args:
        model: Model whose buffers are overwritten, also buffers outside the state dict. Running
            statistics become the mean, computed in double and rounded once. They are
            ``running_mean`` and ``running_var`` of torch's norms, and of any module that has no
            other buffers than these two and ``num_batches_tracked``. All other buffers become those
            of the group's first rank: vectors of a spectral norm, masks and counts have no mean.
        process_group: The workers; None for the default group, or in a crew whose members have
            several processes for all processes of all members. Without a group nothing changes.
        timeout_s: Seconds of silence after which a worker counts as failed; None: 60, or 300 in a
            first call before there is an optimizer, as other workers may still load data.
        busy_timeout_s: Seconds to wait for a worker that answers but is elsewhere; no more than the
            limit of ``process_group``, which in a crew is ``Timeouts.init_s``. The first call on a
            group of NCCL alone makes a group of Gloo, and waits for everybody that long.

    Raises:
        ConfigMismatchError: Workers have different buffers; on every rank, with nothing changed.
        UnsupportedTypeError: The model is no module; on this rank alone, before any call.
        UnsupportedTypeError: A buffer is sparse, a DTensor or without storage; on every rank that
            has one, and ConfigMismatchError on the others. Nothing has changed.
        ProcessGroupError: There is no group although WORLD_SIZE promises one, or a crew whose
            members have several processes is in no epoch.
        PeerLostError, StepTimeoutError: A worker did not take part; nothing has changed.
        StepMismatchError: A worker is in an optimizer's call; nothing has changed.

    Notes:
        Afterwards buffers are bitwise identical on all workers, as all add the same numbers in rank
        order. Equal statistics keep their bits. The mean of variances ignores the
        differences between the workers' means, which are small if they draw from the same data.

    Example:
        >>> distlion.average_buffers(model)
        >>> distlion.save_checkpoint("runs/first", model, optimizer)
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedTypeError(
            f"model is a {type(model).__name__}; expected the torch.nn.Module whose buffers become "
            "equal"
        )
    timeout_s, busy_timeout_s = as_python(timeout_s), as_python(busy_timeout_s)
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s)
    check_seconds("busy_timeout_s", busy_timeout_s)
    ranks = _find_ranks(process_group)
    if ranks.process_group is None or ranks.is_alone:
        return
    with deferred_signals(_CALL):
        named = _list_buffers(model)
        with _turn(ranks):
            link = _connect(ranks, timeout_s=timeout_s, busy_timeout_s=busy_timeout_s)
            try:
                _agree(link, named)
                differing = _find_differing(link, list(named.values()))
                equal = _equalize(link, differing)
            except (PeerLostError, StepTimeoutError):
                _own_groups.pop(ranks.process_group, None)  # it has failed
                raise
        for buffer, values in zip(differing, equal, strict=True):
            buffer.tensor.copy_(values)


def _find_ranks(process_group: dist.ProcessGroup | None) -> Ranks:
    if process_group is not None or not has_stand_in():
        return Ranks.of(process_group)
    group = find_stand_in()
    if group is None:
        raise ProcessGroupError(
            f"{_CALL}: the crew of this process is in no epoch, and the default group has only the "
            "processes of this member; call it inside `with crew:`, once the optimizer is made, or "
            "pass process_group= to average inside the member alone"
        )
    rank, size = group.rank(), group.size()
    return Ranks(group, rank, size, inside=(rank,), between=tuple(range(size)))


@dataclass(frozen=True)
class _Buffer:
    """A buffer of the model, and whether the mean of all workers' is a buffer of its kind."""

    tensor: Tensor
    has_mean: bool

    def describe(self) -> str:
        kind = "; mean" if self.has_mean else ""
        if _is_odd(self.tensor):
            kind = f"; cannot be averaged: {self.tensor.layout}"
        return f"{tuple(self.tensor.shape)} {self.tensor.dtype}{kind}"


def _list_buffers(model: nn.Module) -> dict[str, _Buffer]:
    """Return all buffers by name, each tensor once."""
    listed: dict[Tensor, tuple[str, _Buffer]] = {}
    for prefix, module in model.named_modules():
        own = dict(module.named_buffers(recurse=False))
        is_norm = isinstance(module, _NormBase) or own.keys() <= _OF_STATISTICS
        for name, tensor in own.items():
            is_number = tensor.is_floating_point() or tensor.is_complex()
            has_mean = is_norm and is_number and name in _WITH_A_MEAN
            full_name = f"{prefix}.{name}" if prefix else name
            listed.setdefault(tensor, (full_name, _Buffer(tensor, has_mean)))
    return dict(listed.values())


@contextmanager
def _turn(ranks: Ranks) -> Iterator[None]:
    """Show other workers this worker's call, and let errors name it."""
    assert ranks.watch is not None  # there is a group
    turns = ranks.watch.turns
    turns.now = Turn(turns.now.number + 1, NO_OPTIMIZER, _CALL)
    try:
        yield
    except (PeerLostError, StepTimeoutError, ProcessGroupError) as error:
        call = f"{_CALL}, which every rank must call"
        error.args = (f"[rank {ranks.rank}] {call}: {error}",)
        raise


def _connect(ranks: Ranks, *, timeout_s: float | None, busy_timeout_s: float) -> Transport:
    workers, watch = ranks.process_group, ranks.watch
    assert workers is not None and watch is not None  # there are two ranks or more
    number = _calls[workers] = _calls.get(workers, 0) + 1
    if timeout_s is None:
        # Others may not answer yet: a watch begins with a first call, or an optimizer.
        is_first = number == 1 and not watch.turns.n_optimizers
        timeout_s = _FIRST_CALL_S if is_first else _CALL_S
    members = _own_groups.get(workers, workers)
    if not carries_host_memory(members):
        # No roll is called while a group is made: a busy worker has as long as it may ever take.
        longest_s = max(timeout_s, busy_timeout_s)
        members = own_group(workers, name=f"buffers/{number}", timeout_s=longest_s)
        _own_groups[workers] = members
    busy_timeout_s = min(busy_timeout_s, find_limit(members))
    return Gloo(
        members,
        timeout_s=timeout_s,
        busy_timeout_s=busy_timeout_s,
        watch=watch,
        limits="timeout_s= limits the silence of a worker, busy_timeout_s= the wait for one that "
        "runs",
    )


def _agree(link: Transport, named: Mapping[str, _Buffer]) -> None:
    """Compare names, shapes and dtypes over all workers, before any value is sent."""
    lines = [f"{name}: {each.describe()}" for name, each in named.items()]
    said = "\n".join([f"call: {_CALL}", *lines])
    found = find_difference(ask_texts(link, said, step=None))
    for name, each in named.items():
        if _is_odd(each.tensor):
            raise UnsupportedTypeError(
                f"[rank {link.rank}] {_CALL}: the buffer {name} {each.tensor.layout} cannot be "
                "averaged; expected dense tensors with memory of their own for each element. "
                "Register it in another way, or leave it out of the model"
            )
    if found is not None:
        what, culprits = found
        raise ConfigMismatchError(
            f"{_CALL}: workers differ: {what}; expected the same buffers on all workers. Build the "
            "same model on each; nothing was changed",
            rank=link.rank,
            culprits=culprits,
            is_recoverable=True,
        )


def _is_odd(buffer: Tensor) -> bool:
    if is_dtensor(buffer) or buffer.layout is not torch.strided or buffer.is_meta:
        return True
    # Elements that share memory, as after expand(), cannot be written one by one.
    return torch._debug_has_internal_overlap(buffer) == 1


def _find_differing(link: Transport, buffers: Sequence[_Buffer]) -> list[_Buffer]:
    """Return the buffers whose bits differ between workers: only these travel."""
    sums = [sha256(_as_bytes(each.tensor).numpy().data).hexdigest() for each in buffers]
    rows = [text.split() for text in ask_texts(link, " ".join(sums), step=None)]
    found = zip(buffers, zip(*rows, strict=True), strict=True)
    return [buffer for buffer, of_all in found if len(set(of_all)) > 1]


def _as_bytes(buffer: Tensor) -> Tensor:
    return view_row(buffer.detach().cpu().contiguous(), torch.uint8)


def _equalize(link: Transport, buffers: Sequence[_Buffer]) -> list[Tensor]:
    """Return the common value of each buffer, in its dtype and in host memory."""
    equal: list[Tensor] = []
    for bucket in _pack(buffers):
        raw = [_as_bytes(own.tensor) for own in bucket]
        sizes = [each.numel() for each in raw]
        everybody = link.empty(link.n_members, sum(sizes))
        if sum(sizes):
            link.all_gather(everybody, torch.cat(raw), step=None).wait()
        rows = torch.split(everybody, sizes, dim=1)
        equal += [_merge(of_one, own) for of_one, own in zip(rows, bucket, strict=True)]
    return equal


def _pack(buffers: Sequence[_Buffer]) -> Iterator[list[_Buffer]]:
    """Yield buffers in order and in host memory, in groups to send together."""
    bucket: list[_Buffer] = []
    n_bytes = 0
    for buffer in buffers:
        own = buffer.tensor.detach().cpu().contiguous()
        if bucket and n_bytes + own.nbytes > _BYTES_AT_ONCE:
            yield bucket
            bucket, n_bytes = [], 0
        bucket.append(replace(buffer, tensor=own))
        n_bytes += own.nbytes
    if bucket:
        yield bucket


def _merge(raw: Tensor, own: _Buffer) -> Tensor:
    """Return the common value of a buffer, from all workers' bytes in rank order."""
    like = own.tensor
    if not like.numel():
        return like
    # Contiguous, as among other bytes it may start at an address that its dtype does not allow.
    rows = raw.contiguous().view(like.dtype).view(len(raw), *like.shape)
    if not own.has_mean or torch.equal(raw, raw[:1].expand_as(raw)):
        return rows[0]
    wide = torch.complex128 if like.is_complex() else torch.float64
    total = torch.zeros(like.shape, dtype=wide, device="cpu")
    for row in rows:
        total += row.to(wide)
    return (total / len(rows)).to(like.dtype)
