"""Workers of a crew whose local steps or calls differ when they meet again; what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import WorkerDiedError
from crews import host_store, make_crew, start
from distlion import faults
from distlion.crew import CrewLocalSteps
from local_crews import EVERY, STRUCK_AT, check_equal, connect, strike, train

GOAL = 40


def lose(store: Any, point: Any) -> None:
    """Find out that rank 0 is gone, in a vote that all others may have completed."""
    faults.disarm_all()
    store.wait(["struck"])
    store.add("missed", 1)
    link = point._session.connections.link_all(4)
    raise link.failure("lost", point.committed_step, "the exchange of this test was lost")


def miss(rank: int, size: int, port: int, call: str) -> dict[str, Any]:
    """Rank 0 is killed in a vote whose outcome rank 2 takes and rank 1 does not.

    The vote is one of ``vote()``, and rank 2 is in ``step()`` when it meets rank 1 again; or the
    other way round; or it is one that all give up; or it is the last one, and rank 2 has finished.
    """
    crew, store = make_crew(port, min_workers=2, max_workers=size), connect(port)
    options: dict[str, Any] = {"nonfinite": "skip"} if call == "skip" else {}
    if call == "last":  # a scheduler would be taken with its last step, and then step again
        options["schedules"] = False
    called: list[int] = []
    struck_at = find_struck(call)

    def act(optimizer: CrewLocalSteps) -> None:
        step, point = optimizer.local_step, optimizer.point
        if step == struck_at * EVERY + 1 and not called:
            called.append(optimizer.committed_step)
            actions = {0: lambda _: strike(store), 1: lambda _: lose(store, point)}
            if call == "skip":
                spoil(optimizer)
                if rank in actions:
                    point._session.abandon = lambda *_: actions[rank](0)  # type: ignore[method-assign,assign,return-value]
            elif rank in actions:
                before, place = optimizer.committed_step, crew.rank
                faults.arm(rank=place, step=before, point="before_commit", action=actions[rank])
            if call == "vote":
                optimizer.vote()
        elif step == (struck_at + 1) * EVERY + 1 and call == "step":
            optimizer.vote()

    result = train(crew, seed=rank, size=size, goal=GOAL, each=act, **options)
    return {**result, "called": called, "missed": store.add("missed", 0)}


def find_struck(call: str) -> int:
    """Find the vote that the fault meets."""
    return GOAL // EVERY - 1 if call == "last" else STRUCK_AT


def spoil(optimizer: CrewLocalSteps) -> None:
    """Let the delta of this worker be infinite in this period."""
    with torch.no_grad():
        optimizer.list_pairs()[0][0][0, 0] = torch.inf


@pytest.mark.parametrize("call", ["vote", "step", "skip"])
def test_a_worker_that_missed_an_outcome_joins_the_others_in_their_next_vote(call: str) -> None:
    store = host_store()
    dead, *results = start(miss, 3, store.port, call, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    check_equal(results)
    for result in results:
        assert (result["missed"], result["called"]) == (1, [STRUCK_AT])
        assert result["counts"][0] == GOAL


def test_a_worker_that_missed_the_last_outcome_takes_it_from_one_that_has_finished() -> None:
    store = host_store()
    dead, behind, ahead = start(miss, 3, store.port, "last", may_die=True)
    assert isinstance(dead, WorkerDiedError)
    last = find_struck("last") + 1
    assert (behind["missed"], behind["called"]) == (1, [last - 1])
    assert (behind["rosters"].pop(last)[0], ahead["rosters"].pop(last)[0]) == (2, 1)
    assert behind["points"].pop(last) == ahead["points"].pop(last) == behind["own"] == ahead["own"]
    check_equal([behind, ahead])
