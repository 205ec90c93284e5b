"""Let the modules of benchmarks/target and benchmarks/study be imported: data, runs, records."""

from __future__ import annotations

import sys
from pathlib import Path

_TARGET = str(Path(__file__).resolve().parents[1] / "target")
if _TARGET not in sys.path:
    # Last, so that a module of this folder wins over one of the same name.
    sys.path.append(_TARGET)

import study_path  # noqa: E402, F401
