import os
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distlion_lab.errors import DataError, WorkerFailedError
from distlion_lab.training import local_workers as local_workers_module
from distlion_lab.training.local_workers import run_workers

pytestmark = pytest.mark.distributed


def ignore(event):
    pass


def add_ranks(emit, start):
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    emit(f"rank {dist.get_rank()} adds")
    return int(total)


def die_on_rank_1(emit, signal_number):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal_number)
    dist.barrier()


def leave_on_rank_2(emit):
    if dist.get_rank() == 2:
        os._exit(7)
    dist.barrier()


def raise_on_rank_1(emit, error):
    if dist.get_rank() == 1:
        raise error
    dist.barrier()


def read_interface(emit):
    return os.environ.get("GLOO_SOCKET_IFNAME")


def report_pids(emit):
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    emit(pids)
    dist.barrier()
    if dist.get_rank() == 0:
        os._exit(1)
    signal.pause()


def emit_pids_and_wait(emit):
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    emit(pids)
    signal.pause()


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_result_is_that_of_rank_0():
    assert run_workers(add_ranks, 10, world_size=3, observe=ignore) == 33


def test_one_worker_is_a_group_too():
    assert run_workers(add_ranks, 10, world_size=1, observe=ignore) == 10


def test_events_of_rank_0_alone_are_observed():
    events = []
    run_workers(add_ranks, 0, world_size=2, observe=events.append)
    assert events == ["rank 0 adds"]


def test_workers_talk_over_the_loopback_interface(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert run_workers(read_interface, world_size=1, observe=ignore) == "lo"


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGSEGV"])
def test_worker_killed_by_a_signal_is_named(signal_name):
    with pytest.raises(WorkerFailedError, match=f"worker 1 of 3 was killed by {signal_name}"):
        run_workers(die_on_rank_1, signal.Signals[signal_name], world_size=3, observe=ignore)


def test_worker_that_leaves_is_named_with_its_exit_code():
    with pytest.raises(WorkerFailedError, match="worker 2 of 3 ended with exit code 7"):
        run_workers(leave_on_rank_2, world_size=3, observe=ignore)


def test_worker_that_raises_is_named_rather_than_those_that_lose_it():
    with pytest.raises(WorkerFailedError, match="worker 1 of 3 failed: ValueError: no luck"):
        run_workers(raise_on_rank_1, ValueError("no luck"), world_size=3, observe=ignore)


def test_a_death_that_becomes_known_after_all_connections_have_closed_is_named(monkeypatch):
    """The operating system closes a dead worker's connections before it reports the death."""
    team = local_workers_module._Team(2)
    lost, killed = SimpleNamespace(sentinel=0, exitcode=1), SimpleNamespace(sentinel=1)
    killed.exitcode = None
    team._processes = [lost, killed]
    team._failures = {0: local_workers_module.Failure("connection closed", None, False, 0)}

    def hear_of_the_death(sources, timeout):
        assert sources == [killed.sentinel]
        killed.exitcode = -signal.SIGKILL
        return sources

    monkeypatch.setattr(local_workers_module.connection, "wait", hear_of_the_death)
    with pytest.raises(WorkerFailedError, match="worker 1 of 2 was killed by SIGKILL"):
        team.listen(ignore)


def test_unexpected_error_of_a_worker_comes_with_its_traceback():
    with pytest.raises(WorkerFailedError) as raised:
        run_workers(raise_on_rank_1, ValueError("no luck"), world_size=2, observe=ignore)
    assert "in raise_on_rank_1" in str(raised.value.__cause__)


def test_typed_error_of_a_worker_comes_without_a_traceback():
    with pytest.raises(WorkerFailedError, match="DataError: no data") as raised:
        run_workers(raise_on_rank_1, DataError("no data"), world_size=2, observe=ignore)
    assert raised.value.__cause__ is None


def test_no_worker_runs_on_after_one_has_failed():
    events = []
    with pytest.raises(WorkerFailedError, match="worker 0 of 3"):
        run_workers(report_pids, world_size=3, observe=events.append)
    assert not any(is_running(pid) for pid in events[0])


def test_no_worker_runs_on_after_ctrl_c():
    seen = []

    def interrupt(pids):
        seen.extend(pids)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_workers(emit_pids_and_wait, world_size=3, observe=interrupt)
    assert len(seen) == 3
    assert not any(is_running(pid) for pid in seen)
