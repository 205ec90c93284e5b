"""The report on inner optimizers that orthogonalize, beside AdamW inside."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import fmean, median

import numpy as np
import target_path  # noqa: F401
from archive import Records
from arrivals import Blocks, Entry, find_targets, read_blocks, read_inner_seconds
from choices import list_inner_cells
from claims_made import DECIDING_LINK, DECIDING_SHARE
from contest import DDP, INNER_PERIODS, INNERS, SIMPLEST, Local, lengthen, make_cell, read_local
from contrasts import find_contrast, read_losses
from inner_kinds import GROUPED_LION, MUON
from intervals import spread
from page import LINK_TITLES, tabulate_progress, tabulate_seconds

from distlion_lab.report.document import Block, Heading, Paragraph, Table, render_markdown

NAME = "local_steps_inners"
TITLES = {
    "": "AdamW",
    MUON: "Muon, with AdamW for the rest",
    GROUPED_LION: "Lion with the groups of `group_params`",
}
MEAN = "diloco-plain"
Entries = Mapping[tuple[str, str, int, bool], Entry]
"""Entries by inner optimizer, exchange, H, and whether they are longer."""


def write_inner_report(records: Records, folder: Path) -> Path:
    """Write the page, computed from the records and nothing else."""
    path = folder / f"{NAME}.md"
    path.write_text(render_markdown(list(_lay_out(records))))
    return path


def read_inner_entries(records: Records) -> Entries:
    """Read what has been recorded of all cells, at both lengths."""
    found = {}
    for every in INNER_PERIODS:
        for cell, is_long in product(list_inner_cells(every), (False, True)):
            local = read_local(cell.method)
            assert local is not None
            entry = Entry.read(lengthen(cell) if is_long else cell, records.read)
            found[local.inner, local.kind, every, is_long] = entry
    return found


def _lay_out(records: Records) -> Iterator[Block]:
    entries = read_inner_entries(records)
    targets = find_targets("text", records.read)
    blocks = {link: read_blocks(records.folder, "text", link) for link in LINK_TITLES}
    yield Heading("Inner optimizers that orthogonalize", level=1)
    yield Paragraph(
        "Computed from `benchmarks/results/local_steps/` by `python benchmarks/local_steps "
        "inners`, by the addition of 2026-11-28 to the "
        "[protocol](../../studies/local-steps-protocol.md). Text, 1.07 million "
        "parameters, 8 workers, three seeds. `-over-muon`: "
        f"{TITLES[MUON]}. `-over-grouped-lion`: {TITLES[GROUPED_LION]}. Others: AdamW."
    )
    yield Heading("What may be said")
    targets_80 = targets.get(DECIDING_SHARE, {})
    rows = [
        [
            TITLES[inner],
            find_verdict(entries, inner),
            find_sooner(entries, inner, targets_80, blocks[DECIDING_LINK]),
        ]
        for inner in INNERS
        if inner
    ]
    yield Table(["inside", "loss beside AdamW", "sooner at 10 Mbit/s"], rows)
    yield Heading("What has been run")
    yield tabulate_progress(records, is_inner=True)
    yield Heading("Differences between last losses")
    yield Paragraph(
        "Over this inner optimizer minus the same exchange over AdamW, with two-sided 95 % "
        "intervals, as in the [study](local_steps.md)."
    )
    yield _tabulate_inners(entries)
    yield Paragraph(
        "**What a vote costs**: votes minus means of deltas over the same inner optimizer; and "
        "how much more that is than over AdamW."
    )
    yield _tabulate_costs(entries)
    if targets:
        ddp = Entry.read(make_cell("text", DDP), records.read)
        for link, title in LINK_TITLES.items():
            yield Paragraph(f"**Seconds to DDP's loss at {title}**, of two lengths the sooner one.")
            known = [ddp, *(each for each in entries.values() if each.records)]
            yield tabulate_seconds(known, targets, blocks[link], hides=False)
    yield Heading("Rates and computing")
    yield _tabulate_rates(entries)
    yield from _lay_out_seconds(records.folder)


def find_verdict(entries: Entries, inner: str) -> str:
    """Return the verdict that decides on losses: the simplest vote at the first H, longer runs."""
    place = (SIMPLEST, INNER_PERIODS[0], True)
    entry, reference = entries[(inner, *place)], entries[("", *place)]
    if not (entry.is_whole and reference.is_whole):
        return "not yet"
    contrast = find_contrast(entry, reference)
    return "diverged" if contrast is None else f"{contrast.verdict} ({contrast.mean:+.3f})"


def find_sooner(entries: Entries, inner: str, targets: Mapping[int, float], blocks: Blocks) -> str:
    """Return whether each seed of its soonest vote is there before the mean of AdamW's soonest."""
    if not targets:
        return "not yet"
    own, adamw = (_find_soonest(entries, each, targets, blocks) for each in (inner, ""))
    if own is None or adamw is None:
        return "not yet"
    if not all(map(math.isfinite, own)):
        return "no"
    return "yes" if max(own) < fmean(adamw) else "no"


