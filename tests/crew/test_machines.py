"""Members of several processes, over which FSDP2 shards the parameters."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import distlion
from cluster import WorkerDiedError, run_workers
from crews import (
    await_members,
    await_true,
    check_equal,
    host_store,
    make_crew,
    make_model,
    start,
    stop_self,
    wake,
)
from distlion import faults
from distlion.crew import CrewLion
from distlion.errors import CrewError, UnsupportedTypeError
from distlion.wire.watch import FINDING
from distributed.sharded_models import load, save
from machines import (
    LANES,
    TIMEOUTS,
    backward,
    connect_machine,
    digest,
    replay,
    shard,
    train_machine,
)
from tiers import in_tiers

STRUCK_AT, CALLED_AT, COME_BY, GOAL = 4, 7, 10, 14


def train_all(rank: int, size: int, port: int, options: dict[str, Any]) -> dict[str, Any]:
    machine, lane = divmod(rank, LANES)
    mesh = connect_machine(port, str(machine), lane)
    crew = make_crew(port, member=mesh, min_workers=2)
    return train_machine(crew, mesh, options, seed=machine, goal=GOAL)


def find_seed(results: list[dict[str, Any]]) -> int:
    """Return the seed of the machine whose parameters all have taken."""
    first = results[0]["epochs"][1][1][0]
    return next((each["seed"] for each in results if each["id"] == first), 0)


def test_machines_of_a_crew_take_the_steps_of_whole_parameters() -> None:
    store = host_store()
    results = start(train_all, 2 * LANES, store.port, {})
    check_equal(results, goal=GOAL)
    replay(results, find_seed(results), GOAL)


def lose_and_join(
    rank: int, size: int, port: int, lane_lost: int, point: Any, is_sharded: bool
) -> dict[str, Any]:
    """Of one machine a process is killed in a step; another machine comes later.

    Of two machines, the one that is left cannot go on alone: the other comes while it waits.
    """
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    machine, lane = divmod(rank, LANES)
    n_first = size // LANES - 1
    if machine == n_first:
        store.wait(["come"])
    mesh = connect_machine(port, str(machine), lane)
    crew = make_crew(port, member=mesh, min_workers=2, silence_s=2)

    def strike(_: object) -> None:
        if n_first == 2:
            store.set("come", "")
        os.kill(os.getpid(), signal.SIGKILL)

    def act(optimizer: CrewLion) -> None:
        step = optimizer.committed_step
        if (machine, lane) == (0, lane_lost) and step == STRUCK_AT and not faults.armed:
            own = optimizer.session.ranks.rank
            faults.arm(rank=own, step=step, point=point, action=strike)
        if step == CALLED_AT or crew.size < n_first:
            store.set("come", "")
        if step == COME_BY and crew.lane == 0:
            await_members(crew, n_first)

    return train_machine(
        crew, mesh, {}, seed=machine, goal=GOAL, size=n_first, each=act, is_sharded=is_sharded
    )


def check_lost(results: list[Any], lane_lost: int, point: str, *, machines: int) -> None:
    """Check what became of the machine that has lost a process, and of all others."""
    assert isinstance(results[lane_lost], WorkerDiedError)
    left = results[1 - lane_lost]
    if "commit" in point:  # it is FSDP that meets next
        assert "Connection closed by peer" in str(left)
    else:
        assert isinstance(left, CrewError), left
        assert f"of its {LANES} processes these are lost: {lane_lost}" in str(left)
    others = results[LANES:]
    check_equal(others, goal=GOAL)
    replay(others, find_seed(others), GOAL)
    rosters = {step: ids for result in others for step, (_, ids) in result["epochs"].items()}
    sizes = [len(rosters[step]) for step in (STRUCK_AT, CALLED_AT, GOAL)]
    assert sizes == [machines, max(2, machines - 1), machines]
    stayed = {*rosters[STRUCK_AT]} & {*rosters[GOAL]}
    assert len(stayed) == machines - 1


def lose_a_process(lane: int, point: Any, *, machines: int = 3, are_sharded: bool = True) -> None:
    store = host_store()
    size = (machines + 1) * LANES
    results = start(
        lose_and_join, size, store.port, lane, point, are_sharded, may_die=True, timeout_s=120
    )
    check_lost(results, lane, point, machines=machines)


@pytest.mark.parametrize(
    ("machines", "lane", "point"),
    in_tiers(
        [
            (3, 1, "framed"),
            (3, 0, "framed"),
            (3, 0, "before_commit"),
            (3, 1, "after_commit"),
            (3, 1, "before_step"),
            (2, 1, "framed"),
            (2, 0, "framed"),
            (2, 0, "before_commit"),
            (2, 1, "after_commit"),
        ],
        lambda case: case == (3, 1, "framed"),
    ),
)
def test_machine_that_loses_a_process_leaves_and_another_comes(
    machines: int, lane: int, point: Any
) -> None:
    lose_a_process(lane, point, machines=machines)


@pytest.mark.slow
@pytest.mark.parametrize(("lane", "point"), [(0, "framed"), (1, "framed"), (1, "counted")])
def test_machine_with_whole_parameters_is_lost_as_a_whole_too(lane: int, point: Any) -> None:
    lose_a_process(lane, point, are_sharded=False)


def lose_while_members_change(
    rank: int, size: int, port: int, lane_lost: int, point: faults.Point
) -> dict[str, Any]:
    """A machine comes, and a process of another one is killed while all form an epoch with it."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    machine, lane = divmod(rank, LANES)
    n_first = size // LANES - 1
    if machine == n_first:
        store.wait(["come"])
    mesh = connect_machine(port, str(machine), lane)
    crew = make_crew(port, member=mesh, min_workers=2, silence_s=2)

    def act(optimizer: CrewLion) -> None:
        step = optimizer.committed_step
        if (machine, lane) == (0, lane_lost) and step >= STRUCK_AT:
            faults.disarm_all()
            kill = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            # Machines are let in after the next step, before this is called again.
            faults.arm(rank=crew.id, step=step + 1, point=point, action=kill)
        if step == CALLED_AT:
            store.set("come", "")
        if step >= COME_BY and crew.lane == 0 and machine > 0:
            await_true(lambda: max(crew.epoch.roster.ids) == n_first or crew.wants_change)

    return train_machine(crew, mesh, {}, seed=machine, goal=GOAL, size=n_first, each=act)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lane", "point"),
    [
        (0, "roster"),
        (1, "admit"),
        (1, "arrive"),
        (1, "roster"),
        (0, "connect"),
        (1, "connect"),
        (1, "broadcast"),
        (0, "load"),
    ],
)
def test_machine_that_loses_a_process_while_an_epoch_is_formed_leaves(
    lane: int, point: faults.Point
) -> None:
    store = host_store()
    results = start(
        lose_while_members_change, 4 * LANES, store.port, lane, point, may_die=True, timeout_s=120
    )
    assert isinstance(results[lane], WorkerDiedError)
    assert isinstance(results[1 - lane], CrewError | RuntimeError), results[1 - lane]
    others = results[LANES:]
    check_equal(others, goal=GOAL)
    replay(others, find_seed(others), GOAL)
    ids = {ids for result in others for step, (_, ids) in result["epochs"].items() if step == GOAL}
    lost = results[2]["epochs"][1][1]
    assert {len(each) for each in ids} == {3}
    assert {len({*each} & {*lost}) for each in ids} == {2}


