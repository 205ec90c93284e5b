"""Let the modules of benchmarks/bucket_trace be imported: a bucket on all ranks, and its parts."""

from __future__ import annotations

import sys
from pathlib import Path

_TRACE = str(Path(__file__).resolve().parents[1] / "bucket_trace")
if _TRACE not in sys.path:
    # Last, so that a module of this folder wins over one of the same name.
    sys.path.append(_TRACE)
