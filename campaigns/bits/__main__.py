"""Compare all cases with digests.json, or with another checkout, or record them again.

PYTHONPATH=tests:campaigns python -m bits check [WORDS OF A CASE'S NAME]
PYTHONPATH=tests:campaigns python -m bits record
PYTHONPATH=tests:campaigns python -m bits compare --against FOLDER [WORDS OF A CASE'S NAME]
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path

import torch

from bits import against, ledger
from bits.cases import Case, is_recorded, list_cases


def main() -> int:
    """Return 0 where every case is as recorded, or as in the other checkout."""
    parser = argparse.ArgumentParser(prog="bits", description=__doc__)
    parser.add_argument("action", choices=("check", "record", "compare", "play"))
    parser.add_argument("--against", type=Path, help="another checkout, with a .venv of its own")
    parser.add_argument("--out", type=Path, help="the file of digests that play writes")
    parser.add_argument("words", nargs="*", help="words that names of cases must contain")
    arguments = parser.parse_intermixed_args()
    action, words = arguments.action, arguments.words
    if action == "record" and words:
        parser.error("record takes no words: it writes every case")
    for needed, given in (("compare", arguments.against), ("play", arguments.out)):
        if (action == needed) != (given is not None):
            parser.error(
                "compare takes --against FOLDER, and play --out FILE; no other action does"
            )
    if action == "compare":
        return against.compare(arguments.against, words)
    torch.set_num_threads(1)
    logging.getLogger("distlion").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # of gradients that are not finite
    cases = [case for case in list_cases() if all(word in case.name for word in words)]
    if action != "play":
        cases = [case for case in cases if is_recorded(case)]
    if not cases:
        parser.error(f"no case has all of {words} in its name")
    found = _play(cases)
    if action == "check":
        differences = ledger.compare(found, ledger.read(), is_complete=not words)
        return against.report(differences, len(found))
    path = ledger.PATH if action == "record" else arguments.out
    ledger.write({case.name: found[case.name] for case in cases}, path)
    print(f"{len(found)} cases")
    return 0


def _play(cases: list[Case]) -> dict[str, ledger.Digests]:
    started_s = time.monotonic()

    def report(n_played: int) -> None:
        seconds = time.monotonic() - started_s
        print(f"{n_played} of {len(cases)} cases, {seconds:.0f} s", file=sys.stderr, flush=True)

    return ledger.play(cases, report=report)


if __name__ == "__main__":
    sys.exit(main())
