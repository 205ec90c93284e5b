"""A GPT of 124 M parameters with four virtual workers: majority vote, global Lion, global AdamW."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GPT2 = {"model_type": "gpt2"}
"""Its smallest: transformers' defaults, with a vocabulary of 50,257 of which 256 bytes occur."""
SMALL, TINY = (
    {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
    {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 256},
)
METHODS = "majority,global-lion,global-adamw"


def compare_text(*, rehearses: bool) -> dict[str, Any]:
    """Compare by ``distlion compare``, each method at the best of three learning rates."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "gpt.json")
        settings = GPT2 | (TINY if rehearses else SMALL)
        config.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "distlion", "compare", "--task", "text", "--json"]
        command += ["--methods", METHODS, "--workers", "4", "--seeds", "1"]
        command += ["--model-config", str(config), "--out", str(Path(folder, "runs"))]
        command += ["--device", "cpu" if rehearses else "cuda", "--jobs", "1"]
        command += ["--steps", "2" if rehearses else "200", "--lrs", "1" if rehearses else "3"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            return {"ok": False, "summary": ended.stderr.strip()[-2000:]}
        (rows,) = json.loads(ended.stdout)["outcome"].values()  # of the one number of workers
        return {"ok": True, "settings": settings, "rows": rows}
