"""Compare the wire with that of an earlier commit, both taking turns in one run.

    python benchmarks/wire_before --before PYTHON [--turns 3] [--parts host local buckets cells]

PYTHON is that of an environment with distlion, distlion-lab and distlion-netlab of an earlier
commit, built in a checkout of it. Hosts are network namespaces of this machine, so this needs Linux
and root rights. Processes are new in each turn. Writes benchmarks/results/wire_before.json and .md;
--again writes the page of the record that is there. It takes about 25 minutes.

Figures: processor time of a step's Python beside fused AdamW's; processor time of a vote of
LocalSteps; what a further bucket adds to a step between two hosts; and training steps with votes
beside those without communication, on emulated accelerators and on the cores. There, processor time
is what a vote adds to a step: encoding, the network of this worker, commit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "bucket_trace")]

from run_conditions import read_conditions  # noqa: E402
from tracing import Variant  # noqa: E402
from turns import PARTS, take_turns  # noqa: E402

RESULTS = BENCHMARKS / "results" / "wire_before.json"


def say(line: str) -> None:
    """Report progress."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def write_page(record: dict[str, Any]) -> str:
    """Write medians of both commits, and the ratio of neighboring turns with its extremes."""
    lines = [
        "# The wire beside that of an earlier commit",
        "",
        f"Written by `{record['command']}`. Before: commit {record['before']}; now: commit "
        f"{record['conditions']['commit']}. Both took {record['turns']} turns in one run, on "
        f"{record['conditions']['date']}, with {record['conditions']['cores']} cores. Hosts share "
        "them where there are more hosts; TCP cubic. Medians of the turns; of the ratios of "
        "neighboring turns the median, the lowest and the highest. Of times less is better, of "
        "shares of full speed more.",
        "",
        "| what | before | now | now / before |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, found in record["figures"].items():
        before, now = (statistics.median(found[commit]) for commit in ("before", "now"))
        ratios = [b / a for a, b in zip(found["before"], found["now"], strict=True)]
        ratio, low, high = statistics.median(ratios), min(ratios), max(ratios)
        lines.append(
            f"| {name} | {before:.3g} | {now:.3g} | {ratio:.2f} ({low:.2f} to {high:.2f}) |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, and write the record and its page."""
    parser = argparse.ArgumentParser("python benchmarks/wire_before")
    parser.add_argument("--before", help="Python of an environment with an earlier distlion")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--again", action="store_true", help="measure nothing: write the page")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the record goes")
    args = parser.parse_args()
    if not args.again:
        if args.before is None:
            parser.error("--before is missing: the Python of an earlier commit's environment")
        record = {
            "command": "python benchmarks/wire_before --before PYTHON",
            "before": Variant("gloo", args.before).find_commit(),
            "turns": args.turns,
            "conditions": read_conditions(),
            "figures": {},
        }
        for name, values in take_turns(args.before, tuple(args.parts), args.turns, say):
            record["figures"][name] = values
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    args.json.with_suffix(".md").write_text(write_page(json.loads(args.json.read_text())))


if __name__ == "__main__":
    main()
