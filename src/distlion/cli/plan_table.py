"""The table and the advice of a plan."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distlion.planning import Advice, Forecast, Forecasts

_MEGABYTE = 1e6
_NUMBERS = (
    "bits per\nparam",
    "MB per\nnode",
    "network\ns",
    "step\ns",
    "overlap\nstep s",
    "effi-\nciency",
    "speed-\nup",
)
# Where output goes to a file or a pipe, nothing else says how wide it may be.
_PIPED_WIDTH = 120


def print_plan(console: Console, forecasts: Forecasts, advice: Advice) -> None:
    """Print all methods, the fastest first, then what to do and where it ends."""
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    console.print(_build_table(forecasts))
    console.print(Text(advice.text, style="bold"), soft_wrap=True)
    if advice.regimes:
        console.print(Text("\nMajorityVote() is, by rate of payload between nodes,"))
    for regime in advice.regimes:
        console.print(Text(f"  {regime.describe()}"))


def _build_table(forecasts: Forecasts) -> Table:
    scenario = forecasts.scenario
    priced = scenario.price_per_gpu_hour > 0 or scenario.price_per_gb > 0
    table = Table(
        title=f"{scenario.n_params:.4g} parameters, {scenario.nodes:,} x {scenario.gpus_per_node} "
        f"workers, {scenario.compute_s:g} s of compute; speed-up over the best all-reduce",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("method", overflow="fold")
    table.add_column("exchange", no_wrap=True)
    numbers = [*_NUMBERS, "cost of\n1000 steps"] if priced else _NUMBERS
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    rows: dict[tuple[str, str], list[Forecast]] = {}
    for forecast in forecasts.ranked:
        rows.setdefault((forecast.method, forecast.pattern), []).append(forecast)
    for row in rows.values():
        _add_row(table, row, forecasts.best_baseline.step_s, priced=priced)
    return table


def _add_row(table: Table, row: list[Forecast], baseline_s: float, *, priced: bool) -> None:
    """Add a method by its faster forecast; ``row`` holds it with overlap, without, or both."""
    best = row[0]
    seconds = {forecast.overlap: f"{forecast.step_s:.4g}" for forecast in row}
    cells = [
        best.method.replace("torch.", ""),
        best.pattern.removesuffix("()"),
        f"{best.bits_per_parameter:.3g}",
        f"{best.sent_bytes / _MEGABYTE:,.4g}",
        f"{best.communication_s:.3g}",
        seconds.get(False, ""),
        seconds.get(True, ""),
        f"{best.efficiency:.1%}",
        f"{baseline_s / best.step_s:.2f}",
    ]
    if priced:
        cells.append(f"{best.cost_per_1000_steps:,.2f}")
    table.add_row(*cells, style=None if best.votes else "bold")
