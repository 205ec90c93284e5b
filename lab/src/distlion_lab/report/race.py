"""A race of two runs to one loss, over links of several rates."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The first steps of a process are slower.
_UNTIMED_STEPS = 5
_LEAST_TIMED_STEPS = 25


@dataclass(frozen=True)
class Lap:
    """Both runs over links of one rate.

    Attributes:
        rate: Rate of each link, such as ``100mbit``.
        how: How the seconds were found, in words.
        seconds: For each run, seconds of training until each of its validations.
    """

    rate: str
    how: str
    seconds: tuple[Sequence[float], ...]


def measure_seconds(record: Mapping[str, Any]) -> list[float]:
    """Return the seconds of training until each validation, without the validations themselves."""
    evaluations, step_ends = record["evaluations"], record["losses"]["seconds"]
    seconds, validating_s = [], 0.0
    for step, end in zip(evaluations["step"], evaluations["seconds"], strict=True):
        begin = step_ends[step - 1] if step else 0.0
        seconds.append(begin - validating_s if step else 0.0)
        validating_s += end - begin
    return seconds


def count_timed_steps(period: int) -> int:
    """Return the steps of a short run: whole periods, and one more than the untimed steps take.

    Args:
        period: Steps from one that sends what the others do not, such as a vote, to the next.
    """
    return period * math.ceil(max(_LEAST_TIMED_STEPS, _UNTIMED_STEPS + 1 + period) / period)


def extrapolate_seconds(
    record: Mapping[str, Any], short: Mapping[str, Any], *, period: int = 1
) -> list[float]:
    """Return the same from the median step of a short run of ``count_timed_steps(period)`` steps.

    Within a period each step has a median of its own: that of all steps would leave out the vote of
    every 8th one.
    """
    ends = short["losses"]["seconds"][_UNTIMED_STEPS:]
    each_s = [end - begin for begin, end in itertools.pairwise(ends)]
    each_s = each_s[len(each_s) % period :]
    step_s = statistics.mean(statistics.median(each_s[at::period]) for at in range(period))
    return [step * step_s for step in record["evaluations"]["step"]]


def compute_seconds(record: Mapping[str, Any], rate_bit_per_s: float) -> list[float]:
    """Return the same with the time added in which a link carries the bytes that a worker sent."""
    step_bits = 8 * record["sent_bytes_per_worker"] / record["settings"]["steps"]
    return [
        seconds + step * step_bits / rate_bit_per_s
        for step, seconds in zip(
            record["evaluations"]["step"], measure_seconds(record), strict=True
        )
    ]


def find_target(records: Sequence[Mapping[str, Any]]) -> float:
    """Return the lowest validation loss that all runs reach."""
    return float(max(min(record["evaluations"]["loss"]) for record in records))


def find_arrival(record: Mapping[str, Any], seconds: Sequence[float], target: float) -> float:
    """Return the seconds until a run first reaches a loss, on a line between two validations.

    Args:
        record: Record of the run, whose loss reaches ``target`` at some validation.
        seconds: Seconds until each of its validations.
        target: The loss.
    """
    losses = record["evaluations"]["loss"]
    at = next(index for index, loss in enumerate(losses) if loss <= target)
    if at == 0:
        return float(seconds[0])
    share = (losses[at - 1] - target) / (losses[at - 1] - losses[at])
    return float(seconds[at - 1] + share * (seconds[at] - seconds[at - 1]))
