"""A new rule and a new pattern take one file and one line: everything else finds them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import typer
from torch import Tensor

import distlion
import pattern_exam
import rule_exam
import state_exam
import toys
from cluster import run_workers
from distlion.votes import Aggregation
from distlion.wire import MOST_BYTES_AT_ONCE, Exchange, LinkModel
from distlion.wire.cost import choose_exchange
from distlion_lab.planning.planner import compare_methods
from distlion_lab.planning.scenario import Scenario
from distlion_lab.training.methods import find_method
from distlion_lab.training.train_settings import TrainSettings
from distlion_netlab.command import netlab_app
from distlion_netlab.method_names import parse_vote
from drawn import set_grads
from leaning_vote import LeaningVote

WORKERS, STEPS = 3, 5
SIZES = (1, 65, 4133)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with toys.registered():
        yield


NEW_RULES = [toys.CautiousVote(), LeaningVote()]


@pytest.mark.parametrize(
    "check",
    [*rule_exam.CHECKS, state_exam.check_what_is_kept],
    ids=lambda check: check.__name__,
)
@pytest.mark.parametrize("rule", NEW_RULES, ids=repr)
def test_a_new_rule_is_examined(check: Callable[[Aggregation], None], rule: Aggregation) -> None:
    check(rule)


@pytest.mark.parametrize("check", pattern_exam.CHECKS, ids=lambda check: check.__name__)
def test_a_new_pattern_is_examined(check: Callable[[Exchange], None]) -> None:
    check(toys.AtOnce())


def make_params() -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"p{n}", torch.nn.Parameter(torch.full((n,), 0.5))) for n in SIZES]


def train_really(
    rank: int, world_size: int, rule: Aggregation
) -> tuple[list[Tensor], list[dict[str, Tensor]], int]:
    """Train with both; in the middle, go on from a saved state."""
    with toys.registered():
        return _train(rank, rule)


def _train(rank: int, rule: Aggregation) -> tuple[list[Tensor], list[dict[str, Tensor]], int]:
    params = make_params()

    def make_optimizer(**arguments: Any) -> distlion.DistributedLion:
        return distlion.DistributedLion(params, lr=1e-2, exchange=toys.AtOnce(), **arguments)

    optimizer = make_optimizer(aggregation=rule)
    for step in range(STEPS):
        if step == 2:
            state, optimizer = optimizer.state_dict(), make_optimizer()
            optimizer.load_state_dict(state)
        set_grads([param for _, param in params], rank, step)
        optimizer.step()
    kept = [dict(optimizer.state[param]) for _, param in params]
    return [param.detach() for _, param in params], kept, optimizer.traffic.sent_bytes


@pytest.mark.distributed
@pytest.mark.parametrize("rule", NEW_RULES, ids=repr)
def test_workers_that_vote_by_them_equal_virtual_ones(rule: Aggregation) -> None:
    params = make_params()
    cluster = distlion.VirtualCluster(params, workers=WORKERS, lr=1e-2, aggregation=rule)
    for step in range(STEPS):
        for worker in range(WORKERS):
            set_grads([param for _, param in params], worker, step)
            cluster.collect(worker)
        cluster.step()
    for rank, (found, kept, sent_bytes) in enumerate(run_workers(train_really, WORKERS, rule)):
        for mine, entry, (_, param) in zip(found, kept, params, strict=True):
            assert torch.equal(mine, param.detach())
            assert set(entry) == {"exp_avg", *rule.worker_state}
            for key, value in entry.items():
                assert bool(value.any())
                assert torch.equal(value, cluster.state[param][key][rank])
        assert sent_bytes > 0


def test_commands_know_their_names() -> None:
    settings = TrainSettings.with_defaults(rule="cautious", exchange="at-once")
    assert settings.method.votes
    assert parse_vote("cautious-at-once-overlap") == {
        "aggregation": toys.CautiousVote(),
        "exchange": toys.AtOnce(),
        "overlap": True,
    }
    sweep = typer.main.get_command(netlab_app).commands["sweep"]  # type: ignore[attr-defined]
    swept = next(param for param in sweep.params if param.name == "method")
    assert "majority-at-once" in swept.get_default(typer.Context(sweep))
    assert "CautiousVote" in find_method("cautious-sync-10").definition


def test_forecasts_and_auto_choose_among_them() -> None:
    # Votes too large for one round of AllGather, and a link on which only rounds count.
    link = LinkModel(1.0, 1e15, ring_above_bytes=MOST_BYTES_AT_ONCE)
    scenario = Scenario(n_params=1 << 24, nodes=4, link=link, compute_s=1.0)
    methods = {(each.method, each.pattern) for each in compare_methods(scenario).ranked}
    assert ("CautiousVote()", "AtOnce()") in methods
    shape = toys.CautiousVote().shape_of(1 << 24, 4)
    assert choose_exchange(shape, link) == toys.AtOnce()
