"""A network that falls apart, of hosts in network namespaces: no step has two outcomes."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch.distributed as dist

from crews import (
    GOAL,
    OPTIONS,
    STRUCK_AT,
    await_true,
    check_equal,
    host_store,
    make_crew,
    start,
    train,
)
from distlion import Timeouts
from distlion.crew import CrewLion
from distlion.errors import CrewError

pytest.importorskip("pyroute2")

from pyroute2 import IPRoute

from distlion_lab.errors import NetlabError
from distlion_netlab import Lab
from distlion_netlab.lab_plan import INTERFACE, LabPlan
from distlion_netlab.wires import Wires, check_rights

pytestmark = [pytest.mark.distributed, pytest.mark.root, pytest.mark.slow]

STORE_HOST = 3
"""The workers are on hosts 0, 1 and 2."""
COME_BY = 40
NOBODY = "02:00:00:00:00:ee"
"""Address of an interface that no host has: frames to it are lost without a word."""
_CLONE_NEWNET, _PERMANENT = 0x40000000, 0x80


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Make four hosts; what they are made of goes by name, whatever becomes of the test."""
    try:
        check_rights()
        made = Lab(STORE_HOST + 1)
    except NetlabError as error:
        pytest.skip(str(error))
    with made:
        yield made


def enter(plan: LabPlan, host: int) -> None:
    """Move this thread to a host; the threads that it starts are there too."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", plan.host_namespaces[host]).open() as namespace:
        assert libc.setns(namespace.fileno(), _CLONE_NEWNET) == 0


def keep_store(plan: LabPlan) -> Any:
    """Keep a store on its host: a socket stays where it was made."""

    def make() -> Any:
        enter(plan, STORE_HOST)
        address = plan.address(STORE_HOST)
        return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def lose_frames(plan: LabPlan, *, source: int, target: int) -> None:
    """Lose all that one host sends to another one; what comes back arrives."""
    with IPRoute(netns=plan.host_namespaces[source], flags=os.O_RDONLY) as end:
        index = end.link_lookup(ifname=INTERFACE)[0]
        address = plan.address(target)
        end.neigh("replace", dst=address, lladdr=NOBODY, ifindex=index, state=_PERMANENT)
        kept = end.get_neighbours(dst=address, ifindex=index)
        assert [each.get_attr("NDA_LLADDR") for each in kept] == [NOBODY]


def make_control(port: int) -> Any:
    """Connect to the test's own store, which no cut of the lab concerns; before ``enter``."""
    return dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]


def join_from(plan: LabPlan, host: int, port: int, **options: Any) -> Any:
    """Make the crew of a worker on a host."""
    enter(plan, host)
    host = plan.address(STORE_HOST)
    limits = {"store_timeout_s": 5, "store_wait_s": 10}
    return make_crew(port, host=host, min_workers=2, **limits, **options)


def start_on(lab: Lab, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Start a worker on each host but the store's."""
    environment = {"GLOO_SOCKET_IFNAME": INTERFACE}
    return start(function, STORE_HOST, lab.plan, *args, timeout_s=280, environment=environment)


When = Literal["at once", "at the end"]


def cut_off(rank: int, size: int, plan: LabPlan, port: int, control_port: int, when: When) -> Any:
    """The last worker's cable is pulled in a step, and plugged when the others have gone on."""
    control, wires = make_control(control_port), Wires(plan)
    crew = join_from(plan, rank, port)
    is_last = rank == size - 1

    def act(optimizer: CrewLion) -> None:
        step = optimizer.committed_step
        if is_last and step == STRUCK_AT and not control.check(["cut"]):
            wires.set_link(rank, up=False)
            control.set("cut", str(time.monotonic()))
        if not is_last and step == COME_BY and crew.rank == 0 and not control.check(["mended"]):
            if when == "at the end":
                await_true(lambda: control.check(["over"]), limit_s=60)
            wires.set_link(size - 1, up=True)
            control.set("mended", "")
        if step == COME_BY:
            await_true(lambda: control.check(["mended"]), limit_s=60)
            await_true(
                lambda: crew.size == size or crew.wants_change or control.check(["over"]),
                limit_s=60,
            )

    try:
        return train(crew, OPTIONS["majority"], seed=rank, size=size, each=act)
    except CrewError as error:
        took_s = time.monotonic() - float(control.get("cut"))
        control.set("over", "")
        return str(error), took_s


@pytest.mark.parametrize("when", get_args(When))
def test_a_worker_that_is_cut_off_stops_or_comes_back_and_the_others_go_on(
    lab: Lab, when: When
) -> None:
    store, control = keep_store(lab.plan), host_store()
    *results, last = start_on(lab, cut_off, store.port, control.port, when)
    assert control.check(["cut"])
    came_back = isinstance(last, dict)
    assert not (came_back and when == "at the end")
    check_equal([*results, last] if came_back else results)
    for result in results:
        assert len(result["epochs"][STRUCK_AT][1]) == 3
        assert len(result["epochs"][COME_BY][1]) == 2
        assert len(result["epochs"][GOAL][1]) == 2 + came_back
    if not came_back:
        said, took_s = last
        assert "store" in said
        assert took_s < 60


def lose_a_pair(
    rank: int, size: int, plan: LabPlan, port: int, control_port: int, n_ways: int
) -> Any:
    """Host 0 no longer reaches host 1, or neither of them the other; all reach the store."""
    control = make_control(control_port)
    # Who came last is the first to stay away: one of the two.
    await_true(lambda: control.add("made", 0) == size - 1 - rank)
    crew = join_from(plan, rank, port, wait_timeout_s=200)
    control.add("made", 1)

    def act(optimizer: CrewLion) -> None:
        if optimizer.committed_step == STRUCK_AT and rank == 0 and not control.check(["cut"]):
            lose_frames(plan, source=0, target=1)
            if n_ways == 2:
                lose_frames(plan, source=1, target=0)
            control.set("cut", "")

    options = {**OPTIONS["majority"], "timeouts": Timeouts(init_s=3, step_s=4)}
    try:
        return train(crew, options, seed=rank, size=size, each=act)
    except CrewError as error:
        return str(error)


@pytest.mark.parametrize("n_ways", [2, 1], ids=["both ways", "one way"])
def test_of_two_that_do_not_reach_each_other_one_stays_away_and_the_others_go_on(
    lab: Lab, n_ways: int
) -> None:
    store, control = keep_store(lab.plan), host_store()
    outcomes = start_on(lab, lose_a_pair, store.port, control.port, n_ways)
    assert control.check(["cut"])
    results = [outcome for outcome in outcomes if isinstance(outcome, dict)]
    check_equal(results)
    assert outcomes[2] in results  # it reaches everybody
    for result in results:
        assert len(result["epochs"][STRUCK_AT][1]) == 3
        assert len(result["epochs"][GOAL][1]) == 2
    assert len(results) == 2
    assert [said for said in outcomes if isinstance(said, str)]
    assert all("the run is over" in said for said in outcomes if isinstance(said, str))
