"""Local steps in a plan: the cost of a step with a vote every H steps, and the choice of H."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace

from distlion.step import check_count
from distlion.votes import ScaledVote
from distlion_lab.planning.line import model_line
from distlion_lab.planning.planner import compare_methods
from distlion_lab.planning.scenario import Scenario
from distlion_lab.planning.votes import forecast_votes, list_able

PERIODS = (4, 8, 16, 32)
"""Values of H that a plan weighs; the study of local steps trains with these."""
SHARE = 0.25
"""Communication as a share of computing, at most: beyond it, a plan takes more local steps."""
SITE_RATES = (1e6, 3e6, 1e7, 3e7, 1e8)
"""Line rates between sites, in bit/s."""
SITE_LATENCIES_S = (0.05, 0.1, 0.2)


@dataclass(frozen=True)
class LocalForecast:
    """The average step of ``LocalSteps``.

    Attributes:
        every: H.
        vote_s: Seconds of a vote: arithmetic and communication.
        step_s: Seconds of a step.
        sent_bytes: Bytes that the busiest node sends in a step.
        bits_per_parameter: The same, in bits for each parameter.
        efficiency: Share of a step that is compute.
    """

    every: int
    vote_s: float
    step_s: float
    sent_bytes: float
    bits_per_parameter: float
    efficiency: float


def forecast_local(scenario: Scenario, every: int) -> LocalForecast:
    """Forecast a step of ``LocalSteps`` with ``ScaledVote``, by its fastest exchange.

    Equation:
        T = C + U + V / H
        V = A + r L + 8 b / R    (as ``forecast_votes`` without overlap)
        C is ``compute_s``, U the update of one worker's optimizer. V is the seconds of a vote, of
        which A is arithmetic; r is its rounds, L the latency of one. b is the bytes that the
        busiest node sends, R the rate of its link. H is ``every``.

    Args:
        scenario: Model, workers and network; momenta are not averaged.
        every: H, 1 or more.

    Raises:
        InvalidArgumentError: ``every`` is out of range.
    """
    check_count("every", every)
    scenario = replace(scenario, momentum_sync_every=None)
    votes = [
        forecast_votes(scenario, ScaledVote(), pattern, overlap=False)
        for pattern in list_able(scenario, ScaledVote())
    ]
    vote = min(votes, key=lambda forecast: forecast.step_s)
    base_s = _base_s(scenario)
    vote_s = vote.step_s - scenario.compute_s if scenario.nodes > 1 else 0.0
    step_s = base_s + vote_s / every
    return LocalForecast(
        every=every,
        vote_s=vote_s,
        step_s=step_s,
        sent_bytes=vote.sent_bytes / every,
        bits_per_parameter=vote.bits_per_parameter / every,
        efficiency=scenario.compute_s / step_s,
    )


def _base_s(scenario: Scenario) -> float:
    """Return the seconds of a step without any communication."""
    n_params = scenario.n_params
    return scenario.compute_s + scenario.machine.commit_s(n_params, n_params, 0)


@dataclass(frozen=True)
class LocalAdvice:
    """A recommended period of votes, with its reason.

    Attributes:
        every: H; 1 for a vote in each step.
        text: The answer and its reason.
        all_reduce_s: Seconds of a step with the fastest all-reduce.
        each_step_s: Seconds of a step with the fastest votes of each step.
        local: A step at each of ``PERIODS``.
    """

    every: int
    text: str
    all_reduce_s: float
    each_step_s: float
    local: tuple[LocalForecast, ...]

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON types."""
        return dataclasses.asdict(self)


PRICE = (
    "Fewer votes cost progress: with 8 workers, AdamW with a vote every 8 steps trailed DDP with "
    "AdamW by 0.21 nats on text and by 0.24 on small images after as many steps, and with one "
    "every 32 steps by 0.48 on text."
)
"""From benchmarks/results/local_steps.md and periods.md."""


def advise_local(scenario: Scenario) -> LocalAdvice:
    """Choose the smallest H at which communication adds at most a quarter to computing.

    A vote in each step is chosen where it meets this limit. The largest of ``PERIODS`` is chosen
    where none does: more local steps than that have not been compared in training.
    """
    forecasts = compare_methods(scenario)
    all_reduce_s, each_s = forecasts.best_baseline.step_s, forecasts.best_vote.step_s
    local = tuple(forecast_local(scenario, every) for every in PERIODS)
    allowed_s = (1 + SHARE) * _base_s(scenario)
    if scenario.nodes == 1:
        return LocalAdvice(1, "There is nobody to vote with.", all_reduce_s, each_s, local)
    if min(each_s, all_reduce_s) <= allowed_s:
        text = (
            f"No local steps here: communication in each step adds at most {SHARE:.0%}. A step "
            f"takes {min(each_s, all_reduce_s):.3g} s."
        )
        return LocalAdvice(1, text, all_reduce_s, each_s, local)
    enough = next((each for each in local if each.step_s <= allowed_s), local[-1])
    nodes = ""
    if scenario.gpus_per_node > 1:
        nodes = f", nodes=distlion.Nodes(ranks_per_node={scenario.gpus_per_node})"
    text = (
        f"Vote every {enough.every} steps, by distlion.LocalSteps(inner, every={enough.every}"
        f"{nodes}): a step takes {enough.step_s:.3g} s on average. A vote in each step would take "
        f"{each_s:.3g} s, an all-reduce {all_reduce_s:.3g} s. {PRICE}"
    )
    if enough.step_s > allowed_s:
        text += f" A vote takes {enough.vote_s:.3g} s even so."
    return LocalAdvice(enough.every, text, all_reduce_s, each_s, local)


@dataclass(frozen=True)
class Site:
    """A link between sites, with advice on how often to vote over it.

    Attributes:
        rate_bit_per_s: Rate of the line.
        latency_s: Latency of a round.
        advice: The recommended period, with forecasts of a step.
    """

    rate_bit_per_s: float
    latency_s: float
    advice: LocalAdvice

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON types."""
        return dataclasses.asdict(self)


def list_sites(scenario: Scenario) -> list[Site]:
    """Advise the same training at 1 to 100 Mbit/s and at 50 to 200 ms of latency."""
    return [
        Site(rate, latency_s, advise_local(_move(scenario, rate, latency_s)))
        for rate in SITE_RATES
        for latency_s in SITE_LATENCIES_S
    ]


def _move(scenario: Scenario, rate_bit_per_s: float, latency_s: float) -> Scenario:
    """Return the same training between other sites."""
    link = model_line(
        rate_bit_per_s,
        latency_s=latency_s,
        message_s=scenario.link.message_s,
        full_duplex=scenario.link.full_duplex,
    )
    return replace(scenario, link=link)
