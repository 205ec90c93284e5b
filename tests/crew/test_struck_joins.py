"""Donors, newcomers and other members are killed or stopped while a newcomer joins."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch.distributed as dist

import distlion
from cluster import WorkerDiedError
from crews import (
    OPTIONS,
    STRUCK_AT,
    await_members,
    await_true,
    check_equal,
    collect_log,
    host_store,
    make_crew,
    start,
    stop_self,
    train,
    wake,
)
from distlion import faults
from distlion.crew import CrewLion, replies, side_link
from tiers import in_tiers

GOAL = 200
LAST_CALL, LAST = GOAL - 30, GOAL - 10
"""Steps from which on members wait for the strike, and for all that will be there in the end."""
STEPS_WITHOUT = 80
"""Steps that the others take while a newcomer is stopped; a donor keeps fewer replies."""
RATE = 8 * 256 / 0.03
"""Bits a second: the model takes many steps to come."""
LONG_S = 300.0
"""A limit that no test waits for."""
TIMEOUTS = distlion.Timeouts(step_s=LONG_S, busy_s=LONG_S, init_s=LONG_S)
NUMBERS = {"stream": [3], "piece": [3], "caught_up": [0]}
"""Pieces at which a fault strikes; at other points any step will do."""
Who = Literal["donor", "another", "newcomer"]


@dataclass
class Strike:
    """The one strike of a run, as one of its workers sees it.

    A newcomer that is stopped is woken by a member after some steps, and a member by the newcomer
    once it is let in.

    Attributes:
        store: The store of the test.
        rank: This process.
        size: Number of processes; the last one is the newcomer.
        who: Who is struck.
        point: Where.
        how: By which signal.
        struck_at: Where this worker was struck: the committed step at "admit", else 0.
        seen_at: Steps at which this worker has seen that one is stopped.
        woken_at: The step at which this worker has woken it.
    """

    store: Any
    rank: int
    size: int
    who: Who
    point: faults.JoinPoint
    how: signal.Signals
    struck_at: list[int] = field(default_factory=list)
    seen_at: list[int] = field(default_factory=list)
    woken_at: list[int] = field(default_factory=list)

    @property
    def is_new(self) -> bool:
        return self.rank == self.size - 1

    @property
    def is_stop(self) -> bool:
        return self.how == signal.SIGSTOP

    @property
    def has_come(self) -> bool:
        return bool(self.store.add("struck", 0))

    def arm(self, identity: int) -> None:
        for each in NUMBERS.get(self.point, range(GOAL)):
            faults.arm(rank=identity, step=each, point=self.point, action=self.strike)

    def strike(self, subject: Any) -> None:
        at_admit = self.point == "admit"
        if at_admit and (self.who == "donor") != (subject._donor.n_served > 0):
            return
        if self.store.add("struck", 1) == 1:
            self.struck_at.append(subject.committed_step if at_admit else 0)
            stop_self(self.store) if self.is_stop else os.kill(os.getpid(), self.how)

    def is_time_to_wake(self, step: int) -> bool:
        if self.who != "newcomer":
            return self.is_new
        is_late = step >= self.seen_at[0] + STEPS_WITHOUT or step >= LAST_CALL
        return self.rank == 0 and is_late

    def wake(self, step: int) -> None:
        if self.is_stop and not self.woken_at:
            self.seen_at.append(step)
            if self.is_time_to_wake(step):
                wake(self.store)
                self.woken_at.append(step)


def strike_one(
    rank: int, size: int, port: int, who: Who, point: faults.JoinPoint, how: signal.Signals
) -> Any:
    """A worker is killed or stopped once while the last one joins; one that is stopped is woken."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    strike = Strike(store, rank, size, who, point, how)
    if strike.is_new:
        store.wait(["come"])
    replies.PIECE_BYTES = 256  # several pieces
    silence = {}
    if strike.is_stop and who == "newcomer":
        side_link.SILENT_S = LONG_S  # whoever waited for it would do so for too long
    elif strike.is_stop:
        silence["silence_s"] = 2
    said = collect_log()
    crew = make_crew(port, min_workers=2, max_workers=size, handover_rate=RATE, **silence)
    strike.arm(crew.id)

    def note(optimizer: CrewLion) -> None:
        step = optimizer.committed_step
        if step == STRUCK_AT:
            store.set("come", "")
        if step >= LAST_CALL and not strike.is_new:
            await_true(lambda: strike.has_come or crew.wants_change)
        if strike.has_come:
            strike.wake(step)
        else:
            time.sleep(0.005)  # the newcomer has to replay some of these steps
        if step >= LAST:
            await_members(crew, size if strike.is_stop else size - 1)

    options, admits = {**OPTIONS["majority"], "timeouts": TIMEOUTS}, point == "admit"
    lived = train(crew, options, seed=rank, size=size - 1, goal=GOAL, each=note, admits=admits)
    seen = {"struck_at": strike.struck_at, "woken_at": strike.woken_at, "new": strike.is_new}
    return {**lived, **seen, "said": said}