def be_stopped(rank: int, size: int, port: int, lane_stopped: int) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    machine, lane = divmod(rank, LANES)
    mesh = connect_machine(port, str(machine), lane)
    crew = make_crew(port, member=mesh, min_workers=2, silence_s=2)

    def act(optimizer: CrewLion) -> None:
        step = optimizer.committed_step
        if (machine, lane) == (0, lane_stopped) and step == STRUCK_AT and not faults.armed:
            own = optimizer.session.ranks.rank
            faults.arm(rank=own, step=step, point="before_step", action=lambda _: stop_self(store))
        if rank == 2 and step == COME_BY:
            store.wait(["left"])  # else all its processes run again, and it comes back
            wake(store)

    long = distlion.Timeouts(step_s=300, busy_s=300, init_s=300)
    options = {"timeouts": long}
    try:
        return train_machine(crew, mesh, options, seed=machine, goal=GOAL, size=size // 2, each=act)
    except CrewError:
        store.set("left", "")
        raise


@pytest.mark.slow
@pytest.mark.parametrize("lane", [1, 0])
def test_machine_one_of_whose_processes_is_silent_leaves(lane: int) -> None:
    store = host_store()
    results = start(be_stopped, 3 * LANES, store.port, lane, may_die=True, timeout_s=120)
    for left in results[:LANES]:
        assert isinstance(left, CrewError), left
        assert f"of its {LANES} processes these are lost: {lane}" in str(left)
    check_equal(results[LANES:], goal=GOAL)
    for result in results[LANES:]:
        assert "(silent)" in result["formed"][-1]


def be_late(rank: int, size: int, port: int) -> dict[str, Any]:
    """A process of a machine is late to an epoch's roll, so that the others go on without both."""
    machine, lane = divmod(rank, LANES)
    mesh = connect_machine(port, str(machine), lane)
    crew = make_crew(port, member=mesh, min_workers=2)

    naps = []

    def nap(_: Any) -> None:
        if (machine, lane) == (0, 1) and len(naps) == 1:
            naps.append(2)
            await_true(lambda: crew._membership.rendezvous.find_last_begun() > crew.epoch.number)

    def act(optimizer: CrewLion) -> None:
        step = optimizer.committed_step
        if step == STRUCK_AT and not naps:
            naps.append(1)
            faults.arm(rank=crew.id, step=step, point="roster", action=nap)
            optimizer.form(())
        if step == COME_BY and crew.lane == 0:
            await_members(crew, size // LANES)

    return train_machine(crew, mesh, {}, seed=machine, goal=GOAL, size=size // LANES, each=act)


@pytest.mark.slow
def test_machine_whose_process_was_only_late_comes_back_with_its_momenta() -> None:
    store = host_store()
    results = start(be_late, 3 * LANES, store.port)
    check_equal(results, goal=GOAL)
    sizes = {step: len(ids) for result in results for step, (_, ids) in result["epochs"].items()}
    assert sizes[GOAL] == 3
    log = "".join(results[LANES]["formed"])
    assert "did not come" in log and "(back)" in log


def hold_one(rank: int, size: int, port: int) -> dict[str, Any]:
    """A process of a machine is late to the end of a step, and meanwhile another machine is lost.

    The others have all that is theirs, and wait for the late one, which has all too.
    """
    machine, lane = divmod(rank, LANES)
    mesh = connect_machine(port, str(machine), lane)
    crew = make_crew(port, member=mesh, min_workers=2)
    kill = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731

    def act(optimizer: CrewLion) -> None:
        step = optimizer.committed_step
        if step != STRUCK_AT or faults.armed:
            return
        ranks = optimizer.session.ranks
        if (machine, lane) == (0, 1):
            faults.arm(rank=ranks.rank, step=step, point="before_commit", action=kill)
        if (machine, lane) == (1, 0):
            assert ranks.watch is not None
            # Known a while after the alarm, which the other process of this machine sees at once.
            is_known = partial(ranks.watch._store.check, [FINDING])
            wait = partial(await_true, is_known)
            faults.arm(rank=ranks.rank, step=step, point="counted", action=lambda _: wait())

    options = {"exchange": distlion.AllGather()}
    result = train_machine(crew, mesh, options, seed=machine, goal=GOAL, size=size // 2, each=act)
    return {**result, "fired": [fault.fired for fault in faults.armed]}


def test_machine_commits_a_step_on_all_its_processes_although_another_one_is_lost() -> None:
    store = host_store()
    results = start(hold_one, 3 * LANES, store.port, may_die=True, timeout_s=120)
    assert isinstance(results[1], WorkerDiedError)
    assert results[LANES]["fired"] == [1]
    check_equal(results[LANES:], goal=GOAL)
    replay(results[LANES:], find_seed(results[LANES:]), GOAL)


def save_and_resume(rank: int, size: int, port: int, folder: str) -> dict[str, Any]:
    """Each machine saves and loads its own state by torch's format, over its processes alone."""
    machine, lane = divmod(rank, LANES)
    mesh = connect_machine(port, str(machine), lane)
    found: dict[str, Any] = {}
    digests = []
    for run in ("first", "resumed"):
        crew = make_crew(port, member=mesh, min_workers=2, run_id=run)
        model = shard(make_model(machine), mesh)
        with crew:
            optimizer = crew.optimizer(model.named_parameters(), lr=1e-2, timeouts=TIMEOUTS)
            if run == "resumed":
                load(model, optimizer, f"{folder}/{machine}")
            while optimizer.committed_step < GOAL:
                backward(model, optimizer.committed_step, machine, lane)
                optimizer.step()
                optimizer.zero_grad()
                if run == "first" and optimizer.committed_step == STRUCK_AT:
                    save(model, optimizer, f"{folder}/{machine}")
                    try:
                        distlion.save_checkpoint(Path(folder, "all"), model, optimizer)
                    except UnsupportedTypeError as error:
                        found["refused"] = str(error)
        digests.append(digest(model))
    return {**found, "equal": digests[0] == digests[1], "step": optimizer.committed_step}


@pytest.mark.slow
def test_each_machine_saves_its_own_state_and_resumes_it(tmp_path: Path) -> None:
    store = host_store()
    for found in start(save_and_resume, 2 * LANES, store.port, str(tmp_path)):
        assert found["equal"]
        assert "torch.distributed.checkpoint" in found["refused"]


def train_on_a_mesh(
    rank: int, size: int, seed: int, options: dict[str, Any]
) -> dict[int, list[bytes]]:
    """Do the same with ``DistributedLion``, whose workers stay."""
    mesh = init_device_mesh("cpu", (size // LANES, LANES), mesh_dim_names=("replicate", "shard"))
    model = shard(make_model(seed), mesh["shard"])
    optimizer = distlion.DistributedLion(
        model.named_parameters(),
        lr=1e-2,
        exchange=distlion.AllReduce(),
        process_group=mesh["replicate"].get_group(),
        **options,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    digests = {}
    for step in range(GOAL):
        backward(model, step, *divmod(rank, LANES))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        digests[step + 1] = digest(model)
    return digests


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aggregation": distlion.FeedbackVote()},
        {"clip_norm": distlion.ClipNorm(0.1, "worker"), "cautious": True},
        {"clip_norm": distlion.ClipNorm(0.1, "global"), "nonfinite": "abstain"},
        {"aggregation": distlion.QuantizedVote(4), "weight_decay": 0.1},
    ],
)
def test_machines_have_the_bits_of_distributed_lion_on_a_mesh(options: dict[str, Any]) -> None:
    store = host_store()
    results = start(train_all, 2 * LANES, store.port, options)
    check_equal(results, goal=GOAL)
    alike = run_workers(train_on_a_mesh, 2 * LANES, find_seed(results), options)
    for expected in alike:
        assert results[0]["digests"] == expected


def end_early(rank: int, size: int, port: int) -> dict[str, Any]:
    """End after fewer steps than the others on one machine, without an error."""
    machine, lane = divmod(rank, LANES)
    mesh = connect_machine(port, str(machine), lane)
    crew = make_crew(port, member=mesh, min_workers=2)
    goal = GOAL if machine else STRUCK_AT
    return train_machine(crew, mesh, {}, seed=machine, goal=goal, size=3)


@pytest.mark.slow
def test_nobody_waits_for_a_machine_that_has_finished_early() -> None:
    store = host_store()
    results = start(end_early, 3 * LANES, store.port)
    assert all(max(each["epochs"]) == STRUCK_AT for each in results[:LANES])
    check_equal(results[LANES:], goal=GOAL)
    assert all(len(each["epochs"][GOAL][1]) == 2 for each in results[LANES:])
