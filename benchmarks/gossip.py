"""Votes among neighbors only: how much of the majority they find, and whether replicas stay equal.

    python benchmarks/gossip.py

Writes benchmarks/results/gossip.md. Numpy only, a few seconds. Two questions, each for 16 workers
on a ring, on a torus of 4 x 4, and on an exponential graph (neighbors 1, 2, 4 and 8 places away):

1. Workers refine their votes: in each round everybody takes the majority of its own bit and those
   of its neighbors. How many bits are those of the majority of all, and how many elements have the
   same bit on all workers?
2. Each worker follows the vote of its neighborhood (Lion, softmax regression on random classes).
   How far apart are the replicas at the end? The majority of all is the control.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
N, N_ELEMENTS, N_ROUNDS, SEEDS = 16, 20_000, 8, range(5)
N_CLASSES, N_FEATURES, N_SAMPLES, N_STEPS, BATCH, LR = 10, 32, 4000, 400, 8, 4e-3
BETAS = (0.9, 0.95)
NEIGHBORS = {
    "ring": lambda i: {(i - 1) % N, (i + 1) % N},
    "torus": lambda i: {
        (i + 4) % N,
        (i - 4) % N,
        i // 4 * 4 + (i + 1) % 4,
        i // 4 * 4 + (i - 1) % 4,
    },
    "exponential": lambda i: {(i + s * 2**k) % N for k in range(4) for s in (1, -1)},
    "all": lambda i: set(range(N)) - {i},
}
OUT = Path(__file__).parent / "results" / "gossip.md"


def hear(graph: str) -> Array:
    """Return (N, N): 1 where a worker hears another, or itself."""
    heard = np.eye(N)
    for worker in range(N):
        heard[worker, sorted(NEIGHBORS[graph](worker))] = 1
    return heard


def refine(graph: str, seed: int) -> list[tuple[float, float]]:
    """Return for each round the share of right bits, and that of elements on which all agree."""
    rng, heard = np.random.default_rng(seed), hear(graph)
    chance = 0.2 + 0.6 * rng.random(N_ELEMENTS)  # of a 1; it differs between elements
    votes = np.where(rng.random((N, N_ELEMENTS)) < chance, 1.0, -1.0)
    majority = np.sign(votes.sum(0))
    seen = []
    for _ in range(N_ROUNDS + 1):
        right = (votes == majority)[:, majority != 0].mean()
        agree = (votes == votes[0]).all(0).mean()
        seen.append((float(right), float(agree)))
        sums = heard @ votes
        votes = np.where(sums == 0, votes, np.sign(sums))
    return seen


def make_data(rng: np.random.Generator) -> tuple[Array, NDArray[np.int64]]:
    centers = rng.normal(size=(N_CLASSES, N_FEATURES))
    labels = rng.integers(N_CLASSES, size=2 * N_SAMPLES)
    inputs = centers[labels] + 1.5 * rng.normal(size=(2 * N_SAMPLES, N_FEATURES))
    return np.hstack([inputs, np.ones((2 * N_SAMPLES, 1))]), labels


def train(graph: str, seed: int) -> tuple[float, float, float]:
    """Return accuracy of the mean model, the mean of each worker's, and how far replicas are apart.

    The last is the mean distance of a replica from the mean of all, over the norm of that mean.
    """
    rng, heard = np.random.default_rng(seed), hear(graph)
    inputs, labels = make_data(rng)
    models = np.zeros((N, N_FEATURES + 1, N_CLASSES))
    momenta = np.zeros_like(models)
    for step in range(N_STEPS):
        rows = rng.integers(N_SAMPLES, size=(N, BATCH))
        batch, wanted = inputs[rows], labels[rows]
        scores = np.exp(batch @ models - (batch @ models).max(-1, keepdims=True))
        errors = scores / scores.sum(-1, keepdims=True)
        np.put_along_axis(
            errors, wanted[..., None], np.take_along_axis(errors, wanted[..., None], -1) - 1, -1
        )
        grads = batch.transpose(0, 2, 1) @ errors / BATCH
        directions = BETAS[0] * momenta + (1 - BETAS[0]) * grads
        momenta = BETAS[1] * momenta + (1 - BETAS[1]) * grads
        sums = np.tensordot(heard, np.where(directions > 0, 1.0, -1.0), 1)
        coin = np.where(rng.random(models.shape[1:]) < 0.5, 1.0, -1.0)  # one for all workers
        models = models - LR * (1 - step / N_STEPS) * np.where(sums == 0, coin, np.sign(sums))
    mean = models.mean(0)
    test, wanted = inputs[N_SAMPLES:], labels[N_SAMPLES:]
    accuracies = [float(((test @ model).argmax(-1) == wanted).mean()) for model in (mean, *models)]
    apart = np.linalg.norm((models - mean).reshape(N, -1), axis=1).mean() / np.linalg.norm(mean)
    return 100 * accuracies[0], 100 * statistics.mean(accuracies[1:]), float(apart)


def spread(values: Iterable[float], digits: int = 1) -> str:
    known = list(values)
    return f"{statistics.mean(known):.{digits}f} ± {statistics.stdev(known):.{digits}f}"


def main() -> None:
    start_s = time.perf_counter()
    lines = [
        "# Votes among neighbors only",
        "",
        f"`python benchmarks/gossip.py`; Python {platform.python_version()}, numpy "
        f"{np.__version__}; {N} workers, seeds {SEEDS.start} to {SEEDS.stop - 1}, mean ± standard "
        "deviation. Exact counts of simulated votes, no timing.",
        "",
        f"**Refined votes**, {N_ELEMENTS:,} elements: % of bits that are those of the majority of "
        "all (% of elements on which all workers agree), by round.",
        "",
        "| graph | " + " | ".join(f"round {r}" for r in (0, 1, 2, 4, N_ROUNDS)) + " |",
        "|---|" + "---:|" * 5,
    ]
    for graph in ("ring", "torus", "exponential"):
        runs = 100 * np.array([refine(graph, seed) for seed in SEEDS]).mean(0)
        cells = [f"{runs[r, 0]:.1f} ({runs[r, 1]:.1f})" for r in (0, 1, 2, 4, N_ROUNDS)]
        lines.append(f"| {graph} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"**Training** by such votes without refining, {N_STEPS} steps of Lion, batch {BATCH}: "
        "test accuracy in %, and the distance of a replica from the mean of all, over its norm.",
        "",
        "| who votes together | mean model | each worker's | replicas apart |",
        "|---|---:|---:|---:|",
    ]
    for graph in NEIGHBORS:
        mean, each, apart = zip(*(train(graph, seed) for seed in SEEDS), strict=True)
        lines.append(f"| {graph} | {spread(mean)} | {spread(each)} | {spread(apart, 3)} |")
    OUT.write_text("\n".join(lines) + "\n")
    print(OUT.read_text(), f"{time.perf_counter() - start_s:.1f} s", sep="\n")


if __name__ == "__main__":
    main()
