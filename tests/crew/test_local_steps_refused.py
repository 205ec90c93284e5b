"""Local steps of a crew: what is refused, before anybody is waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distlion
from crews import host_store, make_crew, make_model, start
from distlion.crew import CrewLocalSteps
from distlion.errors import CrewError, InvalidArgumentError, NonFiniteError, UnsupportedTypeError
from local_crews import EVERY, check_equal, train


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"delay": 1}, InvalidArgumentError, "delay=1 cannot be used in a crew: where members"),
        ({"nodes": distlion.Nodes(size=2)}, InvalidArgumentError, "nodes= cannot be used"),
        ({"every": 0}, InvalidArgumentError, "every=0: expected 1 or more"),
    ],
)
def test_options_that_a_crew_cannot_have(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    store = host_store()
    crew = make_crew(store.port)
    inner = torch.optim.AdamW(make_model(0).parameters())
    with pytest.raises(error, match=words):
        crew.local_steps(inner, **options)


def test_an_inner_optimizer_that_votes_itself_is_refused() -> None:
    store = host_store()
    crew = make_crew(store.port)
    with pytest.raises(UnsupportedTypeError, match="takes steps without other workers"):
        crew.local_steps(distlion.DistributedLion(make_model(0).parameters()))


def test_hyperparameters_that_cannot_be_handed_over_are_refused() -> None:
    store = host_store()
    crew = make_crew(store.port)
    inner = torch.optim.SGD(make_model(0).parameters(), lr=0.1)
    inner.param_groups[0]["warm_up"] = object()
    with pytest.raises(CrewError, match="numbers, strings"):
        crew.local_steps(inner)


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
