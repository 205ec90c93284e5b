"""How often to vote: the equation of the forecast, the choice of H, and links between sites."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import distlion
from cluster import run_workers
from distlion.errors import InvalidArgumentError
from distlion.votes import ScaledVote
from distlion.wire import AllReduce, LinkModel
from distlion_lab.planning.line import model_line
from distlion_lab.planning.local_steps import PERIODS, advise_local, forecast_local, list_sites
from distlion_lab.planning.machine import CPU
from distlion_lab.planning.scenario import Scenario
from distlion_lab.planning.votes import forecast_votes


def make_scenario(**changes: Any) -> Scenario:
    """A GPT of a million parameters on 8 hosts with slow links, as the study trains it."""
    given = {"n_params": 1_074_696, "nodes": 8, "compute_s": 0.2, "machine": CPU}
    given |= {"link": model_line(1e7, latency_s=1e-3)}
    return Scenario(**given | changes)


def base_s(scenario: Scenario) -> float:
    n_params = scenario.n_params
    return scenario.compute_s + scenario.machine.commit_s(n_params, n_params, 0)


@pytest.mark.parametrize("every", PERIODS)
def test_a_step_pays_its_share_of_a_vote(every: int) -> None:
    scenario = make_scenario()
    found = forecast_local(scenario, every)
    vote = forecast_votes(scenario, ScaledVote(), AllReduce(), overlap=False)
    assert found.vote_s <= vote.step_s - scenario.compute_s
    assert found.step_s == pytest.approx(base_s(scenario) + found.vote_s / every)
    assert found.efficiency == pytest.approx(scenario.compute_s / found.step_s)


def test_latency_and_rate_are_in_a_vote() -> None:
    near = forecast_local(make_scenario(link=LinkModel(0.0, 1e6)), 8)
    far = forecast_local(make_scenario(link=LinkModel(0.2, 1e6)), 8)
    # Votes to their owners, and replies back: two rounds.
    assert far.vote_s - near.vote_s == pytest.approx(0.4)
    slow = forecast_local(make_scenario(link=LinkModel(0.0, 5e5)), 8)
    assert slow.vote_s - near.vote_s == pytest.approx(8 * 8 * near.sent_bytes / 1e6)


def test_momenta_are_not_averaged() -> None:
    scenario = make_scenario()
    assert forecast_local(replace(scenario, momentum_sync_every=7), 8) == forecast_local(
        scenario, 8
    )


@pytest.mark.parametrize(
    ("rate_bit_per_s", "latency_s", "every"),
    [(1e10, 1e-4, 1), (1e8, 0.05, 4), (1e7, 0.1, 16), (1e6, 0.05, 32)],
)
def test_the_least_h_that_is_fast_enough_is_chosen(
    rate_bit_per_s: float, latency_s: float, every: int
) -> None:
    link = model_line(rate_bit_per_s, latency_s=latency_s)
    scenario = make_scenario(link=link)
    advice = advise_local(scenario)
    assert advice.every == every
    allowed_s = 1.25 * base_s(scenario)
    by_every = {each.every: each.step_s for each in advice.local}
    too_few = [step_s for period, step_s in by_every.items() if period < every]
    assert all(step_s > allowed_s for step_s in too_few)
    if every == 1:
        assert min(advice.each_step_s, advice.all_reduce_s) <= allowed_s
        assert advice.text.startswith("No local steps here")
    else:
        assert f"distlion.LocalSteps(inner, every={every})" in advice.text


@pytest.mark.parametrize(
    ("gpus_per_node", "ranks_per_node"), [(1, None), (8, 8)], ids=["one", "eight"]
)
def test_the_call_has_the_nodes_that_the_forecast_assumes(
    gpus_per_node: int, ranks_per_node: int | None
) -> None:
    text = advise_local(make_scenario(gpus_per_node=gpus_per_node)).text
    (written,) = re.findall(r"by (distlion\.LocalSteps\(.*?\)): a step", text)
    call = ast.parse(written, mode="eval").body
    assert isinstance(call, ast.Call)
    given = {each.arg: ast.unparse(each.value) for each in call.keywords}
    named = f"distlion.Nodes(ranks_per_node={ranks_per_node})" if ranks_per_node else None
    assert given.pop("nodes", None) == named
    assert given.keys() == {"every"}


@pytest.mark.parametrize("rate_bit_per_s", [5e5, 1e4])
def test_a_vote_that_is_dear_even_so_is_said(rate_bit_per_s: float) -> None:
    scenario = make_scenario(link=model_line(rate_bit_per_s, latency_s=0.2))
    advice = advise_local(scenario)
    assert advice.every == 32
    assert advice.text.endswith("s even so.")


def test_periods_that_local_steps_refuses_are_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        forecast_local(make_scenario(), 0)


def test_one_node_votes_with_nobody() -> None:
    advice = advise_local(make_scenario(nodes=1))
    assert (advice.every, advice.text) == (1, "There is nobody to vote with.")
    assert forecast_local(make_scenario(nodes=1), 8).vote_s == 0


def test_sites_are_those_that_are_asked_for() -> None:
    sites = list_sites(make_scenario())
    assert {site.rate_bit_per_s for site in sites} == {1e6, 3e6, 1e7, 3e7, 1e8}
    assert {site.latency_s for site in sites} == {0.05, 0.1, 0.2}
    # Less of a link never asks for more votes.
    by_place = {(site.rate_bit_per_s, site.latency_s): site.advice.every for site in sites}
    for (rate, latency_s), every in by_place.items():
        assert all(
            every >= other
            for (faster, nearer), other in by_place.items()
            if faster >= rate and nearer <= latency_s
        )


def vote_once(rank: int, world_size: int, n_params: int) -> int:
    """Return the bytes of a vote, as ``LocalSteps`` counts them."""
    param = torch.nn.Parameter(torch.zeros(n_params))
    inner = torch.optim.SGD([param], 0.1)
    optimizer = distlion.LocalSteps(inner, every=1, exchange=AllReduce())
    param.grad = torch.randn(n_params)
    optimizer.step()
    return optimizer.traffic.last_sent_bytes


@pytest.mark.distributed
def test_bytes_are_those_that_are_sent() -> None:
    n_params = 100_003
    sent = run_workers(vote_once, 3, n_params)
    scenario = make_scenario(n_params=n_params, nodes=3)
    vote = forecast_votes(scenario, ScaledVote(), AllReduce(), overlap=False)
    assert sent == [vote.sent_bytes] * 3
