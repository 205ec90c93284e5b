"""Advice in plain words, from forecasts."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from distlion.errors import InvalidArgumentError
from distlion_lab.planning.forecast import Forecast
from distlion_lab.planning.local_steps import advise_local, list_sites
from distlion_lab.planning.planner import (
    HIGHEST_RATE,
    REGIME_FACTORS,
    THRESHOLD,
    Forecasts,
    find_rate,
    gain_over_baselines,
    speed_up,
    sweep,
)
from distlion_lab.planning.quantity import format_rate
from distlion_lab.planning.scenario import Scenario

DO_NOT_COMPRESS = "Do not compress here"

_SMALL_PART = 0.1
"""Communication as a share of computing, below which it is called a small part."""

TIME_ONLY = (
    "This forecast is of time. Rules also differ in the accuracy that training ends with: see the "
    'documentation, "Choose a rule", and "The recipe" for learning rates.'
)
"""Printed below a plan."""


@dataclass(frozen=True)
class Regime:
    """The highest rate at which majority vote reaches a speed-up over another method.

    Attributes:
        factor: The speed-up.
        against: The other method.
        rate_bit_per_s: That rate, in bits of payload; None where no rate reaches the speed-up.
    """

    factor: float
    against: str
    rate_bit_per_s: float | None

    def describe(self) -> str:
        """Write it as a phrase."""
        if self.rate_bit_per_s is None:
            where = "at no rate"
        elif self.rate_bit_per_s >= HIGHEST_RATE:
            where = "at any rate"
        else:
            where = f"up to {format_rate(self.rate_bit_per_s)}/s"
        return f"{self.factor:g}x against {self.against}: {where}"


@dataclass(frozen=True)
class Advice:
    """A recommendation for or against compression, with its reason.

    Attributes:
        compress: True if compression is worth it.
        text: The answer and its reason.
        regimes: Limits of the speed-ups.
    """

    compress: bool
    text: str
    regimes: tuple[Regime, ...]


def advise(forecasts: Forecasts, *, threshold: float = THRESHOLD) -> Advice:
    """Compare the fastest vote with the fastest uncompressed all-reduce.

    Args:
        forecasts: All forecasts.
        threshold: Gain from which compressing is advised: 0.05 is 5 %.

    Raises:
        InvalidArgumentError: The threshold is below 0.
    """
    if threshold < 0:
        raise InvalidArgumentError(f"threshold is {threshold!r}, expected 0 or more")
    compress = forecasts.scenario.nodes > 1 and forecasts.gain >= threshold
    text = _recommend(forecasts) if compress else _refuse(forecasts, threshold)
    return Advice(compress, text, find_regimes(forecasts.scenario))


def find_regimes(scenario: Scenario) -> tuple[Regime, ...]:
    """Find the limits of ``REGIME_FACTORS`` and of the gain over the best baseline."""
    if scenario.nodes == 1:
        return ()
    regimes = [
        Regime(factor, "fp32 ring all-reduce", find_rate(scenario, factor, ratio=speed_up))
        for factor in REGIME_FACTORS
    ]
    factor = 1 + THRESHOLD
    best = find_rate(scenario, factor, ratio=gain_over_baselines)
    return (*regimes, Regime(factor, "the best all-reduce", best))


def build_record(forecasts: Forecasts, advice: Advice) -> dict[str, object]:
    """Return all results of a plan as JSON types; figures read this."""
    return {
        "scenario": forecasts.scenario.to_json(),
        "advice": dataclasses.asdict(advice),
        "gain": forecasts.gain,
        "local_steps": advise_local(forecasts.scenario).to_json(),
        "sites": [site.to_json() for site in list_sites(forecasts.scenario)],
        "forecasts": [forecast.to_json() for forecast in forecasts.ranked],
        "sweep": sweep(forecasts.scenario),
    }


def _recommend(forecasts: Forecasts) -> str:
    best, baseline = forecasts.best_vote, forecasts.best_baseline
    overlap = "with overlap" if best.overlap else "without overlap"
    return (
        f"Compress: {best.method} by {best.pattern} {overlap} takes {best.step_s:.3g} s a step, "
        f"{baseline.method} ({baseline.pattern}) {baseline.step_s:.3g} s: "
        f"{1 + forecasts.gain:.2f} times as fast. All-reduce leaves {baseline.exposed_s:.3g} s of "
        f"communication that backward does not hide; votes leave {best.exposed_s:.3g} s."
        + _name_host(best)
    )


def _name_host(best: Forecast) -> str:
    """Return a note where the host limits votes, else nothing."""
    if best.processor_s > max(best.host_s, best.communication_s):
        return (
            f" The cores that compute also work on packets for {best.processor_s:.3g} s, longer "
            f"than the link takes, {best.communication_s:.3g} s: a faster link would gain little."
        )
    if best.host_s <= best.communication_s:
        return ""
    return (
        f" The host frames, checks and counts for {best.host_s:.3g} s, longer than the link takes, "
        f"{best.communication_s:.3g} s: a faster link would gain little."
    )


def _refuse(forecasts: Forecasts, threshold: float) -> str:
    if forecasts.scenario.nodes == 1:
        return f"{DO_NOT_COMPRESS}: with a single node there is no network between nodes."
    best, baseline = forecasts.best_vote, forecasts.best_baseline
    # Down, so that what is below a threshold also looks so.
    gain = math.floor(1000 * forecasts.gain) / 1000
    return (
        f"{DO_NOT_COMPRESS}: {best.method} by {best.pattern} would take {best.step_s:.3g} s a "
        f"step, {baseline.method} ({baseline.pattern}) takes {baseline.step_s:.3g} s. The gain of "
        f"{gain:+.1%} is below {100 * threshold:g}%. "
        f"{_find_reason(forecasts, best, baseline)}{_name_host(best)}"
    )


def _find_reason(forecasts: Forecasts, best: Forecast, baseline: Forecast) -> str:
    hidden_s = baseline.communication_s - baseline.exposed_s
    costs = (
        f"Votes cost {best.arithmetic_s:.3g} s of arithmetic and {best.exposed_s:.3g} s of "
        f"communication that backward does not hide, all-reduce {baseline.arithmetic_s:.3g} s and "
        f"{baseline.exposed_s:.3g} s."
    )
    if best.arithmetic_s + best.exposed_s >= baseline.arithmetic_s + baseline.exposed_s:
        return costs
    if hidden_s >= 0.5 * baseline.communication_s:
        return (
            f"Backward hides {hidden_s:.3g} s of the {baseline.communication_s:.3g} s that the "
            "all-reduce communicates."
        )
    if baseline.exposed_s >= _SMALL_PART * forecasts.scenario.compute_s:
        return costs
    return (
        f"Communication is a small part of a step: {baseline.exposed_s:.3g} s beside "
        f"{forecasts.scenario.compute_s:.3g} s of compute."
    )
