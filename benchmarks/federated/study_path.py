"""Let the modules of benchmarks/study be imported: the images and the network."""

from __future__ import annotations

import sys
from pathlib import Path

_STUDY = str(Path(__file__).resolve().parents[1] / "study")
if _STUDY not in sys.path:
    # Last, so that a module of this folder wins over one of the same name.
    sys.path.append(_STUDY)
