"""Compare Distributed Lion with its rivals part by part, and answer the papers' claims.

Images are CIFAR-10's and text is books where they are given; otherwise, what is embedded, in short
runs: enough to see the study work, not to believe its answers. Runs whose records are there are not
run again.

    python benchmarks/comparison [--images cifar-10-batches-py] [--books FOLDER] [--seeds 3]
        [--parts NAME ...] [--records FOLDER] [--jobs N] [--results FOLDER]

Writes claims.md and claims.json, and the report and figures of each part, into FOLDER:
benchmarks/results/comparison.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claims import PAR, RECOVERED, Answer, answer_all, sum_up
from parts import PARTS, Part

from distlion.cost import LinkModel, count_cores, parse_rate
from distlion.report import read_comparison, write_comparison_report
from distlion.report.comparison import Comparison
from distlion.report.document import (
    Block,
    Code,
    Heading,
    Paragraph,
    Table,
    render_markdown,
)
from distlion.training import CompareProgress, TaskName, compare

RESULTS = Path(__file__).resolve().parents[1] / "results" / "comparison"
RATE = "1gbit"
LATENCY_S = 1e-4
TELL_EVERY_S = 15.0


class Teller:
    """Tell on stderr, now and then, where a part is."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._due_s = 0.0

    def __call__(self, progress: CompareProgress) -> None:
        """Tell how far it is."""
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + TELL_EVERY_S
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
        observe=Teller(part),
    )
    link = LinkModel.of_line(parse_rate(RATE), latency_s=LATENCY_S)
    results = args.results / part.name
    results.mkdir(parents=True, exist_ok=True)
    for path in write_comparison_report(folder, link=link, rate=RATE):
        if path.suffix != ".html":
            shutil.copy(path, results / path.name)
    return read_comparison(folder)


def describe_claims(
    answers: Sequence[Answer], parts: Mapping[str, Comparison], command: str
) -> list[Block]:
    """Lay out the claims, each with its answer and the figures behind it."""
    by_claim: dict[str, list[Answer]] = {}
    for answer in answers:
        by_claim.setdefault(answer.claim, []).append(answer)
    blocks: list[Block] = [
        Heading("Claims and answers", level=1),
        Paragraph(
            "Differences are of the final outcome (images: test error in points; text: test loss "
            "in nats per byte), taken seed by seed and averaged; lower is better. A par is no more "
            f"than {PAR['images']:g} point or {PAR['text']:g} nats above; some parameters recover "
            f"what all do with {RECOVERED:.0%} of the gain. These bounds were fixed before the "
            "runs. Learning rates are tuned alike for all, as each part's report says. With few "
            "seeds a difference below its spread decides nothing: see for how many seeds an "
            "answer holds."
        ),
        Table(["claim", "answer"], [[claim, sum_up(each)] for claim, each in by_claim.items()]),
    ]
    for claim, each in by_claim.items():
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
                str(record["task"]["data"]),
                f"{settings['partition']}{skew}",
                f"{record['task']['model_type']}, {record['trainable_parameters']:,}",
                f"{settings['steps']}",
                f"{settings['batch_size']}",
                f"{settings['seeds']}",
                f"{seconds / 60:.0f}",
            ]
        )
    head = ["part", "data", "partition", "model, parameters", "steps", "batch of a worker"]
    return Table([*head, "seeds", "core-minutes"], rows)


def summarize(answers: Sequence[Answer], parts: Mapping[str, Comparison]) -> dict[str, Any]:
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
    return {"answers": [dataclasses.asdict(each) for each in answers], "outcomes": outcomes}


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", help="folder of CIFAR-10's Python batches")
    parser.add_argument("--books", help="folder of *.txt, a book each")
    parser.add_argument("--seeds", type=int, default=3)
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--records", type=Path, default=Path("comparisons") / "study")
    parser.add_argument("--jobs", type=int, default=count_cores(), help="runs at the same time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    data = {TaskName.IMAGES: args.images, TaskName.TEXT: args.books}
    words = ["python", "benchmarks/comparison", "--seeds", str(args.seeds)]
    words += ["--images", args.images] if args.images else []
    words += ["--books", args.books] if args.books else []
    command = shlex.join(words)
    parts: dict[str, Comparison] = {}
    for part in PARTS:
        # A single text has no books to part.
        if part.name in args.parts and (data[part.task] or part.name != "text-by-book"):
            parts[part.name] = run_part(part, data[part.task], args, command)
    answers = answer_all(parts)
    blocks = describe_claims(answers, parts, command)
    (args.results / "claims.md").write_text(render_markdown(blocks))
    (args.results / "claims.json").write_text(
        json.dumps(summarize(answers, parts), indent=1) + "\n"
    )
    for claim in dict.fromkeys(answer.claim for answer in answers):
        print(f"{claim}: {sum_up([each for each in answers if each.claim == claim])}")
    print(f"report: {args.results / 'claims.md'}")


if __name__ == "__main__":
    main()
