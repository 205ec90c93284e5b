"""A GPT of 86 million parameters: four virtual workers that vote, and AdamW on their mean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPE = {"model_type": "gpt2", "vocab_size": 256}
"""GPT-2's smallest, read byte by byte. No dropout: the text is read less than once."""
UNDROPPED = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SMALL, TINY = (
    {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 512},
    {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32},
)
METHODS = "global-adamw,majority-cautious-betas-90-95,majority-betas-90-95"
N_STEPS, LR_FACTOR = 600, 2
"""Rates: half, once and twice the center, 1e-3 for AdamW and 5e-4 for votes."""


def compare_text(data: Path | None, *, rehearses: bool) -> dict[str, Any]:
    """Compare by ``distlion compare``, each method at the best of three learning rates.

    Args:
        data: Folder of texts; None for the standard library of Python.
        rehearses: Whether to run a tiny one on the CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "gpt.json")
        settings = SHAPE | UNDROPPED | (TINY if rehearses else SMALL)
        config.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "distlion", "compare", "--task", "text", "--json"]
        command += ["--methods", METHODS, "--workers", "4", "--seeds", "1"]
        command += ["--model-config", str(config), "--out", str(Path(folder, "runs"))]
        command += ["--device", "cpu" if rehearses else "cuda", "--jobs", "3"]
        command += ["--steps", str(2 if rehearses else N_STEPS), "--lrs", "1" if rehearses else "3"]
        command += ["--lr-factor", str(LR_FACTOR), "--warmup-steps", str(1 if rehearses else 60)]
        command += ["--data", str(data)] if data else []
        # Matrix products in TF32, as training on such devices is done.
        environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment
        )
        if ended.returncode:
            return {"ok": False, "summary": ended.stderr.strip()[-2000:]}
        (rows,) = json.loads(ended.stdout)["outcome"].values()  # of the one number of workers
        runs = [
            json.loads(file.read_text()) for file in sorted(Path(folder, "runs").rglob("*.json"))
        ]
        return {"ok": True, "settings": settings, "rows": rows, "runs": runs}
