"""``distlion plan``: forecast a step by every method, and advise on compression."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from distlion.errors import InvalidArgumentError
from distlion.wire import LinkModel
from distlion_lab.cli.failure import shown_failures
from distlion_lab.cli.plan_sites import print_local
from distlion_lab.cli.plan_table import print_plan
from distlion_lab.cli.quantity import (
    number_option,
    read_count,
    read_rate,
    read_seconds,
    whole_option,
)
from distlion_lab.names import suggest
from distlion_lab.planning.advice import advise, build_record
from distlion_lab.planning.line import model_line
from distlion_lab.planning.machine import CPU, GPU, GPUS, Machine
from distlion_lab.planning.page_model import build_page_model
from distlion_lab.planning.planner import THRESHOLD, compare_methods
from distlion_lab.planning.scenario import NVLINK, PCIE, Scenario
from distlion_lab.report.plan_figure import draw_plan_figure
from distlion_lab.report.plan_page import write_plan_page

EXAMPLE = (
    "Example: distlion plan --params 1e9 --nodes 16 --gpus-per-node 8 --link 10gbit --compute-s 0.8"
)


_HELP = "distlion plan --help"
_MACHINES = {"cpu": CPU, "gpu": GPU, **GPUS}
_NODE_LINKS = {"nvlink": NVLINK, "pcie": PCIE}

# The options, in the order of the help.
_Params = Annotated[str, typer.Option(help="Trainable parameters, such as 1e9 or 125M.")]
_Nodes = Annotated[int, whole_option(help="Machines, up to 100,000.")]
_GpusPerNode = Annotated[int, whole_option(help="Workers of a machine that share its link.")]
_LinkRate = Annotated[str, typer.Option(help="Ethernet between machines: 100mbit, 10gbit, 1Gbps.")]
_ComputeS = Annotated[
    str, typer.Option(help="Time of forward and backward in a step: 0.5 (in seconds), 500ms.")
]
_LatencyUs = Annotated[
    str,
    typer.Option(
        help="Latency of a round between machines, about the round trip that ping shows: 100 "
        "(in us), 0.1ms, 50ms between sites; "
        "'distlion doctor' measures it."
    ),
]
_MessageUs = Annotated[
    str, typer.Option(help="Latency of each additional message in a round: 10 (in us), 10us.")
]
_HalfDuplex = Annotated[
    bool, typer.Option("--half-duplex", help="The link cannot send and receive at once.")
]
_NodeLink = Annotated[str, typer.Option(help="Link inside a machine: nvlink, pcie or a rate.")]
_Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"Device that encodes and commits: {', '.join(_MACHINES)}; gpu is an a100. With a "
        "GPU, one thread of the host frames and counts votes.",
    ),
]
_OverlapShare = Annotated[
    float, number_option(help="Share of backward that communication can hide behind.")
]
_SyncEvery = Annotated[
    int | None,
    whole_option(help="Steps between two averages of all momenta.", show_default="never"),
]
_SyncBits = Annotated[int, whole_option(help="Uplink bits of a momentum: 32 or 16.")]
_Threshold = Annotated[
    float, number_option(help="Gain over all-reduce below which compression is not advised.")
]
_Width = Annotated[
    int,
    whole_option(
        help="Width of the network, for votes on orthogonalized directions (an upper bound).",
        show_default="plain",
    ),
]
_PricePerGpuHour = Annotated[float, number_option(help="Price of a worker for an hour.")]
_PricePerGb = Annotated[float, number_option(help="Price of 10^9 bytes sent by a machine.")]
_Figure = Annotated[
    Path | None,
    typer.Option(help="PNG of efficiency against rate and machines.", show_default="none"),
]
_Page = Annotated[
    Path | None,
    typer.Option(
        "--html",
        help="HTML page of this plan with sliders and curves; it needs no network.",
        show_default="none",
    ),
]
_All = Annotated[bool, typer.Option("--all", help="Show every exchange, with overlap and without.")]
_Sites = Annotated[
    bool,
    typer.Option(
        "--sites",
        help="Show a step at 1 to 100 Mbit/s and 50 to 200 ms of latency: with all-reduce, with "
        "votes in each step, and with a vote every H steps.",
    ),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print everything to standard output.")]


def plan_command(
    *,
    params: _Params,
    nodes: _Nodes,
    link: _LinkRate,
    compute_s: _ComputeS,
    gpus_per_node: _GpusPerNode = 1,
    latency_us: _LatencyUs = "100",
    message_us: _MessageUs = "10",
    half_duplex: _HalfDuplex = False,
    node_link: _NodeLink = "nvlink",
    device: _Device = "gpu",
    overlap_share: _OverlapShare = 0.9,
    momentum_sync_every: _SyncEvery = None,
    momentum_sync_bits: _SyncBits = 32,
    orthogonalized_width: _Width = 0,
    threshold: _Threshold = THRESHOLD,
    price_per_gpu_hour: _PricePerGpuHour = 0.0,
    price_per_gb: _PricePerGb = 0.0,
    figure: _Figure = None,
    page: _Page = None,
    all_rows: _All = False,
    sites: _Sites = False,
    as_json: _AsJson = False,
) -> None:
    """Forecast a step by every rule and exchange and by all-reduce, and advise on compression.

    The forecasts are closed forms; nothing is measured. The latencies are assumptions for TCP.
    """
    with shown_failures(Console(stderr=True)):
        scenario = Scenario(
            n_params=read_count("--params", params),
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            link=model_line(
                read_rate("--link", link),
                latency_s=read_seconds("--latency-us", latency_us, unit="us"),
                message_s=read_seconds("--message-us", message_us, unit="us"),
                full_duplex=not half_duplex,
            ),
            node_link=_parse_node_link(node_link),
            compute_s=read_seconds("--compute-s", compute_s),
            machine=_find_machine(device),
            overlap_share=overlap_share,
            momentum_sync_every=momentum_sync_every,
            momentum_sync_bits=momentum_sync_bits,
            orthogonalized_width=orthogonalized_width,
            price_per_gpu_hour=price_per_gpu_hour,
            price_per_gb=price_per_gb,
        )
        forecasts = compare_methods(scenario)
        advice = advise(forecasts, threshold=threshold)
        if figure is not None:
            draw_plan_figure(build_record(forecasts, advice), figure)
        if page is not None:
            model = build_page_model()
            write_plan_page(scenario.to_json(), model, page, threshold=threshold)
        if as_json:
            typer.echo(json.dumps(build_record(forecasts, advice), indent=1, allow_nan=False))
        else:
            print_plan(Console(), forecasts, advice, all_rows=all_rows)
            print_local(Console(), scenario, with_sites=sites)


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
