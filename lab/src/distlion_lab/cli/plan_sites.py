"""Advice on the period of votes, and steps between sites, printed below a plan."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from distlion_lab.cli.plan_table import format_number
from distlion_lab.cli.table import build_table, print_table
from distlion_lab.planning.local_steps import PERIODS, Site, advise_local, list_sites
from distlion_lab.planning.quantity import format_rate
from distlion_lab.planning.scenario import Scenario

MARK = (
    "These are forecasts. At 100 Mbit/s, a vote by AllReduce over emulated round trips of 100 and "
    '200 ms took 1.3 and 1.4 times as long as forecast. The documentation, "Train across sites", '
    "has more. * marks the recommended choice."
)
"""The measured times are those of studies/lab-notebook.md, *latency between hosts*."""


def print_local(console: Console, scenario: Scenario, *, with_sites: bool) -> None:
    """Print the recommended period of votes, and a table of sites if asked for."""
    console.print(Text(f"\n{advise_local(scenario).text}", style="bold"), soft_wrap=True)
    if not with_sites:
        console.print(Text("--sites shows slower links and longer latencies."), soft_wrap=True)
        return
    head, rows = tabulate_sites(scenario)
    console.print(Text("\nSeconds of a step, by the link between sites:"), soft_wrap=True)
    print_table(console, build_table(head, rows, left=("link",), bold=()))
    console.print(Text(MARK), soft_wrap=True)


def tabulate_sites(scenario: Scenario) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of sites."""
    head = ["link", "latency", "all-reduce", "each step", *(f"every {each}" for each in PERIODS)]
    return head, [_write_row(site) for site in list_sites(scenario)]


def _write_row(site: Site) -> list[str]:
    advice = site.advice
    is_each, is_vote = advice.every == 1, advice.each_step_s <= advice.all_reduce_s
    marked = [
        (advice.all_reduce_s, is_each and not is_vote),
        (advice.each_step_s, is_each and is_vote),
        *((each.step_s, each.every == advice.every) for each in advice.local),
    ]
    seconds = [f"{format_number(step_s)}{' *' if chosen else '  '}" for step_s, chosen in marked]
    rate = f"{format_rate(site.rate_bit_per_s)}/s"
    return [rate, f"{1e3 * site.latency_s:.0f} ms", *seconds]
