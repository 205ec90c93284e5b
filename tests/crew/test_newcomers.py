"""Workers join a crew while the others train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distlion
from crews import (
    GOAL,
    OPTIONS,
    STRUCK_AT,
    await_members,
    await_true,
    check_equal,
    host_store,
    list_reasons,
    make_crew,
    start,
    train,
)
from distlion.checkpoint.identity import identify, list_loaded, note_loaded
from distlion.crew import CrewLion
from distlion.crew.admission import list_asks
from distlion.crew.catch_up import find_refusal
from distlion.crew.lanes import Lanes, OneLane
from distlion.errors import CrewError
from distlion.step.newcomers import Newcomers
from distlion.votes.aggregation import Aggregation
from distlion.votes.registry import RULES, SCALED_RULES
from tiers import in_tiers


def join_late(rank: int, size: int, port: int, name: str, newcomers: Any) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    if rank == size - 1:
        store.wait(["come"])
    crew = make_crew(port, min_workers=2, max_workers=size, newcomers=newcomers)
    goal = 40
    momenta: list[torch.Tensor] = []
    owners: list[tuple[str, frozenset[str]]] = []

    def note(optimizer: CrewLion) -> None:
        if optimizer.committed_step == STRUCK_AT:
            note_loaded(optimizer, frozenset({"resumed"}))  # as if the crew had loaded a checkpoint
            store.set("come", "")
        # Others wait here for the newcomer: otherwise they might have finished before it came.
        await_members(crew, size if optimizer.committed_step == goal - 2 else 0)
        if crew.size == size and not momenta:
            momenta.append(
                optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].clone()
            )

        owners[:] = [(identify(optimizer), list_loaded(optimizer))]

    result = train(crew, OPTIONS[name], seed=rank, size=size - 1, goal=goal, each=note)
    return {**result, "momentum": momenta[0], "owner": owners[0]}


STATEFUL = ("EstimateVote", "FeedbackVote", "ResidualVote")
EVERY_RULE = [*(each.rule for each in RULES.values()), *SCALED_RULES.values()]


@pytest.mark.parametrize("rule", EVERY_RULE, ids=repr)
def test_others_wait_for_newcomers_of_a_rule_that_keeps_state(rule: Aggregation) -> None:
    name = type(rule).__name__
    reason = f"{name} keeps state of each worker" if name in STATEFUL else ""
    plain = distlion.Average()
    for rules in ((rule,), (plain, rule), (rule, plain)):
        assert find_refusal("zeros", rules, OneLane(), is_local=False) == reason


@pytest.mark.parametrize("newcomers", ["donor", "mean"])
def test_others_wait_for_newcomers_that_copy_momenta(newcomers: Newcomers) -> None:
    reason = find_refusal(newcomers, [distlion.MajorityVote()], OneLane(), is_local=False)
    assert reason == f"newcomers='{newcomers}' copies momenta"


def test_others_wait_for_newcomers_that_take_local_steps() -> None:
    reason = find_refusal("zeros", [distlion.MajorityVote()], OneLane(), is_local=True)
    assert reason == "local steps are shared at votes"


def test_others_wait_for_machines_of_several_processes() -> None:
    lanes = object.__new__(Lanes)  # without a group
    lanes.number = 4
    reason = find_refusal("zeros", [distlion.MajorityVote()], lanes, is_local=False)
    assert reason == "its members have 4 processes each"


@pytest.mark.parametrize(
    ("name", "newcomers"),
    in_tiers(
        [("majority", "zeros"), ("feedback", "donor"), ("overlap", "mean")],
        lambda case: case[0] == "overlap",
    ),
)
def test_a_newcomer_has_the_parameters_of_the_others(name: str, newcomers: str) -> None:
    store = host_store()
    results = start(join_late, 3, store.port, name, newcomers)
    check_equal(results, goal=40)
    last = results[-1]
    assert min(last["digests"]) > STRUCK_AT
    assert len(last["epochs"][40][1]) == 3
    for result in results[:-1]:
        assert result["formed"][-1].endswith(f"left: nobody; came: worker {last['id']} (new)")
        assert result["traffic"]["members_lost"] == 0
    (formed,) = last["formed"]
    there = "worker 0 (there before), worker 1 (there before)"
    assert formed.endswith(f"came: {there}, worker {last['id']} (new)")
    assert last["owner"] in [result["owner"] for result in results[:-1]]
    assert last["owner"][1] == {"resumed"}
    if newcomers != "zeros":
        assert list_reasons(last) == {f"newcomers={newcomers!r} copies momenta"}
    momenta = [result["momentum"] for result in results]
    if newcomers == "zeros":
        assert not momenta[-1].any()
    elif newcomers == "donor":
        assert any(torch.equal(momenta[-1], other) for other in momenta[:-1])
    else:
        torch.testing.assert_close(momenta[-1], (momenta[0] + momenta[1]) / 2)


def join_together(rank: int, size: int, port: int, n_first: int) -> dict[str, Any]:
    """Some train, and wait in a step until all others ask to be let in."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    crew = make_crew(port, min_workers=2)
    if rank >= n_first:
        store.wait(["come"])
    seen: list[tuple[int, ...]] = []

    def all_ask() -> bool:
        found = crew._membership.rendezvous.store
        return sum(found.check([each.ready]) for each in list_asks(found)) == size - n_first

    def act(optimizer: CrewLion) -> None:
        if not seen or crew.epoch.roster.ids != seen[-1]:
            seen.append(crew.epoch.roster.ids)
        if optimizer.committed_step == STRUCK_AT and crew.size == n_first:
            store.set("come", "")
            await_true(all_ask)
        await_members(crew, size if optimizer.committed_step == GOAL - 2 else 0)

    result = train(crew, OPTIONS["feedback"], seed=rank, size=n_first, each=act)
    return {**result, "seen": seen}


