"""Trace one step on each of some hosts, and draw where its time goes.

    python benchmarks/step_trace.py [--hosts 2] [--rate 1gbit] [--layers 8] [--width 1024]
                                    [--step-s 0.3]

Hosts are network namespaces of this machine (`distlion netlab`), so this needs Linux and root
rights. Computing is an emulated accelerator: a host sleeps meanwhile. Two methods, a vote after
backward and one with overlap. Of a few steps of each, the one of median length is shown. Writes
step_trace.json, step_trace.md and step_trace.png to benchmarks/results; --again draws the record
that is there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distlion_lab.report.document import Heading, Paragraph, Picture, Table, render_markdown
from distlion_netlab.fleet import Fleet
from distlion_netlab.lab import Lab
from distlion_netlab.sweep import read_lab_conditions
from distlion_netlab.trace import OPTIMIZER, PARTS, STEP, Span
from distlion_netlab.workload import DeviceWorkload

RESULTS = Path(__file__).resolve().parent / "results" / "step_trace.json"
METHODS = {
    "majority-all-reduce": "a vote after backward",
    "majority-all-reduce-overlap": "votes during backward (overlap=True)",
}
WARM_UP, STEPS = 5, 9
COLORS = dict(
    zip(
        PARTS,
        ("#8d96a3", "#d9541e", "#f0a27f", "#e3e6ea", "#5b8bd0", "#2f5f9e", "#3f9163"),
        strict=True,
    )
)
COMPUTE_COLOR, STEP_COLOR = "#e8dfb8", "#fbe3d6"
Traced = list[list[Span]]
"""The spans of each host."""


def measure(hosts: int, rate: str, workload: DeviceWorkload) -> dict[str, Any]:
    """Trace both methods; return the record."""
    with Lab(hosts, rates=rate) as lab, Fleet(lab) as fleet:
        conditions = read_lab_conditions(lab)
        traced = {}
        for name in METHODS:
            fleet.ask("build", name, workload)
            fleet.ask("run_block", name, WARM_UP)
            steps = [fleet.ask("trace", name) for _ in range(STEPS)]
            traced[name] = sorted(steps, key=find_seconds)[STEPS // 2]
            fleet.ask("drop", name)
    return {
        "conditions": conditions,
        "hosts": hosts,
        "rate": rate,
        "workload": asdict(workload),
        "spans": {
            name: [[asdict(span) for span in spans] for spans in each]
            for name, each in traced.items()
        },
    }


def find_seconds(traced: Traced) -> float:
    """Return the seconds of a step on the slowest host."""
    return max(span.end_s - span.begin_s for spans in traced for span in spans if span.what == STEP)


def read_spans(record: dict[str, Any], name: str) -> Traced:
    return [[Span(**span) for span in spans] for spans in record["spans"][name]]


def list_totals(traced: Traced) -> Iterator[tuple[str, float, int]]:
    """Yield each part with its mean milliseconds on a host, and how often it ran there."""
    for part in PARTS:
        spans = [span for each in traced for span in each if span.what == part]
        total_s = sum(span.end_s - span.begin_s for span in spans)
        yield part, 1e3 * total_s / len(traced), round(len(spans) / len(traced))


def draw(record: dict[str, Any]) -> bytes:
    """Draw each method: a row for each thread of each host, time from left to right."""
    figure = Figure(figsize=(4.8, 2 + 0.9 * record["hosts"] * len(METHODS)), dpi=160)
    figure.set_layout_engine("constrained")
    all_axes = figure.subplots(len(METHODS), 1, sharex=True)
    for axes, (name, title) in zip(all_axes, METHODS.items(), strict=True):
        draw_step(axes, read_spans(record, name))
        axes.set_title(title, loc="left", fontsize="medium")
    all_axes[-1].set_xlim(left=600 * record["workload"]["step_s"])
    all_axes[-1].set_xlabel("milliseconds since the step began;\nits beginning is cut off")
    named = all_axes[0].get_legend_handles_labels()
    figure.legend(*named, frameon=False, ncols=2, loc="outside upper left")
    return save(figure)


def draw_step(axes: Axes, traced: Traced) -> None:
    """Draw one step of all hosts."""
    start_s = min(span.begin_s for spans in traced for span in spans if span.what == STEP)
    labels, drawn = [], set()
    for host, spans in enumerate(traced):
        for is_main in (True, False):
            own = [span for span in spans if span.is_main is is_main and span.what in PARTS]
            if not is_main and not own:
                continue
            row = len(labels)
            labels.append(f"host {host}" if is_main else "its votes' thread")
            if is_main:
                (step,) = (span for span in spans if span.what == STEP)
                (vote,) = (span for span in spans if span.what == OPTIMIZER)
                bars = [
                    ("forward and backward", step.begin_s, vote.begin_s, COMPUTE_COLOR),
                    ("the rest of step()", vote.begin_s, vote.end_s, STEP_COLOR),
                ]
            else:
                bars = []
            bars += [(span.what, span.begin_s, span.end_s, COLORS[span.what]) for span in own]
            for what, begin_s, end_s, color in bars:
                label = None if what in drawn else what
                drawn.add(what)
                left, width = 1e3 * (begin_s - start_s), 1e3 * (end_s - begin_s)
                axes.barh(row, width, left=left, height=0.8, color=color, label=label)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def save(figure: Figure) -> bytes:
    from io import BytesIO

    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def write_pages(file: Path) -> None:
    """Write the Markdown and the picture of a record."""
    record = json.loads(file.read_text())
    workload, conditions = record["workload"], record["conditions"]
    millions = workload["layers"] * workload["width"] ** 2 / 1e6
    traced = {title: read_spans(record, name) for name, title in METHODS.items()}
    totals = [list(list_totals(each)) for each in traced.values()]
    rows = []
    for part, *_ in totals[0]:
        found = [next(each for each in total if each[0] == part) for total in totals]
        rows.append([part, *(cell for _, ms, n in found for cell in (f"{ms:.2f}", str(n)))])
    header = ["part", *(cell for title in traced for cell in (f"{title}, ms", "times"))]
    steps = ", ".join(
        f"{title}: {1e3 * find_seconds(each):.0f} ms" for title, each in traced.items()
    )
    blocks = [
        Heading("Where the time of a step goes", level=1),
        Paragraph(
            f"Written by `python benchmarks/step_trace.py` on {conditions['date']}: {millions:.1f} "
            f"million parameters on {record['hosts']} hosts of one machine with "
            f"{conditions['cores']} cores, links of {record['rate']}, TCP "
            f"{conditions['tcp_congestion_control']}. An emulated accelerator computes for "
            f"{workload['step_s']:g} s. The whole step, on the slowest host: {steps}."
        ),
        Picture(f"{file.stem}.png", "One step on each host, as bars over time", draw(record)),
        Paragraph(
            "Milliseconds of each part, mean over hosts. What the votes' thread does during "
            "backward hides behind it."
        ),
        Table(header, rows),
    ]
    file.with_suffix(".md").write_text(render_markdown(blocks))
    file.with_suffix(".png").write_bytes(blocks[2].png)


def main() -> None:
    parser = argparse.ArgumentParser("python benchmarks/step_trace.py")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--step-s", type=float, default=0.3)
    parser.add_argument("--again", action="store_true", help="measure nothing: draw again")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the record goes")
    args = parser.parse_args()
    if not args.again:
        workload = DeviceWorkload(layers=args.layers, width=args.width, step_s=args.step_s)
        record = measure(args.hosts, args.rate, workload)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    write_pages(args.json)


if __name__ == "__main__":
    main()
