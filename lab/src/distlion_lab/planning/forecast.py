"""One line of a plan: the cost of a step by one method."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from distlion.errors import InvalidArgumentError
from distlion_lab.planning.scenario import Scenario

_COSTED_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Bytes, seconds and money of a step.

    Attributes:
        method: The rule, or the baseline.
        pattern: The exchange, or the baseline's algorithm.
        votes: True if workers vote; False for a baseline.
        overlap: True if communication runs during backward.
        bits_per_parameter: Bits that the busiest node sends for each parameter.
        sent_bytes: Bytes that the busiest node sends.
        total_sent_bytes: Bytes that all nodes send.
        arithmetic_s: Seconds of encoding, counting and committing, or of a baseline's equivalents.
        host_s: Seconds of framing, checking and counting, which the host does even with a GPU.
        communication_s: Seconds of all communication, inside nodes and between them.
        processor_s: Seconds that communication takes from the compute cores: nothing hides them.
        exposed_s: Seconds of communication that backward does not hide, at least ``processor_s``.
        step_s: Seconds of compute, arithmetic and exposed communication.
        efficiency: Share of a step that is compute.
        cost_per_1000_steps: Money for workers and traffic.
    """

    method: str
    pattern: str
    votes: bool
    overlap: bool
    bits_per_parameter: float
    sent_bytes: float
    total_sent_bytes: float
    arithmetic_s: float
    host_s: float
    communication_s: float
    processor_s: float
    exposed_s: float
    step_s: float
    efficiency: float
    cost_per_1000_steps: float

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON types."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class Load:
    """A method's load on network and machine in one step.

    Attributes:
        sent_bytes: Bytes that the busiest node sends.
        total_sent_bytes: Bytes that all nodes send.
        arithmetic_s: Seconds of the busiest worker's arithmetic.
        host_s: Seconds of frames and counting.
        communication_s: Seconds of communication that can start during backward.
        last_bucket_s: Seconds of its last part, which starts when backward ends.
        late_s: Seconds of communication that begins after the last vote; nothing hides it.
        processor_s: Seconds that all communication but the late part takes from the compute cores.
    """

    sent_bytes: float
    total_sent_bytes: float
    arithmetic_s: float
    communication_s: float
    last_bucket_s: float
    host_s: float = 0.0
    late_s: float = 0.0
    processor_s: float = 0.0


def make_forecast(
    scenario: Scenario, load: Load, *, method: str, pattern: str, votes: bool, overlap: bool
) -> Forecast:
    """Forecast a step from a load.

    Raises:
        InvalidArgumentError: A result is not finite.

    Equation:
        exposed = max(T - hideable, T_B, P) + late with overlap, max(T, P) + late without
        step    = compute + arithmetic + exposed
        T is ``load.communication_s``, late ``load.late_s``, T_B is ``load.last_bucket_s``: the last
        bucket's gradients come with the end of backward, so no work is left to hide it behind. P is
        ``load.processor_s``: the cores that work on packets do not compute meanwhile.
    """
    exposed_s = load.communication_s
    if overlap:
        exposed_s = max(exposed_s - scenario.hideable_s, load.last_bucket_s)
    exposed_s = max(exposed_s, load.processor_s) + load.late_s
    step_s = scenario.compute_s + load.arithmetic_s + exposed_s
    workers = scenario.nodes * scenario.gpus_per_node
    money = scenario.price_per_gpu_hour * workers * step_s / 3600
    money += scenario.price_per_gb * load.total_sent_bytes / 1e9
    cost = _COSTED_STEPS * money
    if not (math.isfinite(step_s) and math.isfinite(cost)):
        raise InvalidArgumentError(
            f"by {method} a step takes {step_s:g} s, and {_COSTED_STEPS} of them cost {cost:g}; "
            "expected rates, times and prices whose results are finite"
        )
    return Forecast(
        method=method,
        pattern=pattern,
        votes=votes,
        overlap=overlap,
        bits_per_parameter=8 * load.sent_bytes / scenario.n_params,
        sent_bytes=load.sent_bytes,
        total_sent_bytes=load.total_sent_bytes,
        arithmetic_s=load.arithmetic_s,
        host_s=load.host_s,
        communication_s=load.communication_s + load.late_s,
        processor_s=load.processor_s,
        exposed_s=exposed_s,
        step_s=step_s,
        efficiency=scenario.compute_s / step_s,
        cost_per_1000_steps=cost,
    )
