"""``distlion plan``: what a step would take by every method, and whether to compress at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from distlion.cli.failure import refusing, shown_failures
from distlion.cli.plan_table import print_plan
from distlion.errors import InvalidArgumentError
from distlion.link import LinkModel
from distlion.planning import (
    CPU,
    GPU,
    GPUS,
    NVLINK,
    PCIE,
    THRESHOLD,
    Machine,
    Scenario,
    advise,
    build_page_model,
    build_record,
    compare_methods,
    parse_rate,
)
from distlion.report import draw_plan_figure, write_plan_page

EXAMPLE = (
    "Example: distlion plan --params 1e9 --nodes 16 --gpus-per-node 8 --link 10gbit --compute-s 0.8"
)


_MACHINES = {"cpu": CPU, "gpu": GPU, **GPUS}
_NODE_LINKS = {"nvlink": NVLINK, "pcie": PCIE}

# The options, in the order of the help.
_Params = Annotated[str, typer.Option(help="Trainable parameters, such as 1e9.")]
_Nodes = Annotated[int, typer.Option(help="Machines, up to 100,000.")]
_GpusPerNode = Annotated[int, typer.Option(help="Workers of a machine that share its link.")]
_LinkRate = Annotated[str, typer.Option(help="Ethernet between machines: 100mbit, 10gbit.")]
_ComputeS = Annotated[float, typer.Option(help="Seconds of forward and backward in a step.")]
_LatencyUs = Annotated[
    float, typer.Option(help="Of a round between machines; 'distlion doctor' measures it.")
]
_MessageUs = Annotated[float, typer.Option(help="Of every further message of a round.")]
_HalfDuplex = Annotated[
    bool, typer.Option("--half-duplex", help="The link cannot send and receive at once.")
]
_NodeLink = Annotated[str, typer.Option(help="Inside a machine: nvlink, pcie or a rate.")]
_Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"What encodes and commits: {', '.join(_MACHINES)}; gpu is an a100. Beside a GPU, one "
        "thread of the host frames and counts votes.",
    ),
]
_OverlapShare = Annotated[
    float, typer.Option(help="Share of backward that communication can hide behind.")
]
_SyncEvery = Annotated[
    int | None,
    typer.Option(help="Steps in which every momentum is averaged once.", show_default="never"),
]
_SyncBits = Annotated[int, typer.Option(help="Bits of a momentum on the way up: 32, 16 or 8.")]
_Threshold = Annotated[
    float, typer.Option(help="Gain over all-reduce below which compression is not advised.")
]
_PricePerGpuHour = Annotated[float, typer.Option(help="Money for a worker and hour.")]
_PricePerGb = Annotated[float, typer.Option(help="Money for 10^9 bytes sent by a machine.")]
_Figure = Annotated[
    Path | None,
    typer.Option(help="PNG of efficiency against rate and machines.", show_default="none"),
]
_Page = Annotated[
    Path | None,
    typer.Option(
        "--html",
        help="One HTML page with this plan on sliders and as curves; it needs no network.",
        show_default="none",
    ),
]
_All = Annotated[bool, typer.Option("--all", help="Show every exchange, with overlap and without.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print everything to standard output.")]


def plan_command(
    *,
    params: _Params,
    nodes: _Nodes,
    link: _LinkRate,
    compute_s: _ComputeS,
    gpus_per_node: _GpusPerNode = 1,
    latency_us: _LatencyUs = 100.0,
    message_us: _MessageUs = 10.0,
    half_duplex: _HalfDuplex = False,
    node_link: _NodeLink = "nvlink",
    device: _Device = "gpu",
    overlap_share: _OverlapShare = 0.9,
    sync_every: _SyncEvery = None,
    sync_bits: _SyncBits = 32,
    threshold: _Threshold = THRESHOLD,
    price_per_gpu_hour: _PricePerGpuHour = 0.0,
    price_per_gb: _PricePerGb = 0.0,
    figure: _Figure = None,
    page: _Page = None,
    all_rows: _All = False,
    as_json: _AsJson = False,
) -> None:
    """Forecast a step by every rule and exchange and by all-reduce; say whether to compress.

    The forecasts are closed forms; nothing is measured. The latencies are assumptions for TCP.
    """
    with shown_failures(Console(stderr=True)):
        scenario = Scenario(
            n_params=parse_count(params),
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            link=LinkModel.of_line(
                _parse_rate("--link", link),
                latency_s=latency_us / 1e6,
                message_s=message_us / 1e6,
                full_duplex=not half_duplex,
            ),
            node_link=_parse_node_link(node_link),
            compute_s=compute_s,
            machine=_find_machine(device),
            overlap_share=overlap_share,
            sync_every=sync_every,
            sync_bits=sync_bits,
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


def parse_count(text: str) -> int:
    """Read a whole number that may be written as 1e9.

    Raises:
        InvalidArgumentError: It is none, or below 1.
    """
    try:
        number = float(text.replace("_", "").replace(",", ""))
        is_count = number >= 1 and number.is_integer()
    except ValueError:
        is_count = False
    if not is_count:
        raise InvalidArgumentError(
            f"--params {text!r}: expected a whole number above 0, such as 1e9"
        )
    return int(number)


def _find_machine(name: str) -> Machine:
    if name.lower() not in _MACHINES:
        raise InvalidArgumentError(
            f"--device {name}: no figures for it; expected one of {', '.join(_MACHINES)}. For "
            "another GPU take the one whose memory is as fast"
        )
    return _MACHINES[name.lower()]


def _parse_node_link(text: str) -> LinkModel:
    known = _NODE_LINKS.get(text.lower())
    return known or LinkModel(NVLINK.latency_s, _parse_rate("--node-link", text))


def _parse_rate(option: str, text: str) -> float:
    with refusing(option):
        return parse_rate(text)
