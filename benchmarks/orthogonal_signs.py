"""How often signs of orthogonalized matrices point uphill: <g, sign(C)> < 0 for a gradient g.

    python benchmarks/orthogonal_signs.py

Writes benchmarks/results/orthogonal_signs.md. Exact counts, no timing. C comes from the library's
five iterations in float32. Gradients are Gaussian, or a product of Gaussian factors of a low rank
with Gaussian noise of a tenth or a hundredth of its size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from distlion.kernels import orthogonalize

OUT = Path(__file__).parent / "results" / "orthogonal_signs.md"
SHAPES = ((2, 2), (4, 4), (8, 8), (8, 32), (16, 16), (64, 64), (64, 256))
KINDS = {"Gaussian": (0, 1.0), "rank 1, noise 0.1": (1, 0.1), "rank 1, noise 0.01": (1, 0.01)}
DRAWS, AT_ONCE = 10_000, 500
HEADS = (
    "rows",
    "columns",
    "draws",
    *(f"{kind}: {what}" for kind in KINDS for what in ("%", "least")),
)


def draw(rank: int, noise: float, shape: tuple[int, int], n: int) -> Tensor:
    rows, columns = shape
    grads = noise * torch.randn(n, rows, columns)
    return grads + torch.randn(n, rows, rank) @ torch.randn(n, rank, columns)


def measure(rank: int, noise: float, shape: tuple[int, int], n_draws: int) -> tuple[float, float]:
    """Return the share that points uphill in percent, and the least <g, sign(C)> / ||g||_1."""
    parts = []
    for _ in range(0, n_draws, AT_ONCE):
        grads = draw(rank, noise, shape, min(AT_ONCE, n_draws))
        inner = (grads * orthogonalize(grads).sign()).sum((1, 2))
        parts.append(inner / grads.abs().sum((1, 2)))
    shares = torch.cat(parts)
    return 100 * (shares < 0).double().mean().item(), shares.min().item()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    lines = [
        "# Signs of orthogonalized matrices that point uphill",
        "",
        f"`python benchmarks/orthogonal_signs.py`; torch {torch.__version__}, seed 0.",
        "For each kind of gradient g: the share in % with <g, sign(C)> < 0, and the least",
        "<g, sign(C)> / ||g||_1, which is 1 for C = g.",
        "",
        "| " + " | ".join(HEADS) + " |",
        "|" + "---:|" * len(HEADS),
    ]
    for shape in SHAPES:
        n_draws = DRAWS if shape[0] < 64 else DRAWS // 50
        found = [measure(rank, noise, shape, n_draws) for rank, noise in KINDS.values()]
        cells = [f"{share:g} | {least:.3f}" for share, least in found]
        lines.append(f"| {shape[0]} | {shape[1]} | {n_draws} | " + " | ".join(cells) + " |")
    OUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
