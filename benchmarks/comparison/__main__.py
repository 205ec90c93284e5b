"""Compare Distributed Lion with its baselines part by part, and answer the papers' claims.

Images are CIFAR-10's and text is books where both are given; otherwise, what is embedded, in short
runs: enough to see the study work, not to believe its answers. Runs whose records are there are not
run again.

    python benchmarks/comparison [--images cifar-10-batches-py --books FOLDER] [--seeds 3]
        [--parts NAME ...] [--records FOLDER] [--jobs N] [--results FOLDER]

Writes claims.md and claims.json, and the report of each part with the figures that a page shows,
into the folder of results: benchmarks/results/comparison for all parts on the data given, else one
beside the records.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claims import GAIN, MATCH, RECOVERED, Answer, answer_all, sum_up
from parts import PARTS, Part

from distlion_lab.planning.checkup import count_cores
from distlion_lab.planning.line import model_line
from distlion_lab.planning.quantity import parse_rate
from distlion_lab.report.comparison import Comparison, read_comparison
from distlion_lab.report.comparison_report import build_report
from distlion_lab.report.document import (
    Block,
    Code,
    Heading,
    Paragraph,
    Picture,
    Table,
    render_markdown,
)
from distlion_lab.training.compare import CompareProgress, compare
from distlion_lab.training.train_settings import TaskName

RESULTS = Path(__file__).resolve().parents[1] / "results" / "comparison"
RATE = "1gbit"
LATENCY_S = 1e-4
REPORT_EVERY_S = 15.0


class Reporter:
    """Report on stderr, now and then, where a part is."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._due_s = 0.0

    def __call__(self, progress: CompareProgress) -> None:
        """Report how far it is."""
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + REPORT_EVERY_S
        left = "" if progress.seconds_left is None else f", {progress.seconds_left:.0f} s left"
        runs = f"{progress.done_runs}/{progress.total_runs} runs{left}"
        print(f"{self._part.name}: {runs}, {progress.what}", file=sys.stderr, flush=True)


def run_part(part: Part, data: str | None, args: argparse.Namespace, command: str) -> Comparison:
    """Run what is missing of a part, and leave its report in the folder of results."""
    folder = args.records / part.runs
    compare(
        part.settings(data, seeds=args.seeds),
        folder=folder,
        jobs=args.jobs,
        command=command,
        observe=Reporter(part),
    )
    link = model_line(parse_rate(RATE), latency_s=LATENCY_S)
    results = args.results / part.name
    results.mkdir(parents=True, exist_ok=True)
    comparison = read_comparison(folder)
    blocks = build_report(comparison, link=link, rate=RATE, figures=part.figures)
    (results / "report.md").write_text(render_markdown(blocks))
    for block in blocks:
        if isinstance(block, Picture):
            (results / block.name).write_bytes(block.png)
    return comparison


def describe_claims(
    answers: Mapping[str, Sequence[Answer]], parts: Mapping[str, Comparison], command: str
) -> list[Block]:
    """Lay out the claims, each with its answer and the figures behind it."""
    blocks: list[Block] = [
        Heading("Claims and answers", level=1),
        Paragraph(
            "Differences are of the final outcome (images: test error in points; text: test loss "
            "in nats per byte), taken seed by seed: mean ± standard deviation; lower is better. A "
            f"match is at most {MATCH['points']:g} point or {MATCH['nats']:g} nats above. Some "
            f"parameters recover what all do with {RECOVERED:.0%} of the gain, where that is more "
            f"than {GAIN:g} of that. These bounds were fixed before the runs. All methods of a "
            "part had as many learning rates to choose from, which its report lists; with one, no "
            "choice. With few seeds, a mean below its standard deviation decides little: see for "
            "how many seeds an answer holds."
        ),
        Table(["claim", "answer"], [[claim, sum_up(each)] for claim, each in answers.items()]),
    ]
    for claim, each in answers.items():
        rows = [
            [
                answer.part,
                str(answer.workers),
                answer.figures,
                {True: "holds", False: "does not hold", None: "nothing to answer"}[answer.holds],
                answer.seeds,
            ]
            for answer in each
        ]
        head = ["part", "workers", "found", "here", "for seeds"]
        blocks += [Heading(f"{claim[0].upper()}{claim[1:]}"), Table(head, rows)]
    blocks += [Heading("Parts"), _list_parts(parts), Heading("To repeat"), Code(command)]
    return blocks