def test_newcomers_that_ask_at_once_are_taken_in_one_epoch() -> None:
    store = host_store()
    results = start(join_together, 5, store.port, 2)
    check_equal(results)
    assert {result["epochs"][GOAL][0] for result in results} == {results[0]["epochs"][GOAL][0]}
    for result in results[:2]:
        assert len(result["epochs"][STRUCK_AT][1]) == 2
        assert len(result["seen"]) == 2
    for result in results[2:]:
        assert min(result["digests"]) > STRUCK_AT
        assert list_reasons(result) == {"FeedbackVote keeps state of each worker"}
    for result in results:
        assert sorted(result["epochs"][GOAL][1]) == sorted(each["id"] for each in results)


def join_as_a_stranger(rank: int, size: int, port: int) -> Any:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    if rank == size - 1:
        store.wait(["come"])
        crew = make_crew(port, min_workers=2)
        try:
            crew.optimizer([nn.Parameter(torch.zeros(3))])
        except CrewError as error:
            return str(error)
        finally:
            store.set("refused", "")

    def hold(optimizer: CrewLion) -> None:
        if optimizer.committed_step == STRUCK_AT:
            store.set("come", "")
        if optimizer.committed_step == GOAL - 2:
            while not store.check(["refused"]) and not crew.wants_change:
                crew._membership.ended.wait(0.05)

    crew = make_crew(port, min_workers=2)
    return train(crew, OPTIONS["majority"], seed=rank, size=size - 1, each=hold)


def test_a_newcomer_with_other_parameters_is_refused_and_the_others_go_on() -> None:
    store = host_store()
    *results, refused = start(join_as_a_stranger, 3, store.port)
    check_equal(results)
    assert "same script" in refused
    assert {len(ids) for result in results for _, ids in result["epochs"].values()} == {2}


def lose_sight(rank: int, size: int, port: int) -> dict[str, Any]:
    """Two train, are taken for dead, and see nobody who waits; the other two begin without them."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    if rank >= 2:
        store.wait(["come"])
    crew = make_crew(port, min_workers=2)
    is_blind = rank < 2

    def act(optimizer: CrewLion) -> None:
        nonlocal is_blind
        if is_blind and crew.size == 2 and optimizer.committed_step == STRUCK_AT:
            is_blind = False
            crew._membership.lookout._look_for_asks = lambda epoch: False  # type: ignore[method-assign]
            crew._membership.rendezvous.say_alive = lambda word: None  # type: ignore[method-assign]
            if store.add("blind", 1) == 2:
                store.set("come", "")
            await_true(lambda: store.check(["trained"]))
        if rank >= 2 and optimizer.committed_step == 1:
            store.set("trained", "")
        await_members(crew, size if optimizer.committed_step in (STRUCK_AT, GOAL - 2) else 0)

    result = train(crew, OPTIONS["majority"], seed=rank, size=2, each=act)
    assert not is_blind or rank >= 2
    return result


def test_members_that_others_have_begun_without_come_to_them() -> None:
    store = host_store()
    results = start(lose_sight, 4, store.port)
    numbers = [result["epochs"][GOAL][0] for result in results]
    assert len(set(numbers)) == 1
    assert all(len(result["epochs"][GOAL][1]) == 4 for result in results)
    assert len({result["digests"][GOAL] for result in results}) == 1
    others = {result["epochs"][1][0] for result in results if 1 in result["epochs"]}
    assert len(others) == 2  # two epochs began at step 0, and neither side trained on alone
