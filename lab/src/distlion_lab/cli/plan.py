"""``distlion plan``: forecast a step by every method, and advise on compression."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from distlion.errors import InvalidArgumentError
from distlion.wire import LinkModel
from distlion.wire.tcp import choose_wire
from distlion_lab.cli.failure import shown_failures
from distlion_lab.cli.options import Option, choice, flag, number, taking, whole
from distlion_lab.cli.plan_page import write_plan_page
from distlion_lab.cli.plan_sites import print_local
from distlion_lab.cli.plan_table import print_plan
from distlion_lab.cli.quantity import read_count, read_rate, read_seconds
from distlion_lab.names import suggest
from distlion_lab.planning.advice import advise, build_record
from distlion_lab.planning.line import model_line
from distlion_lab.planning.machine import CPU, GPU, GPUS, Machine
from distlion_lab.planning.planner import THRESHOLD, compare_methods
from distlion_lab.planning.scenario import NVLINK, PCIE, Scenario
from distlion_lab.report.plan_figure import draw_plan_figure

EXAMPLE = (
    "Example: distlion plan --params 1e9 --nodes 16 --gpus-per-node 8 --link 10gbit --compute-s 0.8"
)


_HELP = "distlion plan --help"
_MACHINES = {"cpu": CPU, "gpu": GPU, **GPUS}
_NODE_LINKS = {"nvlink": NVLINK, "pcie": PCIE}


@taking(
    params=choice(str, "Trainable parameters, such as 1e9 or 125M.", default=...),
    nodes=whole("Machines, up to 100,000.", default=...),
    link=choice(str, "Ethernet between machines: 100mbit, 10gbit, 1Gbps.", default=...),
    compute_s=choice(
        str, "Time of forward and backward in a step: 0.5 (in seconds), 500ms.", default=...
    ),
    gpus_per_node=whole("Workers of a machine that share its link.", default=1),
    latency_us=choice(
        str,
        "Latency of a round between machines, about the round trip that ping shows: 100 "
        "(in us), 0.1ms, 50ms between sites; 'distlion doctor' measures it.",
        default="100",
    ),
    message_us=choice(
        str, "Latency of each additional message in a round: 10 (in us), 10us.", default="10"
    ),
    wire=choice(
        str,
        "Transport of votes: gloo, or tcp for distlion's own sockets, whose rounds take one way.",
        "DISTLION_WIRE, or tcp on Linux and gloo elsewhere",
    ),
    half_duplex=flag("--half-duplex", "The link cannot send and receive at once."),
    node_link=choice(str, "Link inside a machine: nvlink, pcie or a rate.", default="nvlink"),
    device=choice(
        str,
        f"Device that encodes and commits: {', '.join(_MACHINES)}; gpu is an a100. With a "
        "GPU, one thread of the host frames and counts votes.",
        default="gpu",
        metavar="NAME",
    ),
    overlap_share=number(
        "Share of backward that communication can hide behind. With gradient accumulation over "
        "k micro-batches only the last backward hides any: give 0.9 / k.",
        default=0.9,
    ),
    momentum_sync_every=whole("Steps between two averages of all momenta.", "never"),
    momentum_sync_bits=whole("Uplink bits of a momentum: 32 or 16.", default=32),
    orthogonalized_width=whole(
        "Width of the network, for votes on orthogonalized directions (an upper bound).",
        "plain",
        default=0,
    ),
    threshold=number(
        "Gain over all-reduce below which compression is not advised.", default=THRESHOLD
    ),
    price_per_gpu_hour=number("Price of a worker for an hour.", default=0.0),
    price_per_gb=number("Price of 10^9 bytes sent by a machine.", default=0.0),
    figure=choice(Path, "PNG of efficiency against rate and machines.", "none"),
    page=Option(
        Path | None,
        typer.Option(
            "--html",
            help="HTML page of this plan with tables and curves; it needs no network.",
            show_default="none",
        ),
    ),
    all_rows=flag("--all", "Show every exchange, with overlap and without."),
    sites=flag(
        "--sites",
        "Show a step at 1 to 100 Mbit/s and 50 to 200 ms of latency: with all-reduce, with "
        "votes in each step, and with a vote every H steps.",
    ),
    as_json=flag("--json", "Print everything to standard output."),
)
def plan_command(**given: Any) -> None:
    """Forecast a step by every rule and exchange and by all-reduce, and advise on compression.

    The forecasts are closed forms; nothing is measured. The latencies are assumptions for TCP.
    """
    with shown_failures(Console(stderr=True)):
        scenario = _read_scenario(given)
        forecasts = compare_methods(scenario)
        advice = advise(forecasts, threshold=given["threshold"])
        if given["figure"] is not None:
            draw_plan_figure(build_record(forecasts, advice), given["figure"])
        if given["page"] is not None:
            write_plan_page(forecasts, advice, given["page"])
        if given["as_json"]:
            typer.echo(json.dumps(build_record(forecasts, advice), indent=1, allow_nan=False))
        else:
            print_plan(Console(), forecasts, advice, all_rows=given["all_rows"])
            print_local(Console(), scenario, with_sites=given["sites"])


def _read_scenario(given: dict[str, Any]) -> Scenario:
    taken = {field.name: given[field.name] for field in fields(Scenario) if field.name in given}
    read: dict[str, Any] = {
        "n_params": read_count("--params", given["params"]),
        "link": model_line(
            read_rate("--link", given["link"]),
            latency_s=read_seconds("--latency-us", given["latency_us"], unit="us"),
            message_s=read_seconds("--message-us", given["message_us"], unit="us"),
            full_duplex=not given["half_duplex"],
        ),
        "node_link": _parse_node_link(given["node_link"]),
        "compute_s": read_seconds("--compute-s", given["compute_s"]),
        "wire": given["wire"] or choose_wire(alone=True),
        "machine": _find_machine(given["device"]),
    }
    return Scenario(**taken | read)


def _find_machine(name: str) -> Machine:
    if name.lower() not in _MACHINES:
        raise InvalidArgumentError(
            f"--device {name}: no figures for it; {suggest(name, _MACHINES, all_in=_HELP)}. For "
            "another GPU take one with memory of the same speed"
        )
    return _MACHINES[name.lower()]


def _parse_node_link(text: str) -> LinkModel:
    known = _NODE_LINKS.get(text.lower())
    if known is None and text.isalpha():
        hint = suggest(text, _NODE_LINKS, all_in=_HELP)
        raise InvalidArgumentError(f"--node-link {text!r} is neither a link nor a rate; {hint}")
    return known or LinkModel(NVLINK.latency_s, read_rate("--node-link", text))
