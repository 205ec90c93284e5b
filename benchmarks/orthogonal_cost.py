"""What orthogonalized directions cost: flops for language models, and encoding on a CPU.

    python benchmarks/orthogonal_cost.py           # measure, and write the report
    python benchmarks/orthogonal_cost.py report    # write the report of the record that is there

Writes benchmarks/results/orthogonal_cost.json and .md. Flops are exact. Encodings are measured in
turn within one invocation, on one thread, as ratios: another load of the machine slows both.
`python benchmarks/gpu orthogonal` measures batches on a GPU.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent / "gpu"))

from orthogonal import Shape, count_flops, list_gpt2_matrices, make_calls

RESULTS = Path(__file__).parent / "results"
RECORD, PAGE = RESULTS / "orthogonal_cost.json", RESULTS / "orthogonal_cost.md"
TOKENS = {"8k": 8192, "64k": 65536}
PAIRS = 5


@dataclass(frozen=True)
class Model:
    """A language model: all its parameters, and its hidden matrices."""

    name: str
    n_params: int
    matrices: list[Shape]


def list_models() -> list[Model]:
    """List GPT-2's two smallest, and Llama 3.2's; heads are tied to embeddings."""
    llama = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048)]
    llama += [(8192, 2048), (8192, 2048), (2048, 8192)]
    return [
        Model("GPT-2 124M: 12 layers, width 768", 124_439_808, list_gpt2_matrices(12, 768)),
        Model(
            "GPT-2 medium, 355M: 24 layers, width 1024", 354_823_168, list_gpt2_matrices(24, 1024)
        ),
        Model(
            "Llama 3.2 1B: 16 layers, width 2048, MLP 8192, 32 heads, 8 for keys and values",
            1_235_814_400,
            llama * 16,
        ),
    ]


def count_costs() -> list[dict[str, Any]]:
    """Count the flops of a worker's step: 6 N D of the model, and those of the iterations."""
    rows = []
    for model in list_models():
        flops = sum(map(count_flops, model.matrices))
        shares = {name: flops / (6 * model.n_params * n) for name, n in TOKENS.items()}
        n_matrices = sum(map(math.prod, model.matrices))
        rows.append(
            {"model": model.name, "matrices": n_matrices / 1e6, "flops": flops, "shares": shares}
        )
    return rows


def measure() -> list[dict[str, Any]]:
    """Time a plain and an orthogonalized encoding in turn."""
    torch.set_num_threads(1)
    rows = []
    cases = {
        "one layer of GPT-2 124M": (list_gpt2_matrices(1, 768), PAIRS),
        "the study's text model (2 layers, width 64)": (list_gpt2_matrices(2, 64), 20 * PAIRS),
    }
    for name, (shapes, n_pairs) in cases.items():
        calls = make_calls(shapes, "cpu")
        times: dict[str, list[float]] = {kind: [] for kind in calls}
        for call in calls.values():
            call()
        for _ in range(n_pairs):
            for kind, call in calls.items():
                started = time.perf_counter()
                call()
                times[kind].append(time.perf_counter() - started)
        pairs = zip(times["orthogonalized"], times["plain"], strict=True)
        rows.append(
            {
                "matrices": name,
                "pairs": n_pairs,
                **{f"{kind}_ms": 1e3 * median(found) for kind, found in times.items()},
                "ratio": median(slow / quick for slow, quick in pairs),
                "gflop": sum(map(count_flops, shapes)) / 1e9,
            }
        )
    return rows


def write_report(record: dict[str, Any]) -> str:
    where = record["conditions"]
    lines = [
        "# What orthogonalized directions cost",
        "",
        "`python benchmarks/orthogonal_cost.py`. Five iterations take 20 m^2 n + 10 m^3 flops of a",
        "matrix of m x n, m <= n. Every worker does all of them.",
        "",
        "## Flops of a worker's step",
        "",
        "The share is that of the model's own 6 N D flops, for N parameters and D tokens a worker",
        "and step. Heads are tied to embeddings, and count once in N.",
        "",
        "| model | elements in matrices, millions | TFLOP | at 8k tokens | at 64k tokens |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in record["costs"]:
        cells = [row["model"], f"{row['matrices']:.1f}", f"{row['flops'] / 1e12:.2f}"]
        cells += [f"{row['shares'][name]:.1%}" for name in TOKENS]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Encoding on a CPU",
        "",
        f"{where['date']}, {where['machine']}, {where['cores']} cores, torch {where['torch']}, one",
        f"thread, float32. The machine was busy (load {where['load']:.0f}). Only the ratio can be",
        "read, a median over pairs that ran in turn, and it too is rough.",
        "",
        "| matrices | pairs | plain, ms | orthogonalized, ms | ratio | GFLOP |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in record["measured"]:
        cells = [row["matrices"], str(row["pairs"]), f"{row['plain_ms']:.2f}"]
        cells += [f"{row['orthogonalized_ms']:.1f}", f"{row['ratio']:.0f}", f"{row['gflop']:.3g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> None:
    if words == ["report"]:
        record = json.loads(RECORD.read_text())
    else:
        conditions = {
            "date": dt.date.today().isoformat(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "load": os.getloadavg()[0],
        }
        record = {"conditions": conditions, "costs": count_costs(), "measured": measure()}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(write_report(record))


if __name__ == "__main__":
    main(sys.argv[1:])
