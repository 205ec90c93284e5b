"""The table and the advice of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distlion_lab.cli.table import build_table, fits, print_table
from distlion_lab.planning.advice import TIME_ONLY, Advice
from distlion_lab.planning.forecast import Forecast
from distlion_lab.planning.planner import Forecasts
from distlion_lab.planning.scenario import Scenario

_MEGABYTE = 1e6
_MILLISECONDS_BELOW_S = 0.1
# Columns that a narrow terminal leaves out, the most dispensable first.
_DISPENSABLE = (
    "network",
    "bits per\nparam",
    "cost of\n1000 steps",
    "efficiency",
    "MB per\nnode",
    "overlap",
)
_WORDS = ("method", "exchange", "overlap")


def print_plan(
    console: Console, forecasts: Forecasts, advice: Advice, *, all_rows: bool = False
) -> None:
    """Print the methods, the fastest first, then the advice and its limits.

    Args:
        console: Console for the output.
        forecasts: All forecasts.
        advice: Advice from the forecasts.
        all_rows: True for every exchange of every rule, with overlap and without; else the fastest.
    """
    scenario = forecasts.scenario
    console.print(Text(describe_setting(scenario)), soft_wrap=True)
    ranked = forecasts.ranked if all_rows else choose_best(forecasts.ranked)
    table, left_out = _fit_table(console, forecasts, ranked)
    print_table(console, table)
    if left_out:
        names = ", ".join(name.replace("\n", " ") for name in left_out)
        console.print(Text(f"left out for lack of width: {names}\n"), soft_wrap=True)
    if not all_rows:
        console.print(Text("The best exchange of each method; --all shows every one.\n"))
    console.print(Text(advice.text, style="bold"), soft_wrap=True)
    if advice.compress:
        console.print(Text(write_call(scenario, forecasts.best_vote)), soft_wrap=True)
    if advice.regimes:
        console.print(
            Text("\nMajorityVote() is, by rate of payload between nodes,"), soft_wrap=True
        )
    for regime in advice.regimes:
        console.print(Text(f"  {regime.describe()}"), soft_wrap=True)
    console.print(Text(f"\n{TIME_ONLY}"), soft_wrap=True)


def describe_setting(scenario: Scenario) -> str:
    """Return the line above the methods."""
    over = "own sockets" if scenario.wire == "tcp" else "Gloo"
    return (
        f"{scenario.n_params:.4g} parameters, {scenario.nodes:,} x {scenario.gpus_per_node} "
        f"workers, {scenario.compute_s:g} s of compute; votes over {over}; speed-up over the best "
        "all-reduce"
    )


_DECAY = "weight_decay=2 * adamw_weight_decay"
_RECIPE = ("model.named_parameters()", "lr=adamw_lr / 2", _DECAY, "cautious=True")
_ORTHOGONALIZED = (f"distlion.group_params(model, {_DECAY})", "lr=adamw_lr / 2")
"""The pages "The recipe" and "Orthogonalize hidden matrices" have the reasons."""


def write_call(scenario: Scenario, forecast: Forecast) -> str:
    """Format the call that makes the optimizer of a forecast, with the recipe's settings."""
    recipe = _ORTHOGONALIZED if scenario.orthogonalized_width else _RECIPE
    arguments = [*recipe, f"aggregation=distlion.{forecast.method}"]
    arguments.append(f"exchange=distlion.{forecast.pattern}")
    if scenario.gpus_per_node > 1:
        arguments.append(f"nodes=distlion.Nodes(ranks_per_node={scenario.gpus_per_node})")
    if scenario.momentum_sync_every is not None:
        dtype = ", dtype=torch.bfloat16" if scenario.momentum_sync_bits == 16 else ""
        sync = f"distlion.MomentumSync(every={scenario.momentum_sync_every}{dtype})"
        arguments.append(f"momentum_sync={sync}")
    if forecast.overlap:
        # The first steps then find out if overlap pays on these machines.
        arguments.append('overlap="auto"')
    return f"distlion.DistributedLion({', '.join(arguments)})"


def choose_best(ranked: Sequence[Forecast]) -> list[Forecast]:
    """Keep the first of each method; ``ranked`` has the fastest first."""
    best: dict[str, Forecast] = {}
    for forecast in ranked:
        best.setdefault(forecast.method, forecast)
    return list(best.values())


def format_number(value: float) -> str:
    """Format three digits, or all before the point, without an exponent: 1,875, 15,000, 0.871."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(float(f"{value:.3g}")))))
    return f"{value:,.{decimals}f}"


def _fit_table(
    console: Console, forecasts: Forecasts, ranked: Sequence[Forecast]
) -> tuple[Table, list[str]]:
    """Build the table with as many columns as fit, and list the columns left out."""
    left_out: list[str] = []
    bold = [row for row, forecast in enumerate(ranked) if not forecast.votes]
    dispensable = iter(name for name in _DISPENSABLE if name in _list_columns(forecasts))
    while True:
        head, rows = tabulate(forecasts, ranked, left_out=left_out)
        table = build_table(head, rows, left=_WORDS, bold=bold)
        if fits(console, table) or (name := next(dispensable, None)) is None:
            return table, left_out
        left_out.append(name)


def tabulate(
    forecasts: Forecasts, ranked: Sequence[Forecast], *, left_out: Sequence[str] = ()
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the methods, without some columns."""
    columns = _list_columns(forecasts)
    head = [name for name in columns if name not in left_out]
    return head, [[columns[name](forecast) for name in head] for forecast in ranked]


def _list_columns(forecasts: Forecasts) -> dict[str, Callable[[Forecast], str]]:
    scenario, baseline_s = forecasts.scenario, forecasts.best_baseline.step_s
    in_ms = forecasts.ranked[0].step_s < _MILLISECONDS_BELOW_S
    unit, scale = ("ms", 1e3) if in_ms else ("s", 1.0)
    columns: dict[str, Callable[[Forecast], str]] = {
        "method": lambda forecast: forecast.method.replace("torch.", ""),
        "exchange": lambda forecast: forecast.pattern.removesuffix("()"),
        "overlap": lambda forecast: "yes" if forecast.overlap else "no",
        "bits per\nparam": lambda forecast: format_number(forecast.bits_per_parameter),
        "MB per\nnode": lambda forecast: format_number(forecast.sent_bytes / _MEGABYTE),
        "network": lambda forecast: f"{format_number(scale * forecast.communication_s)} {unit}",
        "step": lambda forecast: f"{format_number(scale * forecast.step_s)} {unit}",
        "efficiency": lambda forecast: f"{forecast.efficiency:.1%}",
        "speed-up": lambda forecast: f"{baseline_s / forecast.step_s:.2f}",
    }
    if scenario.price_per_gpu_hour > 0 or scenario.price_per_gb > 0:
        columns["cost of\n1000 steps"] = lambda forecast: f"{forecast.cost_per_1000_steps:,.2f}"
    return columns
