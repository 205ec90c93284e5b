"""The study of votes on tokens: its runs, its claims and its page; its protocol is in studies/."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from intervals import spread

from training import Run

Find = Callable[[str], Mapping[str, Any] | None]
BESIDE = ("embedding", "head")
SEEDS = (3, 4, 5)
ASKED = (
    ("advised", "Is AdamW for embedding and output weights better than votes on them"),
    ("ahead of AdamW", "Is that ahead of AdamW for all parameters"),
)

METHODS = {
    "adamw": "AdamW on the mean gradient",
    "muon": "Muon on the mean gradient, AdamW for the rest",
    "orthogonal": "orthogonalized votes on all parameters",
    "beside": "orthogonalized votes, AdamW for embedding and output weights",
}


@dataclass(frozen=True)
class Cell:
    """A setting.

    Attributes:
        name: Its name.
        title: What a reader sees.
        windows, steps: As for ``Run``.
    """

    name: str
    title: str
    windows: int
    steps: int


CELLS = (
    Cell("short", "300 steps, 256 tokens a worker and step", 16, 300),
    Cell("longer", "1,000 steps, 256 tokens a worker and step", 16, 1000),
    Cell("larger", "300 steps, 1,024 tokens a worker and step", 64, 300),
)


def find_method(run: Run) -> str | None:
    """Return the method of a run; None for one that is shown beside them."""
    if run.method != "orthogonal":
        return run.method
    return {(): "orthogonal", BESIDE: "beside"}.get(run.beside)


def choose(method: str, find: Find) -> Run | None:
    """Return the run of tuning with the lowest validation loss; None while one is open."""
    tried = [run for run in TUNING if find_method(run) == method]
    losses = {run: record["loss"] for run in tried if (record := find(run.name)) is not None}
    return min(losses, key=lambda run: losses[run]) if len(losses) == len(tried) else None


def make_run(cell: Cell, method: str, seed: int, find: Find) -> Run | None:
    """Make the run of a method in a cell, with one seed; None while its rates are open."""
    tuned = choose(method, find)
    size = {"windows": cell.windows, "steps": cell.steps}
    return tuned and replace(tuned, **size, seed=seed, scored="test")  # type: ignore[arg-type]


def list_runs(cell: Cell, find: Find) -> list[Run]:
    """List the runs of a cell whose rates are known, those of one seed after the other."""
    made = [make_run(cell, method, seed, find) for seed in SEEDS for method in METHODS]
    return [run for run in made if run is not None]


def find_losses(cell: Cell, method: str, find: Find) -> list[float]:
    """Return the test losses of a method by seed; empty while one is missing."""
    runs = [make_run(cell, method, seed, find) for seed in SEEDS]
    records = [run and find(run.name) for run in runs]
    return [record["loss"] for record in records if record] if all(records) else []


def compare(cell: Cell, method: str, other: str, find: Find) -> tuple[float, float] | None:
    """Return the mean difference of two methods' losses, and half its 95 % interval; None: open."""
    own, others = (find_losses(cell, each, find) for each in (method, other))
    if not own or not others:
        return None
    differences = np.array(own) - np.array(others)
    half, _ = spread(differences[:, None])
    return float(differences.mean()), half


def judge(find: Find) -> dict[str, bool | None]:
    """Answer the protocol's two questions over all cells that are complete; None: none is."""
    answers: dict[str, bool | None] = {}
    for name, other in (("advised", "orthogonal"), ("ahead of AdamW", "adamw")):
        found = [compare(cell, "beside", other, find) for cell in CELLS]
        known = [each for each in found if each is not None]
        answers[name] = all(mean + half < 0 for mean, half in known) if known else None
    return answers


