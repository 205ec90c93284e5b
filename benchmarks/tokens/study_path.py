"""Let modules of benchmarks/study be imported."""

from __future__ import annotations

import sys
from pathlib import Path

_folder = str(Path(__file__).resolve().parents[1] / "study")
if _folder not in sys.path:
    # Last, so that a module of this folder wins over one of the same name.
    sys.path.append(_folder)
