"""The report: claims first, then seconds, bytes and how methods were tuned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import target_path  # noqa: F401
from archive import Records
from arrivals import (
    COMPUTE,
    SHARES,
    Blocks,
    Entry,
    find_pace,
    find_targets,
    read_all,
    read_blocks,
    read_seconds,
)
from cells import SEEDS, choose_rate
from choices import PARTS, choose_default, choose_votes, list_reported, list_tuned, tune_votes
from claims_made import DECIDING_LINK, DECIDING_SHARE, DECIDING_TASK, judge, list_sooner
from contest import DDP, PERIODS, SETTINGS, VOTES
from contrasts import list_contrasts
from pictures import draw_panels
from whole_runs import lay_out_whole

from distlion_lab.report.document import (
    Block,
    Heading,
    Paragraph,
    Picture,
    Table,
    render_markdown,
)

NAME = "local_steps"
LINK_TITLES = {"1mbit": "1 Mbit/s", "10mbit": "10 Mbit/s", "100mbit": "100 Mbit/s"}
_EQUAL_SECONDS = (0.01, 0.1, 1.0)
"""Shares of DDP's whole time at which losses are compared."""


def write_report(records: Records, folder: Path) -> Path:
    """Write ``local_steps.md`` and its pictures, computed from the records and nothing else."""
    blocks = list(_lay_out(records))
    for block in blocks:
        if isinstance(block, Picture):
            (folder / block.name).write_bytes(block.png)
    path = folder / f"{NAME}.md"
    path.write_text(render_markdown(blocks))
    return path


def read_entries(task: str, records: Records) -> list[Entry]:
    """Return all methods that are reported on a task, at every H and length that has been run."""
    first, *others = PERIODS
    cells = list_reported(task, records.read, first)
    more = [cell for every in others for cell in list_reported(task, records.read, every)]
    entries = read_all(records, [*cells, *more])
    return [each for each in entries if each.cell in cells or each.records]


def _lay_out(records: Records) -> Iterator[Block]:
    yield Heading("Votes every H steps, in equal time", level=1)
    yield Paragraph(
        "Computed from `benchmarks/results/local_steps/` by `python benchmarks/local_steps`, by "
        "the [protocol](../../studies/local-steps-protocol.md) that was fixed before the "
        "runs. Seconds are steps of trained curves times measured seconds of computing and of "
        "exchanges on 8 hosts; nothing overlaps unless a table says so. Each seed's target is the "
        "test loss of DDP with the same seed."
    )
    yield from _lay_out_claims(records)
    yield Heading("What has been run")
    yield tabulate_progress(records, is_inner=False)
    for task in SETTINGS:
        yield from _lay_out_task(task, records)
    yield from lay_out_whole(records, LINK_TITLES)


def _lay_out_claims(records: Records) -> Iterator[Block]:
    targets = find_targets(DECIDING_TASK, records.read).get(DECIDING_SHARE, {})
    entries = read_entries(DECIDING_TASK, records) if targets else []
    found = judge(entries, targets, read_blocks(records.folder, DECIDING_TASK, DECIDING_LINK))
    default = choose_default(records.read)
    yield Heading("What may be said")
    # The ratio is 0 where no vote gets there.
    ratios = f"{found.ratio:.1f}, slowest seed {found.least_ratio:.1f}" if found.ratio > 0 else ""
    rows = [
        ["at least 10 times as fast as DDP", found.ten_times, found.best or "", ratios],
        ["ahead of DiLoCo", found.is_ahead, found.best or "", found.diloco or ""],
        ["default vote of `LocalSteps`", default.chosen if default else "not yet", "", ""],
    ]
    yield Table(["claim", "answer", "best vote", "beside"], rows)
    if default is not None:
        scores = sorted(default.scores.items(), key=lambda pair: pair[1])
        head = ["vote", "validation loss / DDP's, summed over both tasks"]
        yield Table(head, [[kind, f"{score:.4f}"] for kind, score in scores])


def tabulate_progress(records: Records, *, is_inner: bool) -> Table:
    """Return what has been run of the parts that compare inner optimizers, or of all others."""
    rows = []
    for part in PARTS:
        if part.is_inner != is_inner:
            continue
        cells = part.list_cells(records.read)
        entries = [Entry.read(cell, records.read) for cell in cells]
        done = [each.is_whole if part.every else each.choice.rate is not None for each in entries]
        n_open = len(part.list_open(records.read))
        rows.append([part.name, str(len(cells)), str(sum(done)), str(n_open)])
    return Table(["part", "cells", "complete", "runs open"], rows)