def write_page(find: Find) -> str:
    """Write the report in Markdown."""
    lines = [
        "# Votes on tokens",
        "",
        "Made by `python benchmarks/tokens` from its records "
        "([protocol](../../studies/tokens-protocol.md)).",
        "",
        "A GPT of 1.2 million parameters, 1.05 of them in the embedding and the output weights, on "
        "8,192 tokens; 4 workers.",
        "Test losses in nats a token, means of seeds 3, 4 and 5; differences with 95 % confidence "
        "intervals over these seeds. Lower is better.",
    ]
    for cell in CELLS:
        lines += ["", f"## {cell.title}", ""]
        lines += [
            "| method | loss | beside AdamW | beside orthogonalized votes on all |",
            "|---|---:|---:|---:|",
        ]
        for method in METHODS:
            losses = find_losses(cell, method, find)
            loss = f"{fmean(losses):.3f}" if losses else "open"
            others = [
                _tell(compare(cell, method, each, find), method == each)
                for each in ("adamw", "orthogonal")
            ]
            lines.append(f"| {METHODS[method]} | {loss} | {others[0]} | {others[1]} |")
    answers = {True: "yes", False: "no", None: "open"}
    found = judge(find)
    lines += [
        "",
        "## Answers",
        "",
        "| question | answer |",
        "|---|---|",
        *(
            f"| {question}, in each complete cell? | {answers[found[key]]} |"
            for key, question in ASKED
        ),
        "",
        "## Tuning",
        "",
        "Validation losses of seed 1, 300 steps, 256 tokens a worker and step. The chosen rates "
        "are bold.",
        "",
        "| run | loss |",
        "|---|---:|",
    ]
    chosen = [choose(method, find) for method in METHODS]
    for run in TUNING:
        record = find(run.name)
        said = "open" if record is None else f"{record['loss']:.4f}"
        bold = "**" * (run in chosen)
        lines.append(f"| {describe(run)} | {bold}{said}{bold} |")
    return "\n".join(lines) + "\n"


def describe(run: Run) -> str:
    """Describe a run of tuning."""
    beside = f", AdamW at {run.beside_lr:g} for {' and '.join(run.beside)}" if run.beside else ""
    ternary = ", ternary votes on the embedding" * run.ternary
    head = f", output weights x {run.head:g}" if run.head != 1 else ""
    return f"{run.method} at {run.lr:g}, embedding x {run.embedding:g}{head}{beside}{ternary}"


def _tell(found: tuple[float, float] | None, is_itself: bool) -> str:
    if is_itself:
        return ""
    if found is None:
        return "open"
    mean, half = found
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


TUNING = (
    *(Run("adamw", 4e-3, embedding=share) for share in (1, 4, 16, 64)),
    *(Run("orthogonal", 4e-3, embedding=share, beside=BESIDE) for share in (4, 16, 64)),
    *(Run("muon", 4e-3, embedding=share) for share in (4, 16, 64)),
    *(Run("orthogonal", 4e-3, embedding=share) for share in (16, 64)),
    *(Run("adamw", lr, embedding=16) for lr in (8e-3, 2e-3, 16e-3)),
    Run("adamw", 8e-3, embedding=64),
    *(Run("muon", 8e-3, embedding=share) for share in (16, 64)),
    *(Run("orthogonal", lr, embedding=16, beside=BESIDE, beside_lr=8e-3) for lr in (8e-3, 2e-3)),
    Run("orthogonal", 4e-3, embedding=16, beside=BESIDE, beside_lr=16e-3),
    Run("orthogonal", 4e-3, embedding=4, beside=BESIDE, beside_lr=8e-3),
    *(Run("orthogonal", lr, embedding=16, beside=BESIDE) for lr in (8e-3, 2e-3)),
    *(Run("orthogonal", 4e-3, embedding=16, beside=BESIDE, beside_lr=lr) for lr in (8e-3, 2e-3)),
    *(Run(method, 4e-3, embedding=64, head=4) for method in ("adamw", "muon")),
    *(Run(method, 8e-3, embedding=32, head=2) for method in ("adamw", "muon")),
    Run("orthogonal", 8e-3, embedding=16),
    Run("orthogonal", 4e-3, embedding=4, beside=("head",)),
    Run("orthogonal", 4e-3, embedding=4, beside=("embedding",)),
    Run("adamw", 2e-3, embedding=4),
)
"""Runs of seed 1, for its validation loss."""