def _find_soonest(
    entries: Entries, inner: str, targets: Mapping[int, float], blocks: Blocks
) -> list[float] | None:
    """Return seconds by seed of the vote with the lowest mean; None before all are run."""
    votes = [entry for key, entry in entries.items() if key[0] == inner and key[1] != MEAN]
    seconds = [entry.seconds_to(targets, blocks) for entry in votes]
    if any(each is None for each in seconds):
        return None
    return min((list(each.values()) for each in seconds if each is not None), key=fmean)


def _tabulate_inners(entries: Entries) -> Table:
    rows = []
    for (inner, kind, every, is_long), entry in entries.items():
        contrast = find_contrast(entry, entries["", kind, every, is_long]) if inner else None
        if contrast is not None:
            interval = f"{contrast.low:+.3f} to {contrast.high:+.3f}"
            shown = [f"{contrast.mean:+.3f}", interval, contrast.verdict]
            rows.append([entry.title, str(contrast.n_seeds), *shown])
    return Table(["method", "seeds", "difference", "interval", ""], rows)


def _tabulate_costs(entries: Entries) -> Table:
    rows = []
    for (inner, kind, every, is_long), entry in entries.items():
        mean = entries.get((inner, MEAN, every, is_long))
        if kind == MEAN or mean is None:
            continue
        contrast = find_contrast(entry, mean)
        if contrast is None:
            continue
        interval = f"{contrast.low:+.3f} to {contrast.high:+.3f}"
        row = [entry.title, str(contrast.n_seeds), f"{contrast.mean:+.3f}", interval]
        others = entries["", kind, every, is_long], entries["", MEAN, every, is_long]
        rows.append([*row, _describe_more((entry, mean), others) if inner else ""])
    head = ["method", "seeds", "votes minus means", "interval", "more than over AdamW"]
    return Table(head, rows)


def _describe_more(own: tuple[Entry, Entry], others: tuple[Entry, Entry]) -> str:
    """Describe the difference of two differences, by the seeds that all four have."""
    seeds = sorted(set.intersection(*(set(each.curves) for each in (*own, *others))))
    if len(seeds) < 2:
        return "missing"
    differences = [
        np.array([read_losses(first, seed) - read_losses(second, seed) for seed in seeds])
        for first, second in (own, others)
    ]
    more = differences[0] - differences[1]
    half, _ = spread(more)
    mean = float(more.mean())
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def _tabulate_rates(entries: Entries) -> Table:
    rows = []
    for (inner, kind, every, is_long), entry in entries.items():
        if every != INNER_PERIODS[0] or is_long:
            continue
        choice = entry.choice
        rate = "-" if choice.rate is None else f"{choice.rate:g}" + " (edge)" * choice.at_edge
        tried = ", ".join(f"{each:g}: {loss:.4f}" for each, loss in choice.losses.items())
        rows.append([Local(every, kind, inner).method, rate, tried])
    return Table(["method", "rate", "validation losses by rate, seed 0"], rows)


def _lay_out_seconds(folder: Path) -> Iterator[Block]:
    found = read_inner_seconds(folder)
    if found is None:
        yield Paragraph("Steps with each inner optimizer have not been timed yet.")
        return
    said = ", ".join(f"{name} {value}" for name, value in found["conditions"].items())
    yield Paragraph(f"**Seconds of a worker's step**, medians and ranges, in turns. {said}.")
    rows = [
        [name, f"{median(each):.4g} ({min(each):.4g} - {max(each):.4g})"]
        for name, each in found["seconds"].items()
    ]
    yield Table(["", "seconds"], rows)
