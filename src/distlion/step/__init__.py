"""One step of voting workers, and its optional parts."""

from distlion.step.diagnostics import Diagnosis
from distlion.step.hyperparameters import check_number
from distlion.step.momentum import MomentumSync
from distlion.step.settings import check_choice
from distlion.step.traffic import Traffic

__all__ = [
    "Diagnosis",
    "MomentumSync",
    "Traffic",
    "check_choice",
    "check_number",
]