def _lay_out_task(task: str, records: Records) -> Iterator[Block]:
    entries = read_entries(task, records)
    blocks = {link: read_blocks(records.folder, task, link) for link in LINK_TITLES}
    targets = find_targets(task, records.read)
    yield Heading(task.capitalize())
    for hides in (False, True) if targets else ():
        for link in LINK_TITLES:
            how = ", with DDP's exchange hidden behind its backward pass" if hides else ""
            yield Paragraph(
                f"**Seconds to DDP's loss at {LINK_TITLES[link]}{how}**: mean and range of seeds, "
                "and how many times as long DDP takes. Of two lengths the sooner one counts."
            )
            yield tabulate_seconds(entries, targets, blocks[link], hides=hides)
    yield Paragraph(
        "**Differences between last losses**, method minus reference, with two-sided 95 % "
        "confidence intervals: of Student's t over seeds, on text the wider of that and a normal "
        "one over blocks of windows. *Leads* and *trails*: the interval excludes 0. Nothing "
        "corrects for the number of comparisons."
    )
    yield _tabulate_differences(entries)
    yield Paragraph("**Loss after equal seconds**: shares of DDP's whole time on that link.")
    yield _tabulate_equal_seconds(entries, blocks)
    yield Paragraph(
        "**Loss after equal bytes**: megabytes up and down. 1-bit Adam sends 32 bits each way "
        "in the first fifth of its run and PowerSGD in two steps, so early steps pay more."
    )
    yield _tabulate_bytes(entries)
    picture = draw_panels(
        _collect_panels(entries, blocks),
        [fmean(each.values()) for each in targets.values()],
        "nats a byte" if task == "text" else "nats an image",
    )
    if picture is not None:
        caption = (
            "Test loss over seconds and over megabytes, mean of seeds, of some of the methods. "
            "Dashed grey: DDP's loss after 50, 80 and 100 % of its steps, the targets."
        )
        yield Picture(f"{NAME}_{task}.png", caption, picture)
    yield Paragraph("**Votes by validation loss** at H = 8, seed 0, and the rates of all methods.")
    yield _tabulate_votes(task, records)
    yield _tabulate_tuning(task, records)
    yield from _lay_out_timing(task, records.folder)


def tabulate_seconds(
    entries: Sequence[Entry],
    targets: Mapping[float, Mapping[int, float]],
    blocks: Blocks,
    *,
    hides: bool,
) -> Table:
    """Return seconds to each target, of each method at the length that is sooner."""
    columns = {share: list_sooner(entries, targets[share], blocks, hides=hides) for share in SHARES}
    rows = []
    for place, (entry, _) in enumerate(columns[SHARES[0]]):
        row = [entry.title.partition(", 3 x")[0]]
        for share in SHARES:
            chosen, seconds = columns[share][place]
            ddp = next(each for other, each in columns[share] if other.method == DDP)
            row.append(_describe_seconds(seconds, ddp) + (" (long)" if chosen.cell.is_long else ""))
        rows.append(row)
    return Table(["method", *(f"after {share:.0%} of DDP's steps" for share in SHARES)], rows)


def _describe_seconds(seconds: Mapping[int, float] | None, ddp: Mapping[int, float] | None) -> str:
    if seconds is None:
        return "missing"
    reached = [each for each in seconds.values() if math.isfinite(each)]
    if len(reached) < len(SEEDS):
        return f"not reached ({len(reached)} of {len(SEEDS)} seeds)"
    text = f"{fmean(reached):.1f} ({min(reached):.1f} - {max(reached):.1f})"
    return text if ddp is None else f"{text}, {fmean(ddp.values()) / fmean(reached):.2f}x"


def _tabulate_differences(entries: Sequence[Entry]) -> Table:
    rows = [
        [
            each.entry.title,
            each.reference.title,
            str(each.n_seeds),
            f"{each.mean:+.3f}",
            f"{each.low:+.3f} to {each.high:+.3f}",
            each.verdict,
        ]
        for each in list_contrasts(entries)
    ]
    return Table(["method", "reference", "seeds", "difference", "interval", ""], rows)


def _tabulate_equal_seconds(entries: Sequence[Entry], blocks: Mapping[str, Blocks]) -> Table:
    rows = []
    for entry in entries:
        row = [entry.title]
        for link in LINK_TITLES:
            steps = entry.cell.setting.steps
            pace = find_pace(entry.method, steps, blocks[link])
            ddp_steps = SETTINGS[entry.cell.setting.task].steps
            ddp = find_pace(DDP, ddp_steps, blocks[link])
            for share in _EQUAL_SECONDS:
                if pace is None or ddp is None:
                    row.append("missing")
                    continue
                step = pace.step_at(share * ddp.seconds(ddp_steps))
                row.append(_describe_loss(entry.mean_loss(step), is_over=step > steps))
        rows.append(row)
    head = [f"{LINK_TITLES[link]}, {share:.0%}" for link in LINK_TITLES for share in _EQUAL_SECONDS]
    return Table(["method", *head], rows)


def _describe_loss(loss: float | None, *, is_over: bool) -> str:
    if loss is None:
        return "-"
    return f"{loss:.3f}" + (" (end)" if is_over else "")


