"""Bytes and seconds in closed form: of an exchange, of a step, and of what one could do instead."""

from distlion.cost.advice import DO_NOT_COMPRESS, Advice, Regime, advise, build_record, find_regimes
from distlion.cost.bench import KernelRates, measure_kernels
from distlion.cost.checkup import Checkup, WorkerReport, count_cores, examine, find_faults
from distlion.cost.exchange_time import (
    PATTERNS,
    SCHEDULES,
    choose_exchange,
    count_overlap_buckets,
    exchange_seconds,
)
from distlion.cost.forecast import Forecast
from distlion.cost.link_model import LinkModel
from distlion.cost.machine import CPU, GPU, Machine
from distlion.cost.momenta import SCALE_ELEMENTS, shape_momenta
from distlion.cost.overhead import ETHERNET_BYTES, ETHERNET_MTU, payload_share, wire_bytes
from distlion.cost.planner import (
    RULES,
    THRESHOLD,
    Comparison,
    compare_methods,
    find_rate,
    gain_over_rivals,
    speed_up,
    sweep,
)
from distlion.cost.probe import LinkProbe, agree_on_model, probe_link, probe_ranks
from distlion.cost.rate import format_rate, parse_rate
from distlion.cost.rivals import RIVALS, AllReduce, forecast_all_reduce
from distlion.cost.scenario import MAX_NODES, NVLINK, PCIE, Scenario
from distlion.cost.votes import bits_sent, forecast_votes, shape_bucket

__all__ = [
    "CPU",
    "DO_NOT_COMPRESS",
    "ETHERNET_BYTES",
    "ETHERNET_MTU",
    "GPU",
    "MAX_NODES",
    "NVLINK",
    "PATTERNS",
    "PCIE",
    "RIVALS",
    "RULES",
    "SCALE_ELEMENTS",
    "SCHEDULES",
    "THRESHOLD",
    "Advice",
    "AllReduce",
    "Checkup",
    "Comparison",
    "Forecast",
    "KernelRates",
    "LinkModel",
    "LinkProbe",
    "Machine",
    "Regime",
    "Scenario",
    "WorkerReport",
    "advise",
    "agree_on_model",
    "bits_sent",
    "build_record",
    "choose_exchange",
    "compare_methods",
    "count_cores",
    "count_overlap_buckets",
    "examine",
    "exchange_seconds",
    "find_faults",
    "find_rate",
    "find_regimes",
    "forecast_all_reduce",
    "forecast_votes",
    "format_rate",
    "gain_over_rivals",
    "measure_kernels",
    "parse_rate",
    "payload_share",
    "probe_link",
    "probe_ranks",
    "shape_bucket",
    "shape_momenta",
    "speed_up",
    "sweep",
    "wire_bytes",
]
