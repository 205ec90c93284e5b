"""Compare every rule under every pattern with the baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distlion.errors import InvalidArgumentError
from distlion.votes import RULES, Aggregation, MajorityVote, QuantizedVote
from distlion_lab.planning.forecast import Forecast
from distlion_lab.planning.gradient_all_reduce import (
    BASELINES,
    GradientAllReduce,
    forecast_all_reduce,
)
from distlion_lab.planning.scenario import MAX_NODES, Scenario
from distlion_lab.planning.votes import forecast_votes, list_able

THRESHOLD = 0.05
"""Gain below which compression is not worth a change of optimizer."""

REGIME_FACTORS = (5.0, 2.0, 1.05)
"""Speed-ups for which a plan names the rate; Lion Cub (arXiv:2411.16462, v1) reports 5."""

LOWEST_RATE, HIGHEST_RATE = 1e5, 1e13
_RATES_A_DECADE = 8


@dataclass(frozen=True)
class Forecasts:
    """All forecasts for one scenario; ``ranked`` has the fastest first."""

    scenario: Scenario
    ranked: tuple[Forecast, ...]

    @property
    def best_vote(self) -> Forecast:
        """The fastest vote."""
        return next(forecast for forecast in self.ranked if forecast.votes)

    @property
    def best_baseline(self) -> Forecast:
        """The fastest uncompressed all-reduce, overlapped as DDP does it."""
        return next(forecast for forecast in self.ranked if not forecast.votes)

    @property
    def gain(self) -> float:
        """Gain of the fastest vote over the fastest baseline: 0.05 is 5 % faster."""
        return self.best_baseline.step_s / self.best_vote.step_s - 1


def compare_methods(scenario: Scenario) -> Forecasts:
    """Forecast every listed rule under every pattern, overlapped and not, and every baseline."""
    forecasts = [forecast_all_reduce(scenario, baseline) for baseline in BASELINES]
    forecasts += [
        forecast_votes(scenario, named.rule, pattern, overlap=overlap)
        for named in RULES.values()
        if named.listed
        for pattern in list_able(scenario, named.rule)
        for overlap in (True, False)
    ]
    return Forecasts(scenario, tuple(sorted(forecasts, key=lambda forecast: forecast.step_s)))


def fastest_vote(scenario: Scenario, rule: Aggregation) -> Forecast:
    """Forecast a rule under its fastest pattern, with overlap or without."""
    forecasts = [
        forecast_votes(scenario, rule, pattern, overlap=overlap)
        for pattern in list_able(scenario, rule)
        for overlap in (True, False)
    ]
    return min(forecasts, key=lambda forecast: forecast.step_s)


def fastest_all_reduce(scenario: Scenario, *, bits: int | None = None) -> Forecast:
    """Forecast the fastest baseline, among all or among those with ``bits``."""
    forecasts = [
        forecast_all_reduce(scenario, baseline)
        for baseline in BASELINES
        if bits in (None, baseline.bits)
    ]
    return min(forecasts, key=lambda forecast: forecast.step_s)


def speed_up(scenario: Scenario) -> float:
    """Return the speed-up of majority vote over fp32 ring all-reduce.

    The comparison of Lion Cub, arXiv:2411.16462: Lion with one-bit votes against Lion with a
    full-precision all-reduce.
    """
    baseline = forecast_all_reduce(scenario, GradientAllReduce(32, "ring"))
    return baseline.step_s / fastest_vote(scenario, MajorityVote()).step_s


def gain_over_baselines(scenario: Scenario) -> float:
    """Return the speed-up of majority vote over the fastest uncompressed all-reduce."""
    return fastest_all_reduce(scenario).step_s / fastest_vote(scenario, MajorityVote()).step_s


def find_rate(
    scenario: Scenario, factor: float, *, ratio: Callable[[Scenario], float] = speed_up
) -> float | None:
    """Find the highest rate between nodes that still reaches a speed-up.

    Args:
        scenario: Everything else.
        factor: The speed-up, above 0.
        ratio: Computes the speed-up of a scenario.

    Returns:
        Payload bits a second, to 0.1 %. None where no rate from 100 kbit/s to 10 Tbit/s reaches
        the speed-up; 10 Tbit/s where all of them do.

    Raises:
        InvalidArgumentError: ``factor`` is not above 0.
    """
    if not 0 < factor < math.inf:
        raise InvalidArgumentError(f"factor is {factor!r}, expected a number above 0")
    above = HIGHEST_RATE
    for rate in reversed(spread(LOWEST_RATE, HIGHEST_RATE, _RATES_A_DECADE)):
        if ratio(scenario.with_rate(rate)) >= factor:
            return _bisect(scenario, factor, ratio, rate, above)
        above = rate
    return None


def _bisect(
    scenario: Scenario,
    factor: float,
    ratio: Callable[[Scenario], float],
    reached: float,
    missed: float,
) -> float:
    while missed > 1.001 * reached:
        middle = math.sqrt(reached * missed)
        if ratio(scenario.with_rate(middle)) >= factor:
            reached = middle
        else:
            missed = middle
    return reached


def spread(lowest: float, highest: float, per_decade: int) -> list[float]:
    """List numbers from ``lowest`` to ``highest``, evenly on a logarithmic scale."""
    count = round(per_decade * math.log10(highest / lowest))
    return [lowest * (highest / lowest) ** (i / count) for i in range(count + 1)]


def sweep(scenario: Scenario) -> dict[str, object]:
    """Forecast efficiency against rate and number of nodes, for figures.

    Returns:
        ``rates`` and ``nodes``, each a dict of ``x`` and ``efficiency`` by name of the method.
    """
    rates = spread(1e7, 1e12, 6)
    nodes = sorted({2**i for i in range(1, 17)} | {10**i for i in range(1, 6)} | {MAX_NODES})
    return {
        "rates": {
            "x": rates,
            "efficiency": _efficiencies([scenario.with_rate(rate) for rate in rates]),
        },
        "nodes": {
            "x": nodes,
            "efficiency": _efficiencies([scenario.with_nodes(n) for n in nodes]),
        },
    }


def _efficiencies(scenarios: Sequence[Scenario]) -> dict[str, list[float]]:
    series: dict[str, Callable[[Scenario], Forecast]] = {
        "fp32 all-reduce": lambda s: fastest_all_reduce(s, bits=32),
        "fp16 all-reduce": lambda s: fastest_all_reduce(s, bits=16),
        "QuantizedVote(bits=4)": lambda s: fastest_vote(s, QuantizedVote(bits=4)),
        "MajorityVote()": lambda s: fastest_vote(s, MajorityVote()),
    }
    return {
        name: [forecast(scenario).efficiency for scenario in scenarios]
        for name, forecast in series.items()
    }
