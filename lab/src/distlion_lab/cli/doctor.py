"""``distlion doctor``: measure machines, kernels and links, and report their faults."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distlion.errors import InvalidArgumentError
from distlion.wire import LinkModel
from distlion.wire.tcp import WIRE_VARIABLE, choose_wire
from distlion_lab.cli.failure import leave_torchrun, shown_failures
from distlion_lab.cli.options import choice, flag, taking, whole
from distlion_lab.cli.quantity import read_count, read_seconds
from distlion_lab.cli.table import print_table
from distlion_lab.planning.accelerator import Accelerators, find_accelerators
from distlion_lab.planning.advice import Advice, advise
from distlion_lab.planning.checkup import Checkup, examine
from distlion_lab.planning.line import payload_share
from distlion_lab.planning.planner import compare_methods
from distlion_lab.planning.quantity import format_rate
from distlion_lab.planning.scenario import Scenario
from distlion_lab.training.local_workers import run_workers
from distlion_lab.training.train_settings import check_meeting_place, torchrun_world_size

EXAMPLE = "Example: distlion doctor --workers 2 --params 1e8 --compute-s 0.5"
_GIGA = 1e9
WHEN_IT_MATTERS = (
    "It matters for large messages and for long or lossy links: there bbr and cubic, the default "
    "of most Linux systems, may reach different rates."
)


@taking(
    workers=whole("Local worker processes.", "2; under torchrun, its world size"),
    threads=whole("Threads of one worker.", default=1),
    params=choice(str, "Trainable parameters for the plan: 125M.", default="1e8"),
    compute_s=choice(
        str,
        "Time of forward and backward for the plan: 0.5 (in seconds), 500ms.",
        default="0.5",
    ),
    as_json=flag("--json", "Print everything to standard output."),
)
def doctor_command(
    workers: int | None, threads: int, params: str, compute_s: str, *, as_json: bool
) -> None:
    """Measure machines, kernels and links, name the slowest rank, and advise on compression.

    By default it starts local workers, which are linked by the loopback interface. Under torchrun
    it joins that world and measures the network between its hosts.
    """
    messages = Console(stderr=True)
    with shown_failures(messages):
        planned = read_count("--params", params), read_seconds("--compute-s", compute_s)
        _check_planned(*planned)
        wire = choose_wire()
        if threads < 1:
            raise InvalidArgumentError(f"--threads {threads}: expected 1 or more")
        checkup = _examine_all(workers, threads, messages)
        if checkup is not None:
            scenario = _make_scenario(checkup, *planned, wire)
            found = _Found(
                checkup, find_accelerators(), scenario, advise(compare_methods(scenario))
            )
            _show(found, as_json=as_json)
    leave_torchrun()


def _examine_all(workers: int | None, threads: int, messages: Console) -> Checkup | None:
    """Return the findings; under torchrun on rank 0 only."""
    joined = torchrun_world_size()
    if joined is None:
        world_size = 2 if workers is None else workers
        if world_size < 1:
            raise InvalidArgumentError(f"--workers {workers}: expected 1 or more")
        with messages.status(f"starting {world_size} workers") as status:

            def show(text: str) -> None:
                status.update(text)
                if not messages.is_terminal:
                    messages.print(Text(text))

            found = run_workers(
                _work, threads, world_size=world_size, observe=show, preload=[__name__]
            )
        assert isinstance(found, Checkup)
        return found
    if workers not in (None, joined):
        raise InvalidArgumentError(
            f"--workers {workers}, but torchrun started {joined}; omit --workers"
        )
    check_meeting_place()
    shows = int(os.environ["RANK"]) == 0
    dist.init_process_group("gloo")
    found = _work(lambda text: messages.print(Text(text)) if shows else None, threads)
    dist.destroy_process_group()
    return found if shows else None


def _work(emit: Any, threads: int) -> Checkup:
    torch.set_num_threads(threads)
    return examine(emit)


def _check_planned(n_params: int, compute_s: float) -> None:
    """Refuse numbers without a possible plan before measuring anything."""
    Scenario(n_params=n_params, nodes=1, link=LinkModel(0.0, 1.0), compute_s=compute_s)


def _make_scenario(checkup: Checkup, n_params: int, compute_s: float, wire: str) -> Scenario:
    """Make the scenario of these workers: the measured link and the slowest worker's arithmetic."""
    return Scenario(
        n_params=n_params,
        nodes=len(checkup.workers),
        link=checkup.link.combined,
        compute_s=compute_s,
        machine=checkup.machine,
        wire=wire,
    )


class _Found(NamedTuple):
    """Findings to show."""

    checkup: Checkup
    accelerators: Accelerators
    scenario: Scenario
    advice: Advice


