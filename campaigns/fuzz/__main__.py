"""Play random programs for some minutes, or one of them again.

PYTHONPATH=tests:campaigns python -m fuzz --minutes 30
PYTHONPATH=tests:campaigns python -m fuzz --seed 17
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import sys
import time
import warnings

import torch

from fuzz.campaign import Tally, describe, describe_failure, draw_program, play, run, shrink
from fuzz.workers import Crew

MINUTES = float(os.environ.get("DISTLION_FUZZ_SECONDS", "1800")) / 60


def main() -> int:
    """Return 0 where every program went as it must."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="how long")
    parser.add_argument("--first", type=int, help="the first seed; else it depends on the time")
    parser.add_argument("--seed", type=int, help="play this program alone, and shrink it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("distlion").setLevel(logging.CRITICAL)
    if arguments.seed is not None:
        return tell(arguments.seed)
    first = int(time.time()) * 1000 if arguments.first is None else arguments.first
    started_s = time.monotonic()
    told = 0

    def show(tally: Tally) -> None:
        nonlocal told
        for failure in tally.failures[told:]:
            print(f"\r{describe_failure(*failure)}", file=sys.stderr)
        told = len(tally.failures)
        seconds = time.monotonic() - started_s
        text = f"{seconds:.0f} s: {tally.programs} programs, {sum(tally.kinds.values())} failed"
        print(f"\r{text}  ", end="", file=sys.stderr, flush=True)

    with Crew() as crew:
        tally = run(itertools.count(first), crew, seconds=60 * arguments.minutes, report=show)
    print(file=sys.stderr)
    print(describe(tally, time.monotonic() - started_s))
    return 1 if tally.failures else 0


def tell(seed: int) -> int:
    """Play one program, shrink it where it fails, and print what happened."""
    program = draw_program(seed)
    with Crew() as crew:
        verdict = play(program, crew)
        print(program.setup, *program.ops, sep="\n")
        print(*(f"{name}: {error or 'ok'}" for name, error in verdict.endings), sep="\n")
        if not verdict.violations:
            print("all is as it must be")
            return 0
        print(*verdict.violations, sep="\n")
        print("what it takes:", *shrink(program, crew).ops, sep="\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