def _list_parts(parts: Mapping[str, Comparison]) -> Table:
    rows = []
    for name, comparison in parts.items():
        settings, record = comparison.settings, comparison.records[0]
        skew = "" if settings["alpha"] is None else f" {settings['alpha']:g}"
        seconds = sum(each["timing"]["wall_s"] for each in comparison.records)
        rows.append(
            [
                f"[{name}]({name}/report.md)",
                Path(str(record["task"]["data"])).name,
                f"{settings['partition']}{skew}",
                f"{record['task']['model_type']}, {record['trainable_parameters']:,}",
                f"{settings['steps']}",
                f"{settings['batch_size']}",
                f"{settings['seeds']}",
                f"{seconds / 60:.0f}",
            ]
        )
    head = ["part", "data", "partition", "model, parameters", "steps", "batch of a worker"]
    return Table([*head, "seeds", "minutes of its runs, shared ones too"], rows)


def summarize(
    answers: Mapping[str, Sequence[Answer]], parts: Mapping[str, Comparison]
) -> dict[str, Any]:
    """Return the answers and, for each run that they rest on, its outcome."""
    outcomes = [
        {
            "part": name,
            "method": cell.method,
            "workers": cell.workers,
            "lr": cell.lr,
            "seed": record["settings"]["seed"],
            "test_loss": record["series"]["test_loss"][-1],
            "test_accuracy": record["series"]["test_accuracy"][-1],
            "diverged": record["diverged"],
            "up_bits_per_parameter": record["up_bits_per_parameter"],
            "down_bits_per_parameter": record["down_bits_per_parameter"],
            "parameters_sha256": record["parameters_sha256"],
        }
        for name, comparison in parts.items()
        for cell in comparison.cells
        for record in cell.records
    ]
    found = [dataclasses.asdict(each) for claim in answers.values() for each in claim]
    return {"answers": found, "outcomes": outcomes}


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", help="folder of CIFAR-10's Python batches")
    parser.add_argument("--books", help="folder of *.txt, a book each")
    parser.add_argument("--seeds", type=int, default=3)
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--records", type=Path, default=Path("comparisons") / "study")
    parser.add_argument("--jobs", type=int, default=count_cores(), help="runs at the same time")
    parser.add_argument("--results", type=Path, help="folder of what is written")
    args = parser.parse_args()
    if bool(args.images) != bool(args.books):
        parser.error("--images and --books go together: answers are not mixed with embedded data")
    asked = [part for part in PARTS if args.parts is None or part.name in args.parts]
    if args.results is None:
        is_whole = args.books and len(asked) == len(PARTS)
        args.results = RESULTS if is_whole else args.records / "results"
    args.results.mkdir(parents=True, exist_ok=True)
    command = _format_command(args)
    data = {TaskName.IMAGES: args.images, TaskName.TEXT: args.books}
    parts = {part.name: run_part(part, data[part.task], args, command) for part in asked}
    answers = answer_all(parts)
    report = render_markdown(describe_claims(answers, parts, command))
    (args.results / "claims.md").write_text(report)
    found = json.dumps(summarize(answers, parts), indent=1) + "\n"
    (args.results / "claims.json").write_text(found)
    for claim, each in answers.items():
        print(f"{claim}: {sum_up(each)}")
    print(f"report: {args.results / 'claims.md'}")


def _format_command(args: argparse.Namespace) -> str:
    words = ["python", "benchmarks/comparison"]
    if args.images:
        words += ["--images", args.images, "--books", args.books]
    words += ["--seeds", str(args.seeds)]
    words += ["--parts", *args.parts] if args.parts else []
    return shlex.join(words)


if __name__ == "__main__":
    main()
