"""Read damaged files of some formats, and count what comes of it.

PYTHONPATH=tests:campaigns python -m formats --count 1000 cifar checkpoint
PYTHONPATH=tests:campaigns python -m formats --first 17 --count 1 cifar

Ends with 0 where each file was read, or refused with an error of distlion.errors.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from formats.campaign import FORMATS, prepare_process, run


def main() -> int:
    """Return 0 where nothing but typed errors came of it."""
    parser = argparse.ArgumentParser(prog="formats", description=__doc__)
    parser.add_argument("formats", nargs="+", choices=FORMATS)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--count", type=int, default=300, help="files of each format")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    prepare_process()
    found = []
    for name in arguments.formats:
        found.append(run(name, arguments.first, arguments.count))
        print(json.dumps(found[-1]), flush=True)
    return 1 if any(row["untyped"] for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
