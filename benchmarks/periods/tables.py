"""What the records say: equal steps, equal bytes, seconds to a target, and who is first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, quantiles

import target_path  # noqa: F401
from archive import Records
from cells import SEEDS, Find
from design import (
    DDP,
    EXCHANGE,
    LINKS,
    MAJORITY,
    OUTERS,
    PERIOD,
    PERIODS,
    TOGETHER,
    WAYS,
    best_loss,
    choose_outer,
    make_cell,
    read_local,
    tune_outers,
)
from evidence import Verdict, compare
from outcome import (
    Table,
    average_curve,
    compose_page,
    describe_ends,
    describe_rate,
    describe_seconds,
    list_missing,
)
from picture import draw_curves
from plan import SHORT
from results import (
    LOAD,
    Blocks,
    Method,
    find_loss,
    find_step_s,
    has_won,
    read_blocks,
    read_methods,
    read_timing,
)
from settings import FLOOR, Target, derive_targets

SHOWN_LINKS = ("10mbit", "100mbit")
LINK_TITLES = {link: f"{link.removesuffix('mbit')} Mbit/s" for link in LINKS}
_OWN_CORES = ", estimated for hosts with a core each, packets as measured"
_DECIDES, _TELLS = "votes", "votes (decides nothing)"
DECIDING_TARGET = "close"
FindBlocks = Callable[[str], Blocks]


def tabulate_outers(find: Find) -> Table:
    """Tabulate what tuning came to with each outer step."""
    lines = []
    for way, what in WAYS.items():
        chosen = choose_outer(way, find)
        for outer, choice in tune_outers(way, find).items():
            loss = best_loss(choice)
            known = "-" if choice.rate is None else f"{choice.rate:g}"
            edge = " (edge)" if choice.at_edge else ""
            lines.append(
                [
                    f"{what} every {PERIODS[0]} steps",
                    OUTERS[outer],
                    known + edge,
                    "missing" if loss is None else f"{loss:.4f}",
                    "yes" if outer == chosen else "",
                ]
            )
    head = ["method", "outer step", "rate", "validation loss, seed 0", "chosen"]
    return "The outer step, by validation", head, lines


def tabulate_endings(methods: Sequence[Method]) -> Table:
    """Tabulate losses after equal steps, and differences from methods that step together."""
    by_name = {method.name: method for method in methods}
    lines = []
    for method in methods:
        bits = method.bits
        line = [method.title, _name_outer(method.name), describe_rate(method.row)]
        line += ["-" if bits is None else f"{bits:.3g}", describe_ends(method.row)]
        for reference in (MAJORITY, SHORT, DDP):
            is_itself = method.name == reference
            line.append("" if is_itself else _describe_difference(method, by_name[reference]))
        lines.append(line)
    head = ["method", "outer step", "rate", "bits up and down a step", "test loss at the end"]
    head += ["minus majority", "minus majority, betas (0.9, 0.95)", "minus DDP"]
    return "Equal steps", head, lines


def _name_outer(method: str) -> str:
    if read_local(method) is None:
        return ""
    return OUTERS["-plain" if method.endswith("-plain") else ""]


def _describe_difference(method: Method, reference: Method) -> str:
    found = compare(method.ending, reference.ending)
    if found.verdict is Verdict.OPEN or not math.isfinite(found.mean):
        return found.verdict.value
    return f"{found.mean:+.3f} ({found.lower:+.3f} to {found.upper:+.3f}), {found.verdict.value}"


def tabulate_ways(methods: Sequence[Method]) -> Table:
    """Tabulate votes beside means that are exchanged as seldom."""
    by_local = {read_local(method.name): method for method in methods}
    lines = []
    for every in PERIODS:
        votes, means = (by_local.get((what, every)) for what in WAYS.values())
        known = votes is not None and means is not None
        lines.append([str(every), _describe_difference(votes, means) if known else "missing"])
    return "Votes minus means", ["H", "nats a byte (bounds)"], lines


def tabulate_bytes(methods: Sequence[Method]) -> Table:
    """Tabulate losses at the bytes that a whole run of each cheaper method takes."""
    sizes = {method.name: method.step_mb for method in methods}
    budgets = [
        (method.title, size * method.row.cell.setting.steps)
        for method in methods
        if method.name != DDP and (size := sizes[method.name]) is not None
    ]
    lines = []
    for method in methods:
        size, line = sizes[method.name], [method.title]
        for _, budget in budgets:
            curves = method.row.curves.values() if method.is_drawn else ()
            losses = [find_loss(curve, budget / size) for curve in curves] if size else []
            known = [loss for loss in losses if loss is not None]
            is_over = size is not None and budget > size * method.row.cell.setting.steps
            is_known = known and len(known) == len(losses)
            line.append(f"{fmean(known):.3f}{' (end)' * is_over}" if is_known else "-")
        lines.append(line)
    head = [f"{budget:.3g} MB: all of {title}" for title, budget in budgets]
    title = (
        "Equal bytes: test loss after so many megabytes up and down, or at the end of a shorter run"
    )
    return title, ["method", *head], lines


def tabulate_seconds(
    methods: Sequence[Method], targets: Sequence[Target], find_blocks: FindBlocks
) -> Table:
    """Tabulate seconds to each target on each link, and how many times as long DDP takes."""
    columns = [(target, link) for target in targets for link in SHOWN_LINKS]
    lines = []
    for method in methods:
        line = [method.title]
        for target, link in columns:
            seconds = method.seconds(target, find_blocks(link))
            reference = methods[0].seconds(target, find_blocks(link))
            line.append(_describe_reached(seconds, reference))
        lines.append(line)
    head = [f"{target.name}: {target.value:.2f}, {LINK_TITLES[link]}" for target, link in columns]
    return "Seconds to a target", ["method", *head], lines


def _describe_reached(
    seconds: Mapping[int, float] | None, reference: Mapping[int, float] | None
) -> str:
    if seconds is None:
        return "missing"
    reached = [each for each in seconds.values() if math.isfinite(each)]
    if len(reached) < len(SEEDS):
        return f"not reached ({len(reached)} of {len(SEEDS)} seeds)"
    known = reference is not None and all(map(math.isfinite, reference.values()))
    return describe_seconds(reached, [*reference.values()] if known else None)


def tabulate_winners(
    methods: Sequence[Method], target: Target, find_blocks: FindBlocks, *, condition: str = ""
) -> Table:
    """Tabulate whether votes every H steps are first on each link, by the protocol's rule.

    Args:
        methods: All of them.
        target: To be reached; the first one decides.
        find_blocks: Returns what was timed on a link.
        condition: Under which that is an estimate, for the title.
    """
    lines = []
    for link in LINKS:
        found = [(method, method.seconds(target, find_blocks(link))) for method in methods]
        votes = {m.title: each for m, each in found if each is not None and m.votes_seldom}
        others = {m.title: each for m, each in found if each is not None and not m.votes_seldom}
        if len(votes) + len(others) < len(TOGETHER) + len(WAYS) * len(PERIODS):
            lines.append([LINK_TITLES[link], "missing", "", "", ""])
            continue
        ratio = _find_least(others)[1] / _find_least(votes)[1]
        won = any(has_won(each, [*others.values()]) for each in votes.values())
        lines.append(
            [
                LINK_TITLES[link],
                _describe_first(votes),
                _describe_first(others),
                f"{ratio:.2f}x" if math.isfinite(ratio) else "-",
                "won" if won else "not won",
            ]
        )
    head = ["link", "first of votes every H steps", "first of the others"]
    title = f"Who reaches {target.name}, {target.value:.2f} nats, first{condition}"
    decides = target.name == DECIDING_TARGET and not condition
    return title, [*head, "others / votes", _DECIDES if decides else _TELLS], lines


def _find_least(group: Mapping[str, Mapping[int, float]]) -> tuple[str, float]:
    means = {title: fmean(each.values()) for title, each in group.items()}
    title = min(means, key=lambda each: means[each])
    return title, means[title]


def _describe_first(group: Mapping[str, Mapping[int, float]]) -> str:
    title, seconds = _find_least(group)
    return f"{title}, {seconds:.1f} s" if math.isfinite(seconds) else "none reaches it"


def tabulate_steps(methods: Sequence[Method], find_blocks: FindBlocks) -> Table:
    """Tabulate milliseconds of what was timed and of the steps that follow; check whole periods."""
    timed = {FLOOR: "local step, measured", DDP: "DDP step, measured"}
    timed[MAJORITY] = "step of votes, measured"
    timed |= {EXCHANGE.format(what): f"exchange of {what}, measured" for what in WAYS.values()}
    lines = [
        [title, *(_describe_ms(find_blocks(link).get(name)) for link in LINKS)]
        for name, title in timed.items()
    ]
    for method in methods:
        if read_local(method.name) is not None:
            steps = (find_step_s(method.name, find_blocks(link)) for link in LINKS)
            texts = ["missing" if step is None else f"{1e3 * step:.0f}" for step in steps]
            lines.append([f"step of {method.title}, computed", *texts])
    for way, what in WAYS.items():
        line = [f"period of {PERIODS[0]} steps and an exchange of {what}, measured against sum"]
        for link in LINKS:
            blocks = find_blocks(link)
            summed = find_step_s(f"{way}-{PERIODS[0]}", blocks)
            measured = blocks.get(PERIOD.format(what))
            known = summed is not None and measured is not None
            line.append(
                f"{median(measured) / (PERIODS[0] * summed) - 1:+.1%}" if known else "missing"
            )
        lines.append(line)
    head = ["median and quartiles of blocks", *(f"{LINK_TITLES[link]}, ms" for link in LINKS)]
    return "Steps and exchanges on 8 hosts", head, lines


def _describe_ms(blocks: Sequence[float] | None) -> str:
    if blocks is None:
        return "missing"
    if len(blocks) < 2:
        return f"{1e3 * blocks[0]:.0f}, 1 block"
    low, middle, high = (1e3 * value for value in quantiles(blocks, n=4, method="inclusive"))
    return f"{middle:.0f} ({low:.0f} - {high:.0f}), {len(blocks)} blocks"


def tabulate_conditions(folder: Path) -> Table:
    """Tabulate on what steps were timed."""
    lines = []
    for link in LINKS:
        found = read_timing(folder, link)
        if found is not None:
            conditions = found["conditions"]
            keys = ("date", "cpu", "cores", "kernel", "tcp_congestion_control", "torch", LOAD)
            line = [LINK_TITLES[link], found["commit"][:8] + " (dirty)" * found["dirty"]]
            lines.append([*line, *(str(conditions[key]) for key in keys)])
    head = ["link", "commit", "date", "CPU", "cores", "kernel", "congestion control", "torch"]
    head.append("load average before")
    return "Conditions of what was timed", head, lines


# The report


def _describe_runs(records: Records) -> str:
    found = [each for each in records.read_all() if "config" in each]
    if not found:
        return "No runs yet."
    hours = sum(each["cpu_s"] for each in found) / 3600
    places = sorted({f"{each['cpu']}, torch {each['versions']['torch']}" for each in found})
    dirty = sum(each["dirty"] for each in found)
    return (
        f"{len(found)} runs, {hours:.1f} core-hours, on {'; '.join(places)}; {dirty} of them from "
        "sources that were not committed."
    )


def list_undone(find: Find, methods: Sequence[Method], folder: Path) -> list[str]:
    """Name what has not been tuned, run or timed yet."""
    undone = [
        f"the outer step of {what} is not chosen"
        for way, what in WAYS.items()
        if choose_outer(way, find) is None
    ]
    undone += list_missing([method.row for method in methods])
    return undone + [
        f"steps at {LINK_TITLES[link]} are not timed"
        for link in LINKS
        if not read_blocks(folder, link)
    ]


def write_report(records: Records, results: Path) -> str:
    """Write tables and figure from the records; return the tables."""
    blocks = {link: read_blocks(records.folder, link) for link in LINKS}
    own_cores = {link: read_blocks(records.folder, link, own_cores=True) for link in LINKS}
    methods = read_methods(records)
    targets = derive_targets(make_cell(DDP), records.read)
    tables = [
        tabulate_outers(records.read),
        tabulate_endings(methods),
        tabulate_ways(methods),
        tabulate_bytes(methods),
        tabulate_seconds(methods, targets, blocks.__getitem__),
        *(tabulate_winners(methods, target, blocks.__getitem__) for target in targets),
        *(
            tabulate_winners(methods, target, own_cores.__getitem__, condition=_OWN_CORES)
            for target in targets
        ),
        tabulate_steps(methods, blocks.__getitem__),
        tabulate_conditions(records.folder),
    ]
    lines = [
        "# Votes every H steps",
        "",
        "Made by `python benchmarks/periods` from the records in `periods/`; the protocol is in",
        "[protocol.md](../../studies/protocol.md#votes-every-h-steps). Lower is better.",
        "Differences are in nats a byte, with the one-sided 95 % bounds of the study. Seconds are",
        "computed from measured steps and trained curves: mean and range of three seeds, and how",
        "many times as long DDP fp32 takes. Eight hosts share two cores, so that local steps take",
        "longer than on eight machines.",
        _describe_runs(records),
    ]
    text = compose_page(lines, tables, list_undone(records.read, methods, records.folder))
    (results / "periods.md").write_text(text)
    shown = {link: _collect_seconds(methods, blocks[link]) for link in SHOWN_LINKS}
    draw_curves(
        {LINK_TITLES[link]: each for link, each in shown.items()},
        _collect_megabytes(methods),
        targets,
        results / "periods.png",
    )
    return text


def _collect_seconds(methods: Sequence[Method], blocks: Blocks) -> dict[str, list[list[float]]]:
    steps = [(method, find_step_s(method.name, blocks)) for method in methods]
    return {m.title: average_curve(m.row, step_s) for m, step_s in steps if step_s and m.is_drawn}


def _collect_megabytes(methods: Sequence[Method]) -> dict[str, list[list[float]]]:
    return {m.title: average_curve(m.row, m.step_mb) for m in methods if m.step_mb and m.is_drawn}