def play(who: Who, point: faults.JoinPoint, how: signal.Signals) -> tuple[Any, list[Any]]:
    """Return what became of the one that was struck, and of the others, a newcomer last."""
    store, size = host_store(), 3 if who == "newcomer" else 4
    results = start(strike_one, size, store.port, who, point, how, may_die=True, timeout_s=120)
    assert store.add("struck", 0) > 0
    if how == signal.SIGKILL:
        (struck,) = [each for each in results if isinstance(each, WorkerDiedError)]
    else:
        (struck,) = [each for each in results if each["struck_at"]]
        check_equal(results, goal=GOAL)
    others = [each for each in results if each is not struck]
    check_equal(others, goal=GOAL)
    return struck, others


def check_came(newcomer: dict[str, Any]) -> None:
    assert any("came while the others trained" in line for line in newcomer["said"])
    assert not any("joins while others wait" in line for line in newcomer["said"])


@pytest.mark.parametrize(
    "point", in_tiers(["piece", "replay", "caught_up"], lambda point: point == "piece")
)
def test_members_go_on_without_a_newcomer_that_dies_as_it_catches_up(
    point: faults.JoinPoint,
) -> None:
    _, members = play("newcomer", point, signal.SIGKILL)
    for result in members:
        assert len(result["formed"]) == 1  # nobody has noticed
        assert result["traffic"]["members_lost"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("point", ["piece", "replay", "caught_up"])
def test_members_go_on_without_a_newcomer_that_is_stopped_as_it_catches_up(
    point: faults.JoinPoint,
) -> None:
    newcomer, members = play("newcomer", point, signal.SIGSTOP)
    (woken_at,) = members[0]["woken_at"]
    assert min(newcomer["digests"]) > woken_at
    check_came(newcomer)
    for result in members:
        assert [line.rpartition("left: ")[2] for line in result["formed"][1:]] == [
            f"nobody; came: worker {newcomer['id']} (new)"
        ]
        assert result["traffic"]["members_lost"] == 0


def test_a_newcomer_whose_donor_dies_catches_up_with_another_one() -> None:
    _, (*_, newcomer) = play("donor", "stream", signal.SIGKILL)
    assert newcomer["new"]
    assert any("loses worker" in line for line in newcomer["said"])
    check_came(newcomer)


def check_back(stopped: dict[str, Any], members: list[dict[str, Any]]) -> None:
    """Check that a member was given up by its heartbeats, and came back."""
    for result in members:
        lost = [line for line in result["formed"] if "(silent)" in line]
        assert len(lost) == 1, result["formed"]
        assert f"left: worker {stopped['id']} (silent)" in lost[0]
        assert f"came: worker {stopped['id']} (back)" in "".join(result["formed"])
    assert any("came while the others trained" in line for line in stopped["said"])


@pytest.mark.slow
def test_a_newcomer_whose_donor_is_stopped_catches_up_with_another_one() -> None:
    stopped, (*members, newcomer) = play("donor", "stream", signal.SIGSTOP)
    check_back(stopped, members)
    assert any(f"loses worker {stopped['id']}" in line for line in newcomer["said"])
    check_came(newcomer)


@pytest.mark.parametrize("who", in_tiers(["donor", "another"], lambda who: who == "donor"))
def test_a_newcomer_is_let_in_although_a_member_dies_as_all_leave(who: Who) -> None:
    _, (*members, newcomer) = play(who, "admit", signal.SIGKILL)
    check_came(newcomer)
    for result in members:
        assert result["traffic"]["members_lost"] == 1
        assert result["given_up"] == 0  # backward passes: all have left before one


@pytest.mark.slow
@pytest.mark.parametrize("who", ["donor", "another"])
def test_a_newcomer_is_let_in_although_a_member_is_stopped_as_all_leave(
    who: Who,
) -> None:
    stopped, (*members, newcomer) = play(who, "admit", signal.SIGSTOP)
    check_back(stopped, members)
    check_came(newcomer)
