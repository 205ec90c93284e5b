"""Write the page of the wire's goals: what was aimed at, what was reached, and what is left to try.

    python benchmarks/wire_goals.py

It measures nothing. Each figure comes from the record of another benchmark, which the page links;
``RECORDS`` names the commands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from wire_mpi_page import MPI, list_mpi

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = RESULTS / "wire_goals.md"
RECORDS = {
    "device": "python benchmarks/end_to_end --parts device",
    "end_to_end": "python benchmarks/end_to_end --parts training pair exchange scaling",
    "bucket_cost": "distlion netlab run --hosts 2 -- python benchmarks/bucket_cost.py "
    "--wire gloo tcp --json benchmarks/results/bucket_cost.json",
    "wire_rounds": "distlion netlab run --hosts 2 --latency 50ms -- python "
    "benchmarks/wire_rounds.py --json benchmarks/results/wire_rounds.json",
    "wire_before": "python benchmarks/wire_before --before PYTHON",
    "wire_rounds_kept_rate": "distlion netlab run --hosts 2 --latency 50ms -- sh -c 'sysctl -q -w "
    "net.ipv4.tcp_slow_start_after_idle=0; python benchmarks/wire_rounds.py --json "
    "benchmarks/results/wire_rounds_kept_rate.json'",
    "host_time": "python benchmarks/host_time.py, then with --pretend",
    "local_vote_latest": "torchrun --nproc-per-node 2 benchmarks/local_vote.py "
    "--json benchmarks/results/local_vote_latest.json",
    "gpu/ops": "python benchmarks/gpu ops",
    "gpu/steps": "python benchmarks/gpu steps",
    "gpu/hosts_first_look": "a script of its own",
}
RECORDS |= MPI
LATENCY_MS = 50.0
OVERLAP, NONE = "majority-auto-overlap", "none"
SHARES = {
    "8.39 million parameters, 4 hosts": {"100mbit": 0.92, "1gbit": 0.95, "10gbit": 0.95},
    "25.2 million parameters, 4 hosts": {"1gbit": 0.92, "10gbit": 0.92},
}
PROCESSOR = "'s processor"
CROWDED = "See [below](#processor-time-of-votes)."
CROWDED_IN_FULL = (
    "On 4 hosts four workers encode and commit on two cores, near the memory's rate: 8 to 12 % of "
    "a step with 8.4 million parameters by the traces, and more with 25 million. Left to try: "
    "momenta in bfloat16, and encoding a parameter as its gradient arrives, while it is in the "
    "cache. An accelerator does both itself."
)
NOT_BUILT = """\
- **A large last gradient in pieces.** GPT-2's tied embedding has 31 % of its parameters, and its
  gradient comes last. It travels as one bucket, where pieces could travel while others are counted.
  Tried with separate parameters in its place, that gained nothing beside an emulated accelerator
  ([figures](../../studies/lab-notebook.md#2026-11-30-a-large-last-gradient-in-pieces)): votes and
  replies leave a host by one link, so pieces only move counting beside it.
- **`overlap=True` as the default.** Beside an accelerator it cost nothing in 13 cells
  ([device](device.md)). On cores that compute it costs up to 12 % ([end to end](end_to_end.md)), so
  `"auto"` keeps its trial.
- **Votes a step late.** They lose 0.048 nats, and 0.01 was allowed ([delay](delay.md)).
- **Others' transports.** MPI is [measured below](#beside-mpi). torchcomms and PCCL were
  placeholders without code in PyPI
  ([more](../../studies/lab-notebook.md#2026-11-29-votes-over-sockets-of-our-own)).
- **Kernels of LocalSteps for GPUs.** The C++ core encodes scaled and stochastic votes and residuals
  in one pass; on a GPU plain torch does it, in several. What that costs there is
  [in the queue](../gpu/QUEUE.md), and decides.
"""


@dataclass(frozen=True)
class Goal:
    """A line of the page.

    Attributes:
        what: What was measured, with its unit.
        bound: The aim.
        measured: The figure; None if there is none yet.
        at_least: Whether the aim is a lower bound.
        record: The record's name.
        left: What is left to try, or why it is out of reach.
    """

    what: str
    bound: float
    measured: float | None
    at_least: bool
    record: str
    left: str = ""

    @property
    def is_met(self) -> bool | None:
        """None if it was not measured."""
        if self.measured is None:
            return None
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def write(self) -> str:
        sign = ">=" if self.at_least else "<="
        measured = "not measured" if self.measured is None else f"{self.measured:.3g}"
        verdict = {True: "yes", False: "**no**", None: "open"}[self.is_met]
        left = "" if self.is_met else self.left
        source = f"[record]({self.record}.json)"
        return (
            f"| {self.what} | {sign} {self.bound:g} | {measured} | {verdict} | {source} | {left} |"
        )


def list_bucket_goals(record: dict[str, Any]) -> Iterator[Goal]:
    """List the costs of a further bucket, over the default transport."""
    wall_ms, cpu_ms = record["bucket_ms"]["tcp"]
    yield Goal("a further bucket, ms of a step", 0.7, wall_ms, False, "bucket_cost")
    yield Goal(
        "a further bucket, ms of processor of a worker",
        0.5,
        cpu_ms,
        False,
        "bucket_cost",
        "Half of it is the kernel's, for packets and wake-ups. Left to try: one system call for "
        "the messages to all peers (io_uring).",
    )


def list_latency_goals(record: dict[str, Any]) -> Iterator[Goal]:
    """List what a round of votes takes, in units of the latency of one way."""
    is_kept = record["conditions"].get("tcp_slow_start_after_idle") == "0"
    where = " without TCP's slow start" if is_kept else ""
    left = (
        "The bytes themselves are left: without latency the two rounds of 1 MB took 6 ms, of 4 MB "
        "27 ms ([table](../../studies/lab-notebook.md"
        "#2026-11-29-votes-over-sockets-of-our-own))."
        if is_kept
        else "TCP begins slowly after each pause. A setting of the system ends it, in the rows "
        "below ([how](../../docs/how-to/slow-link.md#links-with-high-latency))."
    )
    for size, wires in record["wall_and_processor_ms"].items():
        wall_ms, _ = wires["tcp"]
        yield Goal(
            f"a round of {int(size):,} bytes at 50 ms one way{where}, in units of one way",
            1.1,
            wall_ms / 2 / LATENCY_MS,
            False,
            "wire_rounds_kept_rate" if is_kept else "wire_rounds",
            left,
        )


def list_share_goals(record: dict[str, Any]) -> Iterator[Goal]:
    """List votes with overlap beside no communication."""
    for size, bounds in SHARES.items():
        for rate, bound in bounds.items():
            ratio = record["device"][size]["results"][rate][OVERLAP]["speed_up"][NONE]["median"]
            what = f"overlap, {size}, {rate}: share of the speed without communication"
            yield Goal(what, bound, ratio, True, "device", CROWDED)


def list_host_goals(record: dict[str, Any]) -> Iterator[Goal]:
    """List what Python a step needs, for as many tensors as GPT-2 has."""
    seconds = record["processor_s"]["found"]
    for name in ("Lion", "DistributedLion, one worker"):
        what = f"{name}, 148 small tensors on a CPU: times fused AdamW"
        yield Goal(what, 1.0, seconds[name] / seconds["AdamW, fused"], False, "host_time")


def list_host_goals_on_gpu(record: dict[str, Any], today: dict[str, Any]) -> Iterator[Goal]:
    """List the same on a GPU, as last timed, and what today's steps do without one."""
    seconds, pretended = today["processor_s"]["found"], today["pretended"]["found"]
    for row in record["rows"]:
        name = row["optimizer"].removeprefix("distlion.").replace(", alone", ", one worker")
        if name not in pretended:
            continue
        found = pretended[name]
        yield Goal(
            f"{name}, GPT-2's 148 tensors on a GPU: ms of the host",
            1.0,
            1e3 * row["host_s"],
            False,
            "gpu/steps",
            f"Timed before a step's Python was cut: `python benchmarks/gpu steps` on a GPU. Today "
            f"a step on small tensors takes {1e3 * seconds[name]:.2f} ms on a CPU, with "
            f"{found['calls_on_cpu']} calls of our functions; on the pretended GPU of the tests "
            f"there are {found['calls']} calls, {found['launches']} launches and "
            f"{found['waits']} waits.",
        )


def list_local_goals(record: dict[str, Any]) -> Iterator[Goal]:
    """List the rules of LocalSteps whose votes cost most."""
    cells = {
        f"{rule}, {size} parameters": clocks["cpu"]
        for size, rules in record["votes"].items()
        for rule, clocks in rules.items()
        if "plain step" not in rule
    }
    for key, bound, what, left in (
        (
            "ratio",
            1.5,
            "a vote of LocalSteps, times a majority vote's processor time; the most expensive",
            "Votes wait for memory: the simplest rule's moves 50 bytes a parameter, a majority "
            "vote 28 ([count](../../studies/lab-notebook.md"
            "#2026-11-28-a-vote-of-local-steps-at-less-cost)). Left to try: residuals in bfloat16, "
            "and deltas that are computed anew instead of stored.",
        ),
        (
            "first_vote",
            1.2,
            "its first vote, times a later one; the most expensive",
            "The first vote makes what later ones keep, such as the estimates of those who count "
            "votes by `EstimateVote`. Left to try: make it at construction.",
        ),
    ):
        rule = max(cells, key=lambda rule: cells[rule][key])
        yield Goal(f"{what}: {rule}", bound, cells[rule][key], False, "local_vote_latest", left)


def list_local_votes(record: dict[str, Any]) -> Iterator[str]:
    """Write a line for each rule."""
    sizes = list(record["votes"])
    for rule in record["votes"][sizes[0]]:
        cells = [record["votes"][size][rule]["cpu"] for size in sizes]
        figures = [cell[key] for key in ("ratio", "first_vote") for cell in cells]
        yield f"| {rule} | {' | '.join(f'{figure:.2f}' for figure in figures)} |"


def list_gpu_goals(record: dict[str, Any]) -> Iterator[Goal]:
    """List what needs a GPU: ops as last timed, and hosts."""
    aims = {"float32": 0.85, "bfloat16": 0.65}
    for row in record["rows"]:
        if row["op"] == "encode 1 bit" and row["addresses"] == "multiples of 16":
            yield Goal(
                f"encode one bit on a GPU, {row['param']}: share of a copy's rate",
                aims[row["param"]],
                row["share"],
                True,
                "gpu/ops",
                "Measured before registers were limited to 128, which gave 81 and 55 % in a first "
                "look: `python benchmarks/gpu ops` on a GPU.",
            )


def list_host_shares(record: dict[str, Any]) -> Iterator[Goal]:
    """List whole steps on hosts with a GPU, which were not measured by today's program."""
    for rate, bound in {"10gbit": 0.97, "1gbit": 0.90}.items():
        seconds = record["seconds"][rate]
        first_look = seconds["none"] / seconds["majority-overlap"]
        yield Goal(
            f"GPT-2 on 4 hosts with a GPU, overlap, {rate}: share of the speed without "
            "communication",
            bound,
            None,
            True,
            "gpu/hosts_first_look",
            "`python benchmarks/gpu hosts` on a GPU, the first entry of "
            f"[the queue](../gpu/QUEUE.md). A first look at an earlier commit: {first_look:.2f}.",
        )


def list_overlap_goals(record: dict[str, Any]) -> Iterator[Goal]:
    """List what overlap costs where it costs most, on cores that compute."""
    costs = {
        f"{name}, {rate}": methods[f"{name}-overlap"]["seconds"]["median"]
        / methods[name]["seconds"]["median"]
        for rate, methods in record["training"]["results"].items()
        for name in ("majority-auto", "majority-all-reduce", "majority-all-gather")
    }
    where = max(costs, key=lambda name: costs[name])
    yield Goal(
        f"overlap on cores that compute, times the step without; the highest: {where}",
        1.01,
        costs[where],
        False,
        "end_to_end",
        'Fewer buckets where the cores have no free time. `overlap="auto"` finds it by a trial.',
    )


def list_processor_seconds(record: dict[str, Any]) -> Iterator[str]:
    """Write what votes take from a worker's processor, beyond a step without communication."""
    for size, sweep in record["device"].items():
        hosts, n_params = sweep["settings"]["hosts"], sweep["n_parameters"]
        for rate, methods in sweep["results"].items():
            cells = [
                (methods[name]["cpu_s"] - methods[NONE]["cpu_s"]) / hosts / n_params * 1e8
                for name in ("majority-auto", OVERLAP)
            ]
            yield f"| {size} | {rate} | {cells[0]:.2f} | {cells[1]:.2f} |"


def compare_processor_time(record: dict[str, Any]) -> str:
    """Write how processor time and shares have changed, by the run in which commits took turns."""

    def find(ending: str) -> str:
        ratios = []
        for name, found in record["figures"].items():
            if name.startswith("accelerator") and name.endswith(ending):
                pairs = zip(found["before"], found["now"], strict=True)
                ratios.append(median(now / before for before, now in pairs))
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    return (
        "Processor time was to be halved, and was not. Of that of an earlier commit, in turns "
        f"([figures](wire_before.md)), votes take {find('votes, ms of a worker' + PROCESSOR)}, "
        f"with overlap {find('overlap, ms of a worker' + PROCESSOR)}. Shares of full speed are "
        f"{find('votes, share of full speed')} and {find('overlap, share of full speed')} times "
        "the earlier ones."
    )


def list_before(record: dict[str, Any]) -> list[str]:
    """Write where both commits are compared."""
    return [
        "## Beside an earlier commit",
        "",
        f"[A run in which both took turns](wire_before.md) has commit {record['before']} beside "
        "today's: host time, votes of LocalSteps, a further bucket, and whole steps with their "
        "processor time.",
        "",
    ]


LISTS = {
    "bucket_cost": list_bucket_goals,
    "wire_rounds": list_latency_goals,
    "wire_rounds_kept_rate": list_latency_goals,
    "device": list_share_goals,
    "end_to_end": list_overlap_goals,
    "host_time": list_host_goals,
    "local_vote_latest": list_local_goals,
    "gpu/ops": list_gpu_goals,
    "gpu/hosts_first_look": list_host_shares,
}


def write_page(records: dict[str, dict[str, Any]]) -> str:
    """Write the page out of the records."""
    goals = [goal for name, list_goals in LISTS.items() for goal in list_goals(records[name])]
    goals += list_host_goals_on_gpu(records["gpu/steps"], records["host_time"])
    n_met = sum(goal.is_met is True for goal in goals)
    lines = [
        "# Goals of the wire",
        "",
        "Made by `python benchmarks/wire_goals.py` from the records that it links.",
        "",
        f"{n_met} of {len(goals)} goals are met. A goal that is missed says what is left to try.",
        "",
        "| what | aim | measured | met | from | what is left to try |",
        "| --- | ---: | ---: | --- | --- | --- |",
        *(goal.write() for goal in goals),
        "",
        *list_before(records["wire_before"]),
        "## Processor time of votes",
        "",
        "Seconds of a worker's processor in a step, for 100 million parameters, beyond a step "
        "without communication: encoding, commit and all that the network needs, its share of the "
        "kernel's time apart.",
        "",
        CROWDED_IN_FULL,
        "",
        compare_processor_time(records["wire_before"]),
        "",
        "| size | link | without overlap | with overlap |",
        "| --- | --- | ---: | ---: |",
        *list_processor_seconds(records["device"]),
        "",
        "## Not built",
        "",
        NOT_BUILT,
        *list_mpi(records),
        "## Votes of LocalSteps",
        "",
        "Processor time of the calling thread, as multiples: of a majority vote's encode, exchange "
        "and commit for the same parameters, and of a later vote's.",
        "",
        "| rule | a vote, 1 M parameters | 8.4 M | the first vote, 1 M | 8.4 M |",
        "| --- | ---: | ---: | ---: | ---: |",
        *list_local_votes(records["local_vote_latest"]),
        "",
        "## Conditions",
        "",
        "| record | command | date | commit | cores | load before |",
        "| --- | --- | --- | --- | ---: | ---: |",
    ]
    for name, command in RECORDS.items():
        record = records[name]
        parts = [record] if "conditions" in record else record.values()
        for given in (part["conditions"] for part in parts):
            load = given.get("load_average_before", "not recorded")
            commit = given["commit"] if "-" in given["commit"] else given["commit"][:8]
            cells = name, f"`{command}`", given["date"], commit, given["cores"], load
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the records, and write the page."""
    records = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in RECORDS}
    PAGE.write_text(write_page(records))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