def _show(found: _Found, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_to_record(found), indent=1, allow_nan=False))
        return
    checkup, accelerators, scenario, advice = found
    console = Console()
    print_table(console, _build_table(checkup))
    sentences = [accelerators.describe()]
    if len(checkup.workers) > 1:  # a single worker has no link
        sentences = [
            f"all ranks together, over Gloo: {_describe_link(checkup.link.combined)}",
            *_name_slowest(checkup),
            _name_wire(scenario.wire),
            _name_congestion_control(checkup),
            *sentences,
        ]
    for sentence in sentences:
        console.print(Text(sentence), soft_wrap=True)
    problems = [*checkup.warnings, *([accelerators.warning] if accelerators.warning else [])]
    for warning in problems:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    if not problems:
        console.print(Text("nothing is wrong", style="green"))
    if not accelerators.missing and len(checkup.workers) > 1:
        console.print(Text(f"\n{_point_to_plan(scenario)}"), soft_wrap=True)
    console.print(
        Text(f"\nfor {scenario.n_params:.4g} parameters and {scenario.compute_s:g} s of compute:")
    )
    console.print(Text(advice.text, style="bold"), soft_wrap=True)


def _point_to_plan(scenario: Scenario) -> str:
    """Say whose forecast follows, and write the command that forecasts for GPUs."""
    link = scenario.link
    line = format_rate(link.rate_bit_per_s / payload_share())
    return (
        "the forecast below is for training on these CPUs. For training on GPUs, give their NAME "
        f"to:\ndistlion plan --params {scenario.n_params} --nodes {scenario.nodes} --link {line} "
        f"--latency-us {1e6 * link.latency_s:.0f} --compute-s {scenario.compute_s!r} --device NAME"
    )


def _to_record(found: _Found) -> dict[str, object]:
    checkup, accelerators, scenario, advice = found
    return dataclasses.asdict(checkup) | {
        "accelerators": dataclasses.asdict(accelerators),
        "slowest_link": checkup.link.slowest,
        "link_slowdown": checkup.link.slowdown,
        "slowest_kernels": checkup.slowest_kernels,
        "kernels_slowdown": checkup.kernels_slowdown,
        "scenario": scenario.to_json(),
        "advice": dataclasses.asdict(advice),
    }


def _build_table(checkup: Checkup) -> Table:
    cpus = sorted({worker.cpu for worker in checkup.workers})
    table = Table(title=", ".join(cpus), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("rank", "host", "cores", "threads", "kernels"):
        table.add_column(name, justify="left" if name in ("host", "kernels") else "right")
    for name in ("read\nGB/s", "encode\nGB/s", "commit\nGB/s", "latency\nus", "link\nbit/s"):
        table.add_column(name, justify="right")
    for rank, (worker, link) in enumerate(zip(checkup.workers, checkup.link.ranks, strict=True)):
        rates = worker.kernels
        alone = len(checkup.workers) == 1
        table.add_row(
            f"{rank}",
            worker.host,
            f"{worker.cores}",
            f"{worker.threads}",
            rates.kernels,
            f"{rates.read_bytes_per_s / _GIGA:.1f}",
            f"{rates.machine.encode_bytes_per_s / _GIGA:.1f}",
            f"{rates.machine.commit_bytes_per_s / _GIGA:.1f}",
            "" if alone else f"{link.latency_s * 1e6:.0f}",
            "" if alone else format_rate(link.rate_bit_per_s).removesuffix("bit"),
        )
    return table


def _describe_link(link: LinkModel) -> str:
    return f"{link.latency_s * 1e6:.0f} us a round, {format_rate(link.rate_bit_per_s)}/s a rank"


def _name_wire(wire: str) -> str:
    if wire == "gloo":
        return (
            "votes travel over Gloo, whose round trip is the latency above; without "
            f"{WIRE_VARIABLE} Linux sends them over distlion's own sockets"
        )
    return (
        "votes travel over distlion's own sockets: a round of theirs takes about half of the "
        f"latency above, which is Gloo's round trip. {WIRE_VARIABLE}=gloo sends them over Gloo"
    )


def _name_congestion_control(checkup: Checkup) -> str:
    """Name the congestion control of all ranks, and say when it matters."""
    names = [worker.congestion_control or "unknown" for worker in checkup.workers]
    if len({*names}) == 1:
        named = names[0]
    else:
        named = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(names))
    return f"TCP congestion control: {named}. {WHEN_IT_MATTERS}"


def _name_slowest(checkup: Checkup) -> list[str]:
    """Name the slowest of several ranks."""
    kernels = (
        f"slowest kernels: rank {checkup.slowest_kernels}, {checkup.kernels_slowdown:.2f} times "
        "slower than the median rank"
    )
    if len(checkup.workers) == 2:
        return [kernels, "slowest link: two ranks share the only one"]
    link = checkup.link
    return [
        kernels,
        f"slowest link: rank {link.slowest}, {link.slowdown:.2f} times slower than the median rank",
    ]
