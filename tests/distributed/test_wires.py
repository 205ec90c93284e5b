"""Training over sockets of distlion's own gives the bits of training over Gloo."""

from __future__ import annotations

import gc
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
import matrix
from cluster import run_workers
from distlion import errors
from distlion.wire import tcp
from distlion.wire.sockets import SocketGroup
from distlion.wire.tcp import WIRE_VARIABLE, choose_wire
from tiers import in_tiers

pytestmark = pytest.mark.distributed

OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"exchange": pattern} for name, pattern in matrix.PATTERNS.items()},
    "overlap": {"overlap": True, "exchange": distlion.AllReduce()},
    "feedback": {"aggregation": distlion.FeedbackVote(1)},
    "nodes": {"nodes": distlion.Nodes(ranks_per_node=1)},
}


def train(rank: int, options: dict[str, Any], *, steps: int = 4) -> list[Tensor]:
    """Train on buckets of several sizes, one too large for any buffer; return all that moved."""
    sizes = (3, 700, 400_000, 70_000)
    params = [nn.Parameter(torch.full((n,), 0.5)) for n in sizes]
    arguments = {"bucket_elements": 100_000} | options
    optimizer = distlion.DistributedLion(params, 1e-2, **arguments)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        sum((p * torch.randn(p.shape, generator=generator)).sum() for p in params).backward()  # type: ignore[union-attr]
        optimizer.step()
    optimizer.verify_replicas()
    assert isinstance(_group_of(optimizer), SocketGroup) == (choose_wire() == "tcp")
    return [each.detach().clone() for p in params for each in (p, optimizer.state[p]["exp_avg"])]


def _group_of(optimizer: distlion.DistributedLion) -> Any:
    return optimizer._session.routing.between.process_group  # type: ignore[union-attr]


def train_over_both(rank: int, world_size: int) -> list[str]:
    """Return the options with which the transports differ."""
    differ = []
    for name, options in OPTIONS.items():
        found = {}
        for wire in ("gloo", "tcp"):
            os.environ[WIRE_VARIABLE] = wire
            found[wire] = train(rank, options)
        if not all(map(torch.equal, found["gloo"], found["tcp"])):
            differ.append(name)
    return differ


@pytest.mark.parametrize("world_size", in_tiers([2, 3], lambda n: n == 2))
def test_both_transports_give_the_same_bits(world_size: int) -> None:
    assert run_workers(train_over_both, world_size, fresh=True) == [[]] * world_size


def choose_apart(rank: int, world_size: int) -> tuple[int, ...]:
    os.environ[WIRE_VARIABLE] = "tcp" if rank == 1 else "gloo"
    with pytest.raises(errors.ConfigMismatchError, match="wire: tcp on rank 1") as told:
        train(rank, {})
    assert "set DISTLION_WIRE=gloo on every worker" in str(told.value)
    return told.value.culprits


def test_workers_that_chose_different_transports_hear_of_it() -> None:
    assert run_workers(choose_apart, 3, fresh=True) == [(1,)] * 3


@pytest.mark.parametrize(("system", "wire"), [("linux", "tcp"), ("darwin", "gloo")])
def test_only_linux_has_own_sockets_and_takes_them_by_default(
    system: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "sys", SimpleNamespace(platform=system))
    monkeypatch.delenv(WIRE_VARIABLE, raising=False)
    assert choose_wire() == wire
    monkeypatch.setenv(WIRE_VARIABLE, "tcp")
    if system == "darwin":
        with pytest.raises(errors.InvalidArgumentError, match="DISTLION_WIRE=gloo on every"):
            choose_wire()


def test_sockets_that_were_not_built_are_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "distlion.wire._endpoint", None)
    monkeypatch.setenv(WIRE_VARIABLE, "gloo")
    assert choose_wire() == "gloo"
    monkeypatch.delenv(WIRE_VARIABLE)
    with pytest.raises(errors.KernelBackendError, match="DISTLION_WIRE=gloo on every worker"):
        choose_wire()
    distlion.DistributedLion([nn.Parameter(torch.ones(9))], 1e-2)  # alone it needs none


def test_another_transport_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WIRE_VARIABLE, "udp")
    with pytest.raises(errors.InvalidArgumentError, match="DISTLION_WIRE=udp"):
        choose_wire()


@pytest.mark.parametrize("variable", ["DISTLION_WIRE_PORT", "GLOO_SOCKET_IFNAME"])
def test_a_bad_port_or_interface_is_refused_before_anybody_waits(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "no-such")
    monkeypatch.setenv(WIRE_VARIABLE, "gloo")
    choose_wire()
    monkeypatch.delenv(WIRE_VARIABLE)
    with pytest.raises(errors.InvalidArgumentError, match=f"{variable}=no-such"):
        choose_wire()


def fork_and_die(rank: int, world_size: int) -> str:
    """Rank 1 dies while a process that it has forked, as a data loader does, lives on."""
    os.environ[WIRE_VARIABLE] = "tcp"
    params = [nn.Parameter(torch.ones(900))]
    optimizer = distlion.DistributedLion(params, 1e-2)
    if rank == 1:
        if os.fork() == 0:
            signal_end = os.environ["DISTLION_TEST_FIFO"]
            with open(signal_end) as end:  # until rank 0 has failed
                end.read()
            os._exit(0)
        os._exit(1)
    params[0].grad = torch.ones(900)
    try:
        optimizer.step()
    except errors.PeerLostError as error:
        return f"{error.culprits}"
    finally:
        with open(os.environ["DISTLION_TEST_FIFO"], "w"):
            pass
    return "nothing"


def test_a_fork_that_outlives_a_worker_does_not_hide_its_death(tmp_path: Any) -> None:
    os.mkfifo(tmp_path / "end")
    environment = {"DISTLION_TEST_FIFO": str(tmp_path / "end")}
    first, _ = run_workers(fork_and_die, 2, may_die=True, environment=environment)
    assert first == "(1,)"


def count_descriptors(rank: int, world_size: int) -> list[int]:
    os.environ[WIRE_VARIABLE] = "tcp"
    counts = []
    for _ in range(4):
        train(rank, {}, steps=1)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_optimizers_that_are_freed_leave_no_descriptors() -> None:
    for counts in run_workers(count_descriptors, 2, fresh=True):
        assert counts[1] == counts[2] == counts[3]
