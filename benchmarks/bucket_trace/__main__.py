"""Trace one bucket on all ranks, before and after: where the time of its exchange goes.

    python benchmarks/bucket_trace [--before PYTHON] [--elements 1000000] [--rate 1gbit]

Hosts are network namespaces of this machine (`distlion netlab`), so this needs Linux and root
rights. PYTHON is that of an environment with distlion of an earlier commit, built in a checkout of
it; without one, Gloo with today's code is the one before. Writes bucket_trace.json, .md and .png to
benchmarks/results; --again draws the record that is there. It takes about three minutes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bucket_pages import BEFORE, write_page
from tracing import TODAY, Place, Record, Variant, trace_bucket

from distlion_lab.report.document import Picture, render_markdown

RESULTS = Path(__file__).resolve().parents[1] / "results" / "bucket_trace.json"
LATENCY_S = 0.01


def measure(args: argparse.Namespace) -> Record:
    """Trace a bucket on 2 and 4 hosts, and on 2 with latency."""
    variants = dict(TODAY)
    if args.before is not None:
        variants = {BEFORE: Variant("gloo", args.before), **variants}
    places = [Place(2, args.rate), Place(4, args.rate), Place(2, args.rate, LATENCY_S)]
    options = {"steps": args.steps, "turns": args.turns, "variants": variants}
    with_before = " --before PYTHON" if args.before else ""
    return {
        "command": f"python benchmarks/bucket_trace{with_before}",
        "commits": {name: variant.find_commit() for name, variant in variants.items()},
        "cells": [trace_bucket(place, args.elements, **options) for place in places],
    }


def write_pages(file: Path) -> None:
    """Write the Markdown and the picture of a record."""
    blocks = write_page(json.loads(file.read_text()), file.stem)
    (picture,) = (block for block in blocks if isinstance(block, Picture))
    file.with_suffix(".md").write_text(render_markdown(blocks))
    file.with_suffix(".png").write_bytes(picture.png)


def main() -> None:
    parser = argparse.ArgumentParser("python benchmarks/bucket_trace")
    parser.add_argument("--before", help="Python of an environment with an earlier distlion")
    parser.add_argument("--elements", type=int, default=1_000_000, help="parameters")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=11, help="of a variant in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="measure nothing: draw again")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the record goes")
    args = parser.parse_args()
    if not args.again:
        args.json.write_text(json.dumps(measure(args), separators=(",", ":")) + "\n")
    write_pages(args.json)


if __name__ == "__main__":
    main()
