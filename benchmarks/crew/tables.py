"""Markdown of the results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

Cells = list[list[str]]

SOAK_NOTES = """\
An *epoch* is a membership: an epoch of the crew, a quorum of torchft, a start of all workers of
torchelastic. From a kill: seconds to the first step committed without the victim. Of a stop: the
longest pause of the others until the worker woke; a stop shorter than the silence allowed is waited
out. Of a join: their longest pause while the newcomer's interpreter starts beside them and it comes
in; the change itself is from their last step without it to their first one with it. Woken: from
SIGCONT to its next step. A newcomer's interpreter imports torch, which its start has and its
imports have not; under torchelastic all processes start anew in each epoch. Some events come before
all train together again after the one before; they count like all others. Seconds lost: all pauses
of more than five usual steps. Steps repeated: committed, and committed again in a later epoch.
Forks: steps of an epoch in which two workers had different parameters. Accidents: workers that
ended though nobody killed them; they are started again."""


def write_soak(result: dict[str, Any]) -> str:
    """Return the page of a soak."""
    systems = list(dict.fromkeys(run["system"] for run in result["runs"]))
    runs = {name: [run for run in result["runs"] if run["system"] == name] for name in systems}
    tuned = [f"- {name}: {runs[name][0]['tuning']}" for name in systems]
    left_out = [f"- left out: {name} ({why})" for name, why in result["left_out"].items()]
    seconds = [[row, *(tell(runs[name]) for name in systems)] for row, tell in EVENT_ROWS.items()]
    whole = [[row, *(tell(runs[name]) for name in systems)] for row, tell in RUN_ROWS.items()]
    title = "# A soak of a crew" if len(systems) == 1 else "# A crew beside other systems"
    lines = [title, "", "Made by `python benchmarks/crew` from its JSON.", ""]
    lines += [*_list_conditions(result), *tuned, *left_out, "", SOAK_NOTES, ""]
    lines += ["Seconds: median, worst and number.", "", *_draw(["", *systems], seconds), ""]
    lines += [*_draw(["", *systems], whole), ""]
    lines += [
        "## What long-lived processes hold",
        "",
        "First, last and most.",
        "",
        *_draw(GROWTH_HEAD, _list_growth(runs)),
        "",
    ]
    return "\n".join(lines)


def _pick(kind: str, name: str, *, alone: bool | None = None) -> Any:
    def tell(runs: list[dict[str, Any]]) -> str:
        events = [event for run in runs for event in run["events"] if event["kind"] == kind]
        events = [event for event in events if alone in (None, event["is_alone"])]
        values = [event[name] for event in events if event.get(name) is not None]
        missing = len(events) - len(values) if any(name in event for event in events) else 0
        text = _summarize(values)
        return f"{text}, {missing} never" if missing else text

    return tell


def _summarize(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.2f}, {max(values):.2f} ({len(values)})"


def _sum(name: str) -> Any:
    return lambda runs: f"{sum(_count(run[name]) for run in runs):g}"


def _count(value: Any) -> float:
    return len(value) if isinstance(value, list) else value


EVENT_ROWS = {
    "kill: to the next step": _pick("kill", "next_step_s"),
    "... where nothing else happens": _pick("kill", "next_step_s", alone=True),
    "... with another event close by": _pick("kill", "next_step_s", alone=False),
    "stop: pause of the others": _pick("stop", "pause_s"),
    "woken: to its next step": _pick("stop", "back_s"),
    "woken: pause of the others": _pick("stop", "return_pause_s"),
    "join: pause of the others": _pick("join", "pause_s"),
    "join: the change of members itself": _pick("join", "change_s"),
    "join: from its start to its first step": _pick("join", "in_s"),
    "join: from its imports to its first step": _pick("join", "joined_s"),
}
RUN_ROWS = {
    "events": _sum("events"),
    "seconds": _sum("seconds"),
    "steps": _sum("last_step"),
    "steps a second": lambda runs: (
        f"{sum(run['last_step'] for run in runs) / sum(run['seconds'] for run in runs):.1f}"
    ),
    "usual step, ms": lambda runs: (
        f"{1e3 * statistics.median(run['usual_step_s'] for run in runs):.0f}"
    ),
    "seconds lost": _sum("seconds_lost"),
    "steps repeated": _sum("steps_repeated"),
    "epochs": _sum("epochs"),
    "steps compared": _sum("steps_compared"),
    "forks": _sum("forks"),
    "accidents": _sum("accidents"),
}
HELD, WHEN = ("fds", "threads"), ("first", "last", "most")
GROWTH_HEAD = ["system", "worker", "seconds", "epochs", "MiB", "file descriptors", "threads"]


def _list_growth(runs: dict[str, list[dict[str, Any]]]) -> Cells:
    rows = []
    for name, group in runs.items():
        grown = [row for run in group for row in run["growth"]]
        for row in sorted(grown, key=lambda row: -row["lived_s"])[:3]:
            mib = " / ".join(f"{row[when]['rss_kib'] / 1024:.0f}" for when in WHEN)
            others = (" / ".join(str(row[when][key]) for when in WHEN) for key in HELD)
            cells = [name, str(row["worker"]), f"{row['lived_s']:.0f}", str(row["epochs"])]
            rows.append([*cells, mib, *others])
    return rows


TIMELINE_NOTES = """\
Pause: the longest time without a committed step, until the next event; of a stop, until the worker
woke. Members: workers that commit a step. `python benchmarks/pictures.py` draws it."""


def write_timeline(result: dict[str, Any]) -> str:
    """Return the page of one run, event by event."""
    rows = []
    ends_s = [event["time_s"] for event in result["events"][1:]] + [result["step_s"][-1]]
    for event, end_s in zip(result["events"], ends_s, strict=True):
        counts = [n_members for moment_s, n_members in result["members"] if moment_s < end_s]
        cells = [event["kind"], str(event["worker"]), f"{event['time_s']:.1f}"]
        rows.append([*cells, f"{event['pause_s']:.2f}", str(counts[-1])])
    summary = result["summary"]
    lines = ["# A crew over time", "", "Made by `python benchmarks/crew` from its JSON.", ""]
    lines += [*_list_conditions(result), f"- crew: {result['tuning']}", "", TIMELINE_NOTES, ""]
    lines += _draw(["event", "worker", "at, s", "pause, s", "members afterwards"], rows)
    lines += ["", f"{summary['last_step']} steps in {summary['seconds']:g} s,"]
    lines += [f"{summary['steps_repeated']} steps repeated, {len(summary['forks'])} forks."]
    return "\n".join([*lines, ""])


def write_cost(result: dict[str, Any]) -> str:
    """Return the page of what a crew costs without faults."""
    head = ["workers", "parameters", "rate", "without, ms", "ratio", "control"]
    head += ["optimizer alone", "processor time", "control", "with its threads' share"]
    rows = []
    for row in result["rows"]:
        crowding = max(1.0, row["workers"] / result["conditions"]["cores"])
        share = 1 + crowding * row["rest"]
        cells = [str(row["workers"]), f"{row['parameters']:,}", row["rate"]]
        cells += [f"{1e3 * row['whole_s']['without']:.2f}"]
        cells += [_tell_ratio(row["whole_s"][name]) for name in ("ratio_with", "ratio_control")]
        cells += [_tell_ratio(row["alone_s"]["ratio_with"])]
        cells += [_tell_ratio(row["cpu_s"][name]) for name in ("ratio_with", "ratio_control")]
        rows.append([*cells, f"{share * row['whole_s']['ratio_with']['median']:.3f}"])
    rest = statistics.median(row["rest"] for row in result["rows"])
    lines = ["# A step with a crew", "", "Made by `python benchmarks/crew` from its JSON.", ""]
    lines += [*_list_conditions(result), "", COST_NOTES, *_draw(head, rows), ""]
    lines += [f"A process of a crew that waits takes {rest:.2%} of a core."]
    return "\n".join([*lines, ""])


PLACE_HEAD = ["parameters", "workers", "link", "system"]
SIZE_HEAD = [*PLACE_HEAD, "usual step", "step while a newcomer catches up"]
SIZE_HEAD += ["join: others", "join: change itself", "join: newcomer"]
SIZE_HEAD += ["kill: others", "stop: others", "woken: others", "peak GiB", "forks", "accidents"]
SIZE_HEAD += ["commit, date, load of the machine"]
SIZE_NOTES = """\
Events come one at a time, each once all train together: three joins, two kills, one stop that is
longer than a step may be silent. Seconds: median, worst and number. *Others* are their longest
pause beyond a usual step; *change itself* is from their last step without a newcomer to their first
one with it, also beyond a usual step. *Newcomer*: from the moment when it has imported everything
and built its network to its first step. It catches up meanwhile; steps of then are no usual ones,
but for rows without a number for them. Workers: at the start, and one more after each join. Peak:
the most memory of any process.
"""


def write_sizes(result: dict[str, Any]) -> str:
    """Return the page of large networks."""
    return _write_runs("Crews of larger networks", result, SIZE_NOTES, SIZE_HEAD, _tell_sizes)


def _write_runs(
    title: str,
    result: dict[str, Any],
    notes: str,
    head: list[str],
    tell: Callable[[list[dict[str, Any]]], list[str]],
) -> str:
    """Return a page with a row for each size, number of workers, link and system."""
    tuned = dict.fromkeys(
        f"{run['system']}, {run['size']}: {run['tuning']}" for run in result["runs"]
    )
    left_out = [f"left out: {name} ({why})" for name, why in result["left_out"].items()]
    lines = [
        f"# {title}",
        "",
        "Made by `python benchmarks/crew` from its JSON.",
        "",
    ]
    lines += [*_list_conditions(result), *(f"- {each}" for each in (*tuned, *left_out))]
    lines += ["", notes]
    groups: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for run in result["runs"]:
        place = f"{run['n_parameters']:,}", str(run["workers"]), run["rate"], run["system"]
        groups.setdefault(place, []).append(run)
    rows = [[*place, *tell(runs), runs[-1]["measured"]] for place, runs in groups.items()]
    return "\n".join([*lines, *_draw(head, rows), ""])


LOSS_HEAD = [*PLACE_HEAD, "usual step", "to the next step", "to a new step"]
LOSS_HEAD += ["steps lost", "peak GiB", "forks", "accidents", "commit, date, load of the machine"]
LOSS_NOTES = """\
The workers train and make a checkpoint every 20 steps, in one folder for all. All of them are
killed by SIGKILL at one moment, and started again at once; twice in a run. The program that keeps
the word between workers lives on. Seconds: median, worst and number, from the kill to the next
committed step, and to the first one that had not been committed before. The interpreters' start and
the network's first pass are in both. Steps lost: committed, and taken back. Peak: the most memory
of any process.
"""


def write_losses(result: dict[str, Any]) -> str:
    """Return the page of losses of all workers."""
    return _write_runs("Loss of all workers", result, LOSS_NOTES, LOSS_HEAD, _tell_losses)


def _tell_losses(runs: list[dict[str, Any]]) -> list[str]:
    usual_s = statistics.median(run["usual_step_s"] for run in runs)
    cells = [_pick("loss", name)(runs) for name in ("again_s", "regained_s")]
    lost = [event["steps_lost"] for run in runs for event in run["events"]]
    peak = max(run["peak_kib"] for run in runs) / 2**20
    cells += [", ".join("-" if n is None else str(n) for n in lost), f"{peak:.1f}"]
    return [f"{usual_s:.2f}", *cells, _sum("forks")(runs), _sum("accidents")(runs)]


def _tell_sizes(runs: list[dict[str, Any]]) -> list[str]:
    usual_s = statistics.median(run["usual_step_s"] for run in runs)
    events = []
    for run in runs:
        for event in run["events"]:
            ended = {name for name in PAUSES & {*event} if event[name] is not None}
            beyond = {name: max(0.0, event[name] - run["usual_step_s"]) for name in ended}
            events.append(event | beyond)
    asked = (
        *(("join", "pause_s"), ("join", "change_s"), ("join", "joined_s"), ("kill", "pause_s")),
        *(("stop", "pause_s"), ("stop", "return_pause_s")),
    )
    cells = [_pick(kind, name)([{"events": events}]) for kind, name in asked]
    peak = max(run["peak_kib"] for run in runs) / 2**20
    meanwhile = [run["step_meanwhile_s"] for run in runs if run.get("step_meanwhile_s")]
    steps = [f"{usual_s:.2f}", f"{statistics.median(meanwhile):.2f}" if meanwhile else "-"]
    return [*steps, *cells, f"{peak:.1f}", _sum("forks")(runs), _sum("accidents")(runs)]


PAUSES = {"pause_s", "change_s", "return_pause_s"}
COST_NOTES = """\
With: workers of a crew. Without: workers in a process group of `torch.distributed`, with a
`DistributedLion` of the same parameters. The control is without a crew too: its ratio shows what
the measurement cannot tell apart. The three take turns of less than a second on the same hosts. Of
each turn the lower quartile of its steps counts, for what else the machine does makes steps longer.
All processes start anew several times. Milliseconds are medians. Ratios are those of neighboring
turns: median, and 95 % interval by bootstrap over starts and turns; of a training step, of the
optimizer's `step()`, and of the processor time of all workers.

The threads of a crew run while the others take their turns too, and slow all three. The last column
adds what they take of a worker's core. The target is at most 1.02 there.
"""


def _tell_ratio(found: dict[str, float]) -> str:
    return f"{found['median']:.3f} ({found['lower']:.3f} - {found['upper']:.3f})"


def _list_conditions(result: dict[str, Any]) -> list[str]:
    return [f"- {name.replace('_', ' ')}: {v}" for name, v in result["conditions"].items()]


def _draw(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    rule = ["---:" if number else "---" for number in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in [head, rule, *rows]]
