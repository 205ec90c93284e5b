"""Closed-form bytes and seconds of whole steps: of votes, and of the alternatives to votes."""

from distlion_lab.planning.accelerator import (
    Accelerators,
    explain_missing_cuda,
    find_accelerators,
)
from distlion_lab.planning.advice import (
    DO_NOT_COMPRESS,
    TIME_ONLY,
    Advice,
    Regime,
    advise,
    build_record,
    find_regimes,
)
from distlion_lab.planning.bench import KernelRates, measure_kernels
from distlion_lab.planning.checkup import Checkup, count_cores, examine, find_faults
from distlion_lab.planning.forecast import Forecast
from distlion_lab.planning.gradient_all_reduce import (
    BASELINES,
    GradientAllReduce,
    forecast_all_reduce,
)
from distlion_lab.planning.local_steps import (
    PERIODS,
    LocalAdvice,
    LocalForecast,
    Site,
    advise_local,
    forecast_local,
    list_sites,
)
from distlion_lab.planning.machine import CPU, GPU, GPUS, Machine
from distlion_lab.planning.page_model import build_page_model
from distlion_lab.planning.planner import (
    THRESHOLD,
    Forecasts,
    compare_methods,
    find_rate,
    speed_up,
    sweep,
)
from distlion_lab.planning.quantity import (
    format_rate,
    parse_count,
    parse_number,
    parse_rate,
    parse_seconds,
    parse_whole,
)
from distlion_lab.planning.scenario import NVLINK, PCIE, Scenario
from distlion_lab.planning.votes import forecast_votes, list_able
from distlion_lab.planning.worker_report import WorkerReport

__all__ = [
    "BASELINES",
    "CPU",
    "DO_NOT_COMPRESS",
    "GPU",
    "GPUS",
    "NVLINK",
    "PCIE",
    "PERIODS",
    "THRESHOLD",
    "TIME_ONLY",
    "Accelerators",
    "Advice",
    "Checkup",
    "Forecast",
    "Forecasts",
    "GradientAllReduce",
    "KernelRates",
    "LocalAdvice",
    "LocalForecast",
    "Machine",
    "Regime",
    "Scenario",
    "Site",
    "WorkerReport",
    "advise",
    "advise_local",
    "build_page_model",
    "build_record",
    "compare_methods",
    "count_cores",
    "examine",
    "explain_missing_cuda",
    "find_accelerators",
    "find_faults",
    "find_rate",
    "find_regimes",
    "forecast_all_reduce",
    "forecast_local",
    "forecast_votes",
    "format_rate",
    "list_able",
    "list_sites",
    "measure_kernels",
    "parse_count",
    "parse_number",
    "parse_rate",
    "parse_seconds",
    "parse_whole",
    "speed_up",
    "sweep",
]
