"""Seconds of a step for methods x rates, in one launch, with the methods taking turns."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from distlion import __version__
from distlion.errors import InvalidArgumentError
from distlion.wire import LinkModel
from distlion_lab.errors import NetlabError
from distlion_lab.planning.line import ETHERNET_BYTES, ETHERNET_MTU
from distlion_lab.planning.machine import Machine
from distlion_lab.training.processes import leaving_in_order
from distlion_netlab.fleet import Fleet
from distlion_netlab.lab import Lab
from distlion_netlab.link_rate import UNLIMITED, parse_host_rates
from distlion_netlab.method_names import (
    ALL_REDUCE,
    DDP_FP16,
    DDP_FP32,
    DDP_POWERSGD,
    FLOOR,
    adapts,
    find_period,
    is_baseline,
)
from distlion_netlab.prediction import Surroundings, predict_step
from distlion_netlab.switch import check_latency
from distlion_netlab.traffic import (
    Traffic,
    measure_gradients,
    measure_server,
    measure_votes,
    read_busy_s,
)
from distlion_netlab.workload import DeviceWorkload, GptWorkload, VectorWorkload, Workload

FORMAT = 2
# Size of a full segment, as interfaces count it.
_FRAME_BYTES = ETHERNET_MTU + ETHERNET_BYTES
# PowerSGD compresses from its third step on, and DDP rebuilds its buckets in the second.
_WARM_UP_STEPS = 3
_WARM_UP_STEPS_AT_RATE = 1
_MOST_STEPS = 50
_PROBES = 3

REFERENCES = (FLOOR, DDP_FP32, DDP_FP16, DDP_POWERSGD, ALL_REDUCE)
"""Methods to which a sweep compares all others, if it has them."""


@dataclass(frozen=True)
class SweepSettings:
    """Settings of a sweep.

    Args:
        hosts: Number of hosts, 2 or more, with one worker on each.
        rates: Rates, in the format of ``Lab``, to measure one after the other.
        methods: Names of methods, as in ``distlion_netlab.method_names``.
        workload: Work of a step.
        repetitions: Blocks of each method at each rate, at least 2.
        block_s: Target seconds of a block: it has as many steps as fit, at least one.
        latency_s: Seconds that a frame takes from one host to another, in the format of ``Lab``.
        congestion_control: TCP congestion control of the hosts, in the format of ``Lab``.
        predicts: Whether the link, traffic and kernels are measured, for the cost model's
            predictions. That takes longer than a few steps.

    Raises:
        InvalidArgumentError: A value is out of range, or given twice.
    """

    hosts: int
    rates: tuple[str, ...]
    methods: tuple[str, ...]
    workload: Workload
    repetitions: int = 5
    block_s: float = 1.0
    latency_s: float = 0.0
    congestion_control: str | None = None
    predicts: bool = True

    def __post_init__(self) -> None:
        for name, least in (("hosts", 2), ("repetitions", 2), ("block_s", 0)):
            if getattr(self, name) < least:
                raise InvalidArgumentError(
                    f"{name} is {getattr(self, name)}; expected at least {least}"
                )
        for name in ("rates", "methods"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise InvalidArgumentError(f"{name} are {values}; expected one or more, each once")
        check_latency(self.latency_s)
        for rate in self.rates:
            parse_host_rates(rate, self.hosts)
        self.workload.check_methods(self.methods)


@dataclass(frozen=True)
class SweepProgress:
    """Progress of a sweep.

    Attributes:
        done, total: Numbers of blocks.
        what: Description of the next part.
    """

    done: int
    total: int
    what: str


Observer = Callable[[SweepProgress], None]


def run_sweep(settings: SweepSettings, observe: Observer) -> dict[str, Any]:
    """Measure every method at every rate, in a new lab.

    All methods live in the same workers, with models of their own. At each rate they take turns: a
    repetition is one block of each. Ratios are taken within a repetition, since other load on the
    machine slows all of its blocks. Methods that adapt to the link are rebuilt at each rate. The
    replicas of each method are compared at the end.

    Args:
        settings: Settings of the sweep.
        observe: Called with the progress.

    Returns:
        The record, as JSON types: ``settings``, ``conditions``, ``n_parameters``, ``machine`` (a
        worker's kernels), ``links`` (measured between the workers, for each rate), ``traffic``
        (rates and processor time of ``votes``, ``gradients`` and a ``server``, for each rate; these
        three are null or empty without ``predicts``),
        ``missing`` (method -> reason why it was left out), ``replicas_equal`` (method that votes ->
        bool) and ``results``.

        ``results`` has, for each rate and method: the ``seconds`` of a step (values of the
        repetitions, median, quartiles), ``predicted_s`` by the cost model (null without a floor),
        ``speed_up`` over each of ``REFERENCES`` (as ``seconds``), ``steps`` of a block, and the
        median processor time of a step. That is ``cpu_s`` of all workers' processes and ``busy_s``
        of all cores, the kernel's work on packets included.

        It also has the bytes of a step for each host: ``interface_bytes`` (the interface's count,
        median), ``sent_once_bytes`` (without the segments that TCP sent again, each counted as a
        full one, median), ``sent_bytes`` (the optimizer's count) and ``wire_bytes`` (the same with
        headers, computed).

    Raises:
        InvalidArgumentError: The kernel does not have the congestion control.
        NetlabError: No lab can be made here.
        WorkerFailedError: A worker died.
    """
    observe(SweepProgress(0, 1, f"starting {settings.hosts} workers"))
    with (
        leaving_in_order(),
        Lab(
            settings.hosts,
            latency_s=settings.latency_s,
            congestion_control=settings.congestion_control,
        ) as lab,
        Fleet(lab) as fleet,
    ):
        return _Sweep(settings, lab, fleet, observe).run()


@dataclass
class _Measured:
    """The blocks of one method at one rate."""

    steps: int
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    interface_bytes: list[list[float]] = field(default_factory=list)
    sent_once_bytes: list[list[float]] = field(default_factory=list)
    sent_bytes: list[int | None] = field(default_factory=list)
    wire_bytes: list[int | None] = field(default_factory=list)


class _Sweep:
    def __init__(self, settings: SweepSettings, lab: Lab, fleet: Fleet, observe: Observer) -> None:
        self._settings, self._lab, self._fleet, self._observe = settings, lab, fleet, observe
        self._missing: dict[str, str] = {}
        self._n_parameters = 0
        self._machine: Machine | None = None
        self._links: dict[str, LinkModel] = {}
        self._traffic: dict[str, dict[str, Traffic]] = {}
        self._done = 0

    def run(self) -> dict[str, Any]:
        conditions = read_lab_conditions(self._lab)
        settings = self._settings
        self._lab.set_rates(UNLIMITED)
        for name in settings.methods:
            if not adapts(name):
                self._build(name)
        if settings.predicts:
            (self._machine, *_) = self._fleet.ask("measure_kernels")
        results = {rate: self._measure_rate(rate) for rate in settings.rates}
        self._lab.set_rates(UNLIMITED)
        return {
            "format": FORMAT,
            "settings": dataclasses.asdict(settings) | {"workload": _describe(settings.workload)},
            "conditions": conditions | {"load_average_after": round(os.getloadavg()[0], 2)},
            "n_parameters": self._n_parameters,
            "machine": None if self._machine is None else dataclasses.asdict(self._machine),
            "links": {rate: dataclasses.asdict(link) for rate, link in self._links.items()},
            "traffic": {
                rate: {kind: dataclasses.asdict(found) for kind, found in kinds.items()}
                for rate, kinds in self._traffic.items()
            },
            "missing": self._missing,
            "replicas_equal": {
                name: self._verify(name) for name in self._present() if not is_baseline(name)
            },
            "results": results,
        }

    def _present(self) -> list[str]:
        return [name for name in self._settings.methods if name not in self._missing]

    def _report(self, what: str, *, blocks_done: int = 0) -> None:
        self._done += blocks_done
        total = len(self._settings.rates) * self._settings.repetitions * len(self._present())
        self._observe(SweepProgress(min(self._done, total), total, what))

    def _build(self, name: str) -> None:
        """Build a method and warm it up, or note why it cannot run."""
        self._report(f"building {name}")
        try:
            (self._n_parameters, *_) = self._fleet.ask("build", name, self._settings.workload)
            self._fleet.ask("run_block", name, _WARM_UP_STEPS)
        except NetlabError as error:
            self._missing[name] = str(error)
            self._fleet.ask("drop", name)

    def _measure_rate(self, rate: str) -> dict[str, Any]:
        self._lab.set_rates(rate)
        for name in self._present():
            if adapts(name):
                self._build(name)
        if self._settings.predicts:
            self._measure_link(rate)
        measured = {name: self._start(name, rate) for name in self._present()}
        for repetition in range(self._settings.repetitions):
            for name in _turned(self._present(), repetition):
                self._report(f"{rate}: {name}")
                self._measure_block(name, measured[name])
                self._report(f"{rate}: {name}", blocks_done=1)
        return _summarize_rate(measured, self._predict(rate, measured))

    def _measure_link(self, rate: str) -> None:
        self._links[rate] = self._probe()
        where = self._fleet, self._links[rate], self._settings.hosts
        self._traffic[rate] = {
            "votes": measure_votes(*where),
            "gradients": measure_gradients(*where),
            "server": measure_server(*where),
        }

    def _probe(self) -> LinkModel:
        """Measure the link a few times and take the best: other load can only slow it down."""
        links: list[LinkModel] = [self._fleet.ask("probe")[0] for _ in range(_PROBES)]
        return replace(
            links[0],
            latency_s=min(link.latency_s for link in links),
            rate_bit_per_s=max(link.rate_bit_per_s for link in links),
        )

    def _predict(self, rate: str, measured: dict[str, _Measured]) -> dict[str, float | None]:
        if FLOOR not in measured or self._machine is None:
            return dict.fromkeys(measured)
        surroundings = Surroundings(
            n_parameters=self._n_parameters,
            hosts=self._settings.hosts,
            cores=len(os.sched_getaffinity(0)),
            link=self._links[rate],
            machine=self._machine,
            **self._traffic[rate],
            floor_s=median(measured[FLOOR].seconds),
        )
        return {name: predict_step(name, surroundings) for name in measured}

    def _start(self, name: str, rate: str) -> _Measured:
        """Warm up a method at a rate, and choose the number of steps in a block."""
        self._report(f"{rate}: warming up {name}")
        period = find_period(name)  # a block has whole periods
        steps = period * _WARM_UP_STEPS_AT_RATE
        blocks = self._fleet.ask("run_block", name, steps)
        step_s = max(block.seconds for block in blocks) / steps
        most = min(_MOST_STEPS, round(self._settings.block_s / step_s))
        return _Measured(period * max(1, most // period))

    def _measure_block(self, name: str, measured: _Measured) -> None:
        before, busy_before = self._lab.read_counters(), read_busy_s()
        blocks = self._fleet.ask("run_block", name, measured.steps)
        after, busy_after = self._lab.read_counters(), read_busy_s()
        measured.seconds.append(max(block.seconds for block in blocks) / measured.steps)
        measured.cpu_s.append(sum(block.cpu_seconds for block in blocks) / measured.steps)
        measured.busy_s.append((busy_after - busy_before) / measured.steps)
        counted = [(b - a).tx_bytes for a, b in zip(before, after, strict=True)]
        measured.interface_bytes.append([n_bytes / measured.steps for n_bytes in counted])
        measured.sent_once_bytes.append(
            [
                (n_bytes - _FRAME_BYTES * block.retransmitted) / measured.steps
                for n_bytes, block in zip(counted, blocks, strict=True)
            ]
        )
        measured.sent_bytes = [block.sent_bytes for block in blocks]
        measured.wire_bytes = [block.wire_bytes for block in blocks]

    def _verify(self, name: str) -> bool:
        self._report(f"comparing the replicas of {name}")
        try:
            self._fleet.ask("verify", name)
        except NetlabError:
            return False
        return True


def read_lab_conditions(lab: Lab) -> dict[str, Any]:
    """Read the conditions on which the seconds of a step on a lab's hosts depend."""
    return read_conditions() | {"tcp_congestion_control": lab.congestion_control}


def read_conditions() -> dict[str, Any]:
    """Read the conditions on which the seconds of a worker's own computing depend."""
    return {
        "date": dt.date.today().isoformat(),
        "cpu": _read_cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "distlion": __version__,
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def summarize(values: Sequence[float]) -> dict[str, Any]:
    """Return the values with their median and quartiles."""
    q1, middle, q3 = quantiles(values, n=4, method="inclusive")
    return {"median": middle, "q1": q1, "q3": q3, "values": list(values)}


def _turned(names: list[str], repetition: int) -> list[str]:
    """Rotate the methods, so that another one begins in each repetition."""
    first = repetition % max(1, len(names))
    return names[first:] + names[:first]


def _summarize_rate(
    measured: dict[str, _Measured], predicted: dict[str, float | None]
) -> dict[str, Any]:
    return {
        name: {
            "steps": mine.steps,
            "seconds": summarize(mine.seconds),
            "predicted_s": predicted[name],
            "speed_up": {
                reference: summarize(
                    [a / b for a, b in zip(measured[reference].seconds, mine.seconds, strict=True)]
                )
                for reference in REFERENCES
                if reference in measured
            },
            "cpu_s": median(mine.cpu_s),
            "busy_s": median(mine.busy_s),
            "interface_bytes": [median(host) for host in zip(*mine.interface_bytes, strict=True)],
            "sent_once_bytes": [median(host) for host in zip(*mine.sent_once_bytes, strict=True)],
            "sent_bytes": mine.sent_bytes,
            "wire_bytes": mine.wire_bytes,
        }
        for name, mine in measured.items()
    }


def _describe(workload: Workload) -> dict[str, Any]:
    kinds = {GptWorkload: "gpt", DeviceWorkload: "device", VectorWorkload: "vector"}
    return {"kind": kinds[type(workload)]} | dataclasses.asdict(workload)


def _read_cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