def _tabulate_bytes(entries: Sequence[Entry]) -> Table:
    totals = {
        each.title: traffic.at(each.cell.setting.steps)
        for each in entries
        if (traffic := each.traffic) is not None
    }
    sizes = sorted({float(f"{total:.3g}") for total in totals.values()})
    # The cheapest, the dearest, and one in between.
    budgets = list(dict.fromkeys([sizes[0], sizes[len(sizes) // 2], sizes[-1]])) if sizes else []
    rows = []
    for entry in entries:
        traffic, steps = entry.traffic, entry.cell.setting.steps
        mean = f"{1e3 * totals[entry.title] / steps:.4g}" if entry.title in totals else "-"
        row = [entry.title, mean]
        for budget in budgets:
            step = None if traffic is None else traffic.step_at(budget)
            loss = None if step is None else entry.mean_loss(step)
            row.append(_describe_loss(loss, is_over=step is not None and step > steps))
        rows.append(row)
    return Table(["method", "kB a step", *(f"{budget:g} MB" for budget in budgets)], rows)


def _collect_panels(
    entries: Sequence[Entry], blocks: Mapping[str, Blocks]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    whole = [each for each in entries if len(each.curves) == len(SEEDS) and each.drawn_as]
    longest = {each.method: each for each in sorted(whole, key=lambda each: each.cell.is_long)}
    shown = [each for each in whole if each is longest[each.method]]
    for link, title in LINK_TITLES.items():
        panels[f"seconds at {title}"] = lines = {}
        for entry in shown:
            pace = find_pace(entry.method, entry.cell.setting.steps, blocks[link])
            if pace is not None:
                lines[entry.drawn_as] = [(pace.seconds(n), loss) for n, loss in _average(entry)]
    panels["megabytes up and down"] = {
        entry.drawn_as: [(traffic.at(n), loss) for n, loss in _average(entry)]
        for entry in shown
        if (traffic := entry.traffic) is not None
    }
    return panels


def _average(entry: Entry) -> list[tuple[float, float]]:
    points = zip(*entry.curves.values(), strict=True)
    return [(float(each[0][0]), fmean(point[1] for point in each)) for each in points]


def _tabulate_votes(task: str, records: Records) -> Table:
    losses, chosen = tune_votes(task, records.read), choose_votes(task, records.read)
    known = {kind: loss for kind, loss in losses.items() if loss is not None}
    rows = [
        [
            kind,
            f"{known[kind]:.4f}" if kind in known else "missing" if kind in losses else "not run",
            "yes" * (kind in (chosen or ())),
        ]
        for kind in sorted(
            {**dict.fromkeys(VOTES), **losses}, key=lambda kind: known.get(kind, math.inf)
        )
    ]
    return Table(["rule and outer step", "validation loss", "reported"], rows)


def _tabulate_tuning(task: str, records: Records) -> Table:
    rows = []
    for cell in list_tuned(task, records.read):
        choice = choose_rate(cell, records.read)
        rate = "-" if choice.rate is None else f"{choice.rate:g}" + " (edge)" * choice.at_edge
        tried = ", ".join(f"{each:g}: {loss:.4f}" for each, loss in choice.losses.items())
        inner = "" if cell.inner_rate is None else f"{cell.inner_rate:g}"
        rows.append([cell.method, rate, inner, tried])
    return Table(["method", "rate", "inner rate", "validation losses by rate"], rows)


def _lay_out_timing(task: str, folder: Path) -> Iterator[Block]:
    found = read_seconds(folder, task)
    if found is None:
        yield Paragraph("Seconds have not been measured yet.")
        return
    yield Paragraph(
        "**Seconds of a step's computing and of each exchange**, medians and ranges of "
        f"repetitions. {_describe_conditions(found['conditions'])}"
    )
    yield Paragraph(
        "After a semicolon: seconds that the process of rank 0 spends on a core during the "
        "exchange. The exchanges of `sparse-H` (sparse) and of 1-bit Adam (signs) contain their "
        "own compression in Python and numpy, on cores that all hosts share."
    )
    links = [link for link in LINK_TITLES if link in found["seconds"]]
    rows = []
    for name in found["seconds"][links[0]]:
        row = ["computing (c)" if name == COMPUTE else f"exchange: {name}"]
        row += [_describe_blocks(found, link, name) for link in links]
        rows.append(row)
    yield Table(["", *(LINK_TITLES[link] for link in links)], rows)


def _describe_blocks(found: Mapping[str, Any], link: str, name: str) -> str:
    blocks = found["seconds"][link][name]
    text = f"{median(blocks):.4g} ({min(blocks):.4g} - {max(blocks):.4g})"
    cpu_blocks = found.get("cpu_seconds", {}).get(link, {}).get(name)
    return text if cpu_blocks is None else f"{text}; {median(cpu_blocks):.4g}"


def _describe_conditions(conditions: Mapping[str, Mapping[str, object]]) -> str:
    lines = [
        f"At {LINK_TITLES[link]}: " + ", ".join(f"{name} {value}" for name, value in each.items())
        for link, each in conditions.items()
    ]
    return ". ".join([*lines, ""]).strip()
