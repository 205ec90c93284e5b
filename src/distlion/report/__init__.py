"""Figures out of records; nothing here trains."""

from distlion.report.loss_figure import draw_loss_figure, read_record

__all__ = ["draw_loss_figure", "read_record"]
