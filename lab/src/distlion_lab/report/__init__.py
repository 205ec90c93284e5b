"""Figures and reports from records; nothing here trains."""

from distlion_lab.report.beside_figure import draw_beside_figure
from distlion_lab.report.comparison import Comparison, read_comparison
from distlion_lab.report.comparison_files import check_run
from distlion_lab.report.comparison_report import write_comparison_report
from distlion_lab.report.comparison_tables import tabulate_outcome
from distlion_lab.report.comparison_warnings import list_warnings
from distlion_lab.report.diagnosis_figure import draw_diagnosis_figure
from distlion_lab.report.loss_figure import draw_loss_figure, read_record
from distlion_lab.report.plan_figure import draw_plan_figure
from distlion_lab.report.plan_page import write_plan_page

__all__ = [
    "Comparison",
    "check_run",
    "draw_beside_figure",
    "draw_diagnosis_figure",
    "draw_loss_figure",
    "draw_plan_figure",
    "list_warnings",
    "read_comparison",
    "read_record",
    "tabulate_outcome",
    "write_comparison_report",
    "write_plan_page",
]
