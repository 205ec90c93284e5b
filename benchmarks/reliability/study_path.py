"""Let the modules of benchmarks/study be imported: the images, their network, runs, records."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "study"))
