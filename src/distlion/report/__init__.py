"""Figures out of records; nothing here trains."""

from distlion.report.loss_figure import draw_loss_figure, read_record
from distlion.report.plan_figure import draw_plan_figure
from distlion.report.sweep_figure import draw_sweep_figure
from distlion.report.sweep_table import tabulate_sweep

__all__ = [
    "draw_loss_figure",
    "draw_plan_figure",
    "draw_sweep_figure",
    "read_record",
    "tabulate_sweep",
]
