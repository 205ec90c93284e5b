"""Figures out of records; nothing here trains."""

from distlion.report.loss_figure import draw_loss_figure, read_record
from distlion.report.plan_figure import draw_plan_figure

__all__ = ["draw_loss_figure", "draw_plan_figure", "read_record"]
