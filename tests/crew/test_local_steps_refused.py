"""Local steps of a crew: what is refused, before anybody is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import distlion
from crews import await_true, host_store, make_crew, make_model, start
from distlion.crew import CrewLocalSteps
from distlion.errors import CrewError, InvalidArgumentError, NonFiniteError, UnsupportedTypeError
from local_crews import EVERY, check_equal, connect, train


def make_votes() -> torch.optim.Optimizer:
    return distlion.DistributedLion(make_model(0).parameters())


def make_adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW(make_model(0).parameters())


def make_odd_sgd() -> torch.optim.Optimizer:
    inner = torch.optim.SGD(make_model(0).parameters(), lr=0.1)
    inner.param_groups[0]["warm_up"] = object()
    return inner


def be_refused(
    rank: int,
    size: int,
    port: int,
    make: Callable[[], torch.optim.Optimizer],
    options: dict[str, Any],
    error: type[Exception],
    words: str,
) -> bool:
    """In a process of its own: nobody closes the connections of a crew that was never formed."""
    crew = make_crew(port)
    with pytest.raises(error, match=words):
        crew.local_steps(make(), **options)
    return True


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"nodes": distlion.Nodes(ranks_per_node=2)},
            InvalidArgumentError,
            "nodes= cannot be used",
        ),
        ({"every": 0}, InvalidArgumentError, "every=0: expected 1 or more"),
    ],
)
def test_options_that_a_crew_cannot_have(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    store = host_store()
    assert start(be_refused, 1, store.port, make_adamw, options, error, words) == [True]


def test_an_inner_optimizer_that_votes_itself_is_refused() -> None:
    store, words = host_store(), "takes steps without other workers"
    given = make_votes, {}, UnsupportedTypeError, words
    assert start(be_refused, 1, store.port, *given) == [True]


def test_hyperparameters_that_cannot_be_handed_over_are_refused() -> None:
    store = host_store()
    given = make_odd_sgd, {}, CrewError, "numbers, strings"
    assert start(be_refused, 1, store.port, *given) == [True]


def spoil(rank: int, size: int, port: int) -> dict[str, Any]:
    """A delta is not finite in one period, and all go on."""
    crew, raised = make_crew(port, min_workers=size, max_workers=size), []

    def act(optimizer: CrewLocalSteps) -> None:
        own = next(iter(optimizer.list_pairs()))[0]
        if optimizer.local_step == 2 * EVERY + 1 and not raised:
            with torch.no_grad():
                kept, own[0, 0] = own[0, 0].clone(), torch.nan if rank else own[0, 0]
            try:
                optimizer.vote()
            except NonFiniteError as error:
                raised.append(error.culprits)
            with torch.no_grad():
                own[0, 0] = kept

    result = train(crew, seed=rank, size=size, goal=4 * EVERY, each=act)
    return {**result, "raised": raised}


def test_a_delta_that_is_not_finite_stops_all_and_all_go_on() -> None:
    store = host_store()
    results = start(spoil, 2, store.port)
    check_equal(results)
    for result in results:
        assert len(result["raised"]) == 1
        assert result["counts"] == (4 * EVERY, 4)


def write(rank: int, size: int, port: int) -> dict[str, Any]:
    """One worker writes to its weights after a vote, and all vote without a step."""
    crew, raised = make_crew(port, min_workers=size, max_workers=size), []

    def act(optimizer: CrewLocalSteps) -> None:
        if optimizer.local_step != 2 * EVERY or raised:
            return
        own, common = optimizer.list_pairs()[0]
        with torch.no_grad():
            own[0, 0] += rank
        try:
            optimizer.vote()
        except InvalidArgumentError as error:
            raised.append(str(error))
            assert not torch.equal(own, common)
            with torch.no_grad():
                own.copy_(common)
            optimizer.progress = optimizer.progress
        raised.append("")

    result = train(crew, seed=rank, size=size, goal=4 * EVERY, each=act)
    return {**result, "raised": raised}


def test_a_vote_without_a_step_does_not_overwrite_what_was_written() -> None:
    store = host_store()
    results = start(write, 2, store.port)
    check_equal(results)
    assert results[0]["raised"] == [""]
    assert "was written to between two periods" in results[1]["raised"][0]


def come_with_two_groups(rank: int, size: int, port: int) -> dict[str, Any] | bool:
    """The last worker comes late, and its inner optimizer has a group more."""
    store = connect(port)
    if rank < size - 1:
        crew = make_crew(port, min_workers=2, max_workers=size)

        def act(optimizer: CrewLocalSteps) -> None:
            if optimizer.local_step == 2 * EVERY + 1 and not store.check(["come"]):
                store.set("come", "")
            if optimizer.local_step == 2 * EVERY + 2:
                await_true(lambda: crew.wants_change)

        buffers = [torch.zeros(3)]
        return train(crew, seed=rank, size=size - 1, goal=6 * EVERY, each=act, buffers=buffers)
    store.wait(["come"])
    model = make_model(rank)
    inner = torch.optim.AdamW([{"params": [each]} for each in model.named_parameters()], lr=1e-2)
    buffers = [torch.ones(3)]
    before = [each.detach().clone() for each in [*model.parameters(), *buffers]]
    settings: dict[str, Any] = {
        "every": EVERY,
        "timeouts": distlion.Timeouts(step_s=4),
        "replicas": distlion.Replicas(check_every=3),
    }
    refused = pytest.raises(CrewError, match="has 1 param groups, and this one 4")
    with refused, make_crew(port, min_workers=2, max_workers=size) as crew:
        crew.local_steps(inner, exchange=distlion.AllReduce(), buffers=buffers, **settings)
    return all(map(torch.equal, before, [*model.parameters(), *buffers]))


def test_a_newcomer_whose_inner_optimizer_has_other_groups_takes_nothing() -> None:
    store = host_store()
    *results, is_untouched = start(come_with_two_groups, 3, store.port)
    assert is_untouched
    check_equal(results)
    for result in results:
        assert result["counts"] == (6 * EVERY, 6)


class Counter:
    """An object that is carried, whose state becomes a tensor during training."""

    def __init__(self) -> None:
        self.kept: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["kept"]


def carry_a_tensor(rank: int, size: int, port: int) -> dict[str, Any] | str:
    """The last worker comes late, when no member can hand over what it carries."""
    store, counter = connect(port), Counter()
    crew = make_crew(port, min_workers=2, max_workers=size)

    def act(optimizer: CrewLocalSteps) -> None:
        if optimizer.local_step == 0 and not crew._membership.carried.has(counter):
            crew.carry(counter=counter)
        if optimizer.local_step == 2 * EVERY + 1:
            counter.kept = torch.ones(3)
            store.set("come", "")
        if optimizer.local_step == 2 * EVERY + 2:
            await_true(lambda: crew.wants_change)

    if rank < size - 1:
        return train(crew, seed=rank, size=size - 1, goal=6 * EVERY, each=act)
    store.wait(["come"])
    with pytest.raises(CrewError, match="nothing to hand over") as caught:
        train(crew, seed=rank, size=size, goal=6 * EVERY, each=act)
    return str(caught.value)


def test_members_that_cannot_hand_over_their_state_train_on() -> None:
    store = host_store()
    *results, said = start(carry_a_tensor, 3, store.port)
    assert "counter.kept is a tensor" in said
    check_equal(results)
    for result in results:
        assert result["counts"] == (6 * EVERY, 6)
