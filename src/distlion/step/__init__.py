"""One step of voting workers, and its optional parts."""

from distlion.step.agreement import Agreement
from distlion.step.arguments import check_choice, check_count, check_number
from distlion.step.diagnostics import Diagnosis
from distlion.step.momentum import MomentumSync
from distlion.step.precision import Precision
from distlion.step.replicas import Replicas
from distlion.step.timeouts import Timeouts
from distlion.step.traffic import Traffic

__all__ = [
    "Agreement",
    "Diagnosis",
    "MomentumSync",
    "Precision",
    "Replicas",
    "Timeouts",
    "Traffic",
    "check_choice",
    "check_count",
    "check_number",
]
