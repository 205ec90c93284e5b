"""Predict a method's step by the cost model, to compare it with the measured step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distlion.wire import AllGather, Exchange, LinkModel, ParameterServer
from distlion.wire.tcp import choose_wire
from distlion_lab.planning.gradient_all_reduce import GradientAllReduce, forecast_all_reduce
from distlion_lab.planning.machine import Machine
from distlion_lab.planning.scenario import Scenario
from distlion_lab.planning.votes import forecast_votes, list_able
from distlion_netlab.method_names import (
    DDP_FP16,
    DDP_FP32,
    FLOOR,
    find_period,
    find_wire,
    is_baseline,
    parse_vote,
)
from distlion_netlab.traffic import Traffic


@dataclass(frozen=True)
class Surroundings:
    """Measurements that a prediction needs besides the method.

    Attributes:
        n_parameters: Trainable elements of the model.
        hosts: Number of hosts, with one worker on each.
        cores: Cores of this machine, on which all hosts run.
        link: Link between the workers, probed over Gloo while all send at once; its latency counts.
        machine: Measured rates of one worker's kernels.
        votes: Measured cost of sending if all send to all.
        gradients: Measured cost of sending if each sends to the next one.
        server: Measured cost of sending if all send to one, or one to all.
        floor_s: Seconds of a step without communication, Lion's arithmetic included.
    """

    n_parameters: int
    hosts: int
    cores: int
    link: LinkModel
    machine: Machine
    votes: Traffic
    gradients: Traffic
    server: Traffic
    floor_s: float


def predict_step(name: str, surroundings: Surroundings) -> float | None:
    """Predict the seconds of a method's step; None where there is no closed form.

    The compute time is the floor less the arithmetic of a single worker.
    """
    if name == FLOOR:
        return surroundings.floor_s
    if name in (DDP_FP32, DDP_FP16):
        bits = GradientAllReduce(32 if name == DDP_FP32 else 16, "ring")
        scenario = _describe(surroundings, surroundings.gradients)
        return forecast_all_reduce(scenario, bits).step_s
    if is_baseline(name) or find_period(name) > 1:
        return None
    vote, wire = parse_vote(name), find_wire(name) or choose_wire()
    exchange = vote["exchange"]
    if isinstance(exchange, Exchange):
        patterns = [exchange]
    else:
        votes = surroundings.votes
        patterns = list_able(_describe(surroundings, votes, wire), vote["aggregation"])
    return min(
        forecast_votes(
            _describe(surroundings, _find_traffic(surroundings, pattern, wire), wire),
            vote["aggregation"],
            pattern,
            overlap=overlap,
        ).step_s
        for pattern in patterns
        for overlap in ((True, False) if vote["overlap"] == "auto" else (vote["overlap"],))
    )


def _find_traffic(surroundings: Surroundings, pattern: Exchange, wire: str) -> Traffic:
    """Return the traffic of a pattern's messages; Gloo's large all-gathers go along a ring."""
    if isinstance(pattern, ParameterServer):
        return surroundings.server
    goes_along_ring = isinstance(pattern, AllGather) and wire == "gloo"
    return surroundings.gradients if goes_along_ring else surroundings.votes


def _describe(surroundings: Surroundings, traffic: Traffic, wire: str = "gloo") -> Scenario:
    # Hosts that share the cores of one machine slow each other down.
    crowding = max(1.0, surroundings.hosts / surroundings.cores)
    machine = replace(
        surroundings.machine,
        vote_wire_s_per_byte=traffic.core_s_per_byte,
        gradient_wire_s_per_byte=traffic.core_s_per_byte,
    ).slowed(crowding)
    n_parameters = surroundings.n_parameters
    lion_s = machine.commit_s(n_parameters, n_parameters, 0)
    return Scenario(
        n_params=n_parameters,
        nodes=surroundings.hosts,
        link=replace(surroundings.link, rate_bit_per_s=traffic.rate_bit_per_s),
        compute_s=max(surroundings.floor_s - lion_s, lion_s),
        machine=machine,
        wire=wire,
    )
