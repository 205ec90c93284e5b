"""The Markdown and the picture of a record of traces."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from statistics import median
from typing import Any

from bucket_parts import (
    COMMIT,
    COUNT,
    ENCODE,
    FRAMES,
    LATER,
    ON_THE_WAY,
    PARTS,
    REST,
    SEND,
    WAKE_UP,
    Step,
    find_length,
    find_median_step,
    find_medians,
    list_spans,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distlion_lab.report.document import Block, Heading, Paragraph, Picture, Table

Record = dict[str, Any]
BEFORE, GLOO, TCP = "before", "gloo", "tcp"
COLORS = {
    ENCODE: "#d9541e",
    FRAMES: "#f0a27f",
    SEND: "#8d96a3",
    LATER: "#e8dfb8",
    ON_THE_WAY: "#dfe7f2",
    WAKE_UP: "#b3121d",
    COUNT: "#5b8bd0",
    COMMIT: "#2f5f9e",
    REST: "#c9ced6",
}
CAPTION = "A step with one bucket on every rank, before and after, as bars over time"
WIDTH, ROW, HEAD = 4.8, 0.26, 0.62
"""Inches. On a phone letters of the usual size are read then."""


def name_variants(record: Record) -> dict[str, str]:
    """Return what the variants are called, by their names."""
    names = {GLOO: "Gloo", TCP: "own sockets"}
    if BEFORE not in record["commits"]:
        return names
    return {BEFORE: "before", GLOO: "today, Gloo", TCP: "today, own sockets"}


def name_cell(cell: Record) -> str:
    place = cell["place"]
    latency = f", {1e3 * place['latency_s']:g} ms" if place["latency_s"] else ""
    return f"{place['hosts']} hosts{latency}"


def find_step_ms(steps: list[Step]) -> float:
    """Return the milliseconds of the median step."""
    return median(map(find_length, steps)) / 1e3


def draw(record: Record) -> bytes:
    """Draw the median step of the first variant and of the last one, for each cell."""
    names = name_variants(record)
    shown = (next(iter(names)), TCP)
    cells = [(cell, name) for cell in record["cells"] for name in shown]
    ranks = [cell["place"]["hosts"] for cell, _ in cells]
    size = (WIDTH, 1.5 + sum(HEAD + ROW * n for n in ranks))
    figure = Figure(figsize=size, dpi=160, layout="constrained")
    heights = [HEAD + ROW * n for n in ranks]
    all_axes = figure.subplots(len(cells), 1, height_ratios=heights)
    ends: dict[str, float] = {}
    for axes, (cell, name) in zip(all_axes, cells, strict=True):
        steps, title = cell["steps"][name], name_cell(cell)
        draw_step(axes, find_median_step(steps))
        axes.set_title(
            f"{title}, {names[name]}: {find_step_ms(steps):.1f} ms",
            loc="left",
            fontsize="medium",
            fontweight="bold",
        )
        ends[title] = max(ends.get(title, 0), axes.get_xlim()[1])
    for axes, (cell, _) in zip(all_axes, cells, strict=True):
        axes.set_xlim(0, ends[name_cell(cell)])
    all_axes[-1].set_xlabel("milliseconds since the first rank began")
    named = all_axes[0].get_legend_handles_labels()
    figure.legend(*named, frameon=False, ncols=2, loc="outside upper left")
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def draw_step(axes: Axes, step: Step) -> None:
    """Draw one step: a row for each rank, time from left to right."""
    for part in PARTS:  # the legend has them in this order
        axes.barh(0, 0, color=COLORS[part], label=part)
    for rank in range(len(step)):
        for span in list_spans(step, rank):
            left, width = span.begin / 1e3, (span.end - span.begin) / 1e3
            axes.barh(rank, width, left=left, height=0.8, color=COLORS[span.part])
    axes.set_xlim(0, max(instants[-1] for instants in step) / 1e3)
    axes.set_yticks(range(len(step)), [f"rank {rank}" for rank in range(len(step))])
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def write_tables(record: Record) -> Iterator[Block]:
    """Yield a table for each cell: milliseconds of each part."""
    names = name_variants(record)
    for cell in record["cells"]:
        place, steps = cell["place"], cell["steps"]
        n_steps = min(map(len, steps.values()))
        latency = f", latency {1e3 * place['latency_s']:g} ms" if place["latency_s"] else ""
        yield Heading(f"{place['hosts']} hosts{latency}")
        yield Paragraph(
            f"{n_steps} steps of each, {cell['vote_bytes']:,} bytes of votes for every other rank "
            f"and {cell['reply_bytes']:,} of a reply."
        )
        medians = {name: find_medians(steps[name]) for name in names}
        rows = [[part, *(f"{medians[name][part] / 1e3:.2f}" for name in names)] for part in PARTS]
        whole = [f"{find_step_ms(steps[name]):.2f}" for name in names]
        yield Table(
            ("part", *(f"{name} (ms)" for name in names.values())),
            [*rows, ["the step, where it takes longest", *whole]],
        )


def write_page(record: Record, file_name: str) -> list[Block]:
    """Return the page of a record, with its picture."""
    cells, commits = record["cells"], record["commits"]
    place, conditions = cells[0]["place"], cells[0]["conditions"]
    before = (
        f"Before is the commit {commits[BEFORE]}, with Gloo: frames were written and checked in "
        "Python, and there were no sockets of distlion's own."
        if BEFORE in commits
        else "Before is Gloo with the same code."
    )
    if "beside" in record:  # written into a record by hand, where a measurement was disturbed
        before = f"{record['beside']} {before}"
    loads = ", ".join(f"{cell['conditions']['load_average_before']:g}" for cell in cells)
    return [
        Heading("Where the time of one bucket goes, on all ranks", level=1),
        Paragraph(
            f"Written by `{record['command']}` on {conditions['date']}, torch "
            f"{conditions['torch']}. A bucket of {place['n_elements']:,} parameters, "
            f"`MajorityVote` and `AllReduce`. Hosts are on one machine with {conditions['cores']} "
            "cores, and share one where there are more hosts; links of "
            f"{place['rate']}, TCP {conditions['tcp_congestion_control']}. Load average before "
            f"each part: {loads}. {before} Today is the commit "
            f"{commits[TCP]}."
        ),
        Picture(f"{file_name}.png", CAPTION, draw(record)),
        Paragraph(
            "Every rank is the owner of a shard: it sends votes to the others, counts those on its "
            "shard, and sends a reply. All ranks begin at one moment of the machine's clock. Waits "
            f"have three parts. *{LATER.capitalize()}* lasts until every rank has sent, "
            f"*{ON_THE_WAY}* until the kernel had the last byte, by the packets that came to the "
            f"host, and *{WAKE_UP}* until the waiting thread went on. *{SEND.capitalize()}* has "
            "all system calls of own sockets, and bytes that travel meanwhile; Gloo makes them in "
            "a thread of its own. The variants took turns. The picture has the median step; the "
            "tables have medians over steps, of means over ranks."
        ),
        *write_tables(record),
    ]
