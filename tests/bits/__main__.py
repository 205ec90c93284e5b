"""Compare all cases with digests.json, or record them again.

PYTHONPATH=tests python -m bits check [WORDS OF A CASE'S NAME]
PYTHONPATH=tests python -m bits record
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from bits import ledger
from bits.cases import list_cases


def main() -> int:
    """Return 0 where every case is as recorded."""
    parser = argparse.ArgumentParser(prog="bits", description=__doc__)
    parser.add_argument("action", choices=("check", "record"))
    parser.add_argument("words", nargs="*", help="words that names of cases must contain")
    arguments = parser.parse_args()
    if arguments.action == "record" and arguments.words:
        parser.error("record takes no words: it writes every case")
    torch.set_num_threads(1)
    cases = [case for case in list_cases() if all(word in case.name for word in arguments.words)]
    if not cases:
        parser.error(f"no case has all of {arguments.words} in its name")
    started_s = time.monotonic()

    def report(n_played: int) -> None:
        seconds = time.monotonic() - started_s
        print(f"{n_played} of {len(cases)} cases, {seconds:.0f} s", file=sys.stderr, flush=True)

    found = ledger.play(cases, report=report)
    if arguments.action == "record":
        ledger.write({case.name: found[case.name] for case in cases})
        print(f"recorded {len(found)} cases")
        return 0
    differences = ledger.compare(found, ledger.read())
    print(*differences, f"{len(differences)} of {len(found)} cases differ", sep="\n")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
