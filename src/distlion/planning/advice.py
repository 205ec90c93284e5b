"""What a comparison means, in plain words."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from distlion.errors import InvalidArgumentError
from distlion.planning.forecast import Forecast
from distlion.planning.planner import (
    HIGHEST_RATE,
    REGIME_FACTORS,
    THRESHOLD,
    Comparison,
    find_rate,
    gain_over_rivals,
    speed_up,
    sweep,
)
from distlion.planning.rate import format_rate
from distlion.planning.scenario import Scenario

DO_NOT_COMPRESS = "Do not compress here"


@dataclass(frozen=True)
class Regime:
    """Up to which rate majority vote is some times faster than another method.

    Attributes:
        factor: How many times faster.
        against: Than what.
        rate_bit_per_s: The highest such rate, in bits of payload; None where there is none.
    """

    factor: float
    against: str
    rate_bit_per_s: float | None

    def describe(self) -> str:
        """Say it."""
        if self.rate_bit_per_s is None:
            where = "at no rate"
        elif self.rate_bit_per_s >= HIGHEST_RATE:
            where = "at any rate"
        else:
            where = f"up to {format_rate(self.rate_bit_per_s)}/s"
        return f"{self.factor:g}x against {self.against}: {where}"


@dataclass(frozen=True)
class Advice:
    """Whether to compress, and why.

    Attributes:
        compress: Whether it is worth it.
        text: The answer and its reason.
        regimes: Where speed-ups end.
    """

    compress: bool
    text: str
    regimes: tuple[Regime, ...]


def advise(comparison: Comparison, *, threshold: float = THRESHOLD) -> Advice:
    """Compare the best of ours with the best uncompressed all-reduce.

    Args:
        comparison: All forecasts.
        threshold: Gain from which compressing is advised: 0.05 is 5 %.

    Raises:
        InvalidArgumentError: The threshold is below 0.
    """
    if threshold < 0:
        raise InvalidArgumentError(f"threshold is {threshold!r}, expected 0 or more")
    compress = comparison.scenario.nodes > 1 and comparison.gain >= threshold
    text = _recommend(comparison) if compress else _refuse(comparison, threshold)
    return Advice(compress, text, find_regimes(comparison.scenario))


def find_regimes(scenario: Scenario) -> tuple[Regime, ...]:
    """Find where speed-ups end: those of ``REGIME_FACTORS`` and the gain over the best rival."""
    if scenario.nodes == 1:
        return ()
    regimes = [
        Regime(factor, "fp32 ring all-reduce", find_rate(scenario, factor, ratio=speed_up))
        for factor in REGIME_FACTORS
    ]
    factor = 1 + THRESHOLD
    best = find_rate(scenario, factor, ratio=gain_over_rivals)
    return (*regimes, Regime(factor, "the best all-reduce", best))


def build_record(comparison: Comparison, advice: Advice) -> dict[str, object]:
    """Return everything that a plan found as JSON can hold it; figures read this."""
    return {
        "scenario": comparison.scenario.to_json(),
        "advice": dataclasses.asdict(advice),
        "gain": comparison.gain,
        "forecasts": [forecast.to_json() for forecast in comparison.forecasts],
        "sweep": sweep(comparison.scenario),
    }


def _recommend(comparison: Comparison) -> str:
    best, rival = comparison.best_vote, comparison.best_rival
    overlap = "with overlap" if best.overlap else "without overlap"
    return (
        f"Compress: {best.method} by {best.pattern} {overlap} takes {best.step_s:.3g} s a step, "
        f"{rival.method} ({rival.pattern}) {rival.step_s:.3g} s: {1 + comparison.gain:.2f} times "
        f"as fast. All-reduce leaves {rival.exposed_s:.3g} s of communication that backward does "
        f"not hide; votes leave {best.exposed_s:.3g} s."
    )


def _refuse(comparison: Comparison, threshold: float) -> str:
    if comparison.scenario.nodes == 1:
        return f"{DO_NOT_COMPRESS}: with a single node there is no network between nodes."
    best, rival = comparison.best_vote, comparison.best_rival
    return (
        f"{DO_NOT_COMPRESS}: {best.method} by {best.pattern} would take {best.step_s:.3g} s a "
        f"step, {rival.method} ({rival.pattern}) takes {rival.step_s:.3g} s. The gain of "
        f"{comparison.gain:+.1%} is below {threshold:.0%}. {_find_reason(comparison, best, rival)}"
    )


def _find_reason(comparison: Comparison, best: Forecast, rival: Forecast) -> str:
    hidden_s = rival.communication_s - rival.exposed_s
    if best.arithmetic_s + best.exposed_s >= rival.arithmetic_s + rival.exposed_s:
        return (
            f"Votes cost {best.arithmetic_s:.3g} s of arithmetic and {best.exposed_s:.3g} s on "
            f"the network, all-reduce {rival.arithmetic_s:.3g} s and {rival.exposed_s:.3g} s."
        )
    if hidden_s >= 0.5 * rival.communication_s:
        return (
            f"Backward hides {hidden_s:.3g} s of the {rival.communication_s:.3g} s that the "
            "all-reduce communicates."
        )
    return (
        f"Communication is a small part of a step: {rival.exposed_s:.3g} s beside "
        f"{comparison.scenario.compute_s:.3g} s of compute."
    )
