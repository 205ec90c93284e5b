"""Draw what explains a vote and a crew: one weight matrix, the bytes of a step, lost workers.

python benchmarks/pictures.py      # results/vote.png, bytes.png and crew_timeline.png

The first one trains a small network for some steps by ``VirtualCluster`` and shows what its next
vote is made of. Nothing in the first two is timed; the third one is drawn from crew_timeline.json.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor, nn

import distlion

RESULTS = Path(__file__).resolve().parent / "results"
WORKERS, STEPS, BETA1, SEED = 4, 30, 0.9, 3
BLUE, ORANGE, GREY = "#3b6ea8", "#d9541e", "#8d96a3"
RED, GREEN = "#b3121d", "#1a6b33"
SIGNS = ListedColormap([BLUE, ORANGE])
PARAMETERS = 124e6
WIDTH = 4.8
"""Inches. On a phone letters of the usual size are read then."""
SHOWN = (6, 8)
"""Rows and columns of the matrix, so that each count is a number that is read."""
WINDOW_S = 0.5
"""In which steps are counted."""


def sample_batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    """Return inputs (16, 12) and targets (16, 8) of a fixed nonlinear function, with noise."""
    generator = torch.Generator().manual_seed(1000 * step + worker)
    teacher = torch.Generator().manual_seed(SEED)
    weight = torch.randn(12, 8, generator=teacher)
    inputs = torch.randn(16, 12, generator=generator)
    noise = torch.randn(16, 8, generator=generator)
    return inputs, torch.tanh(inputs @ weight) + 0.5 * noise


def find_directions() -> Tensor:
    """Return the directions (WORKERS, 8, 12) that the workers would vote on next."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 8))
    cluster = distlion.VirtualCluster(model.named_parameters(), workers=WORKERS, lr=5e-3)
    matrix = model[0].weight
    for step in range(STEPS + 1):
        found = []
        for worker in range(WORKERS):
            inputs, targets = sample_batch(worker, step)
            model.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            momentum = cluster.state[matrix]["exp_avg"][worker]
            found.append(BETA1 * momentum + (1 - BETA1) * matrix.grad)
            if step < STEPS:
                cluster.collect(worker)
        if step < STEPS:
            cluster.step()
    return torch.stack(found).detach()


def draw_vote(directions: Tensor) -> Figure:
    """Draw the directions of all workers, their signs, the sum of the signs, and the majority."""
    directions = directions[:, : SHOWN[0], : SHOWN[1]]
    signs = directions.sign()
    total = signs.sum(0)
    figure = Figure(figsize=(WIDTH, 4.7), dpi=160, layout="constrained")
    grid = figure.add_gridspec(3, WORKERS, height_ratios=(1, 1, 2.1))
    half = WORKERS // 2
    most = float(directions.abs().max())
    for worker in range(WORKERS):
        top, below = (figure.add_subplot(grid[row, worker]) for row in range(2))
        top.imshow(directions[worker], cmap="RdBu_r", vmin=-most, vmax=most)
        top.set_title(f"worker {worker}", fontsize="medium")
        below.imshow(signs[worker], cmap=SIGNS, vmin=-1, vmax=1)
        if worker == 0:
            top.set_ylabel("1. direction,\n32 bits")
            below.set_ylabel("2. sign,\n1 bit")
    counted = figure.add_subplot(grid[2, :half])
    counted.imshow(total, cmap="RdBu_r", vmin=-WORKERS, vmax=WORKERS)
    for (row, column), votes in np.ndenumerate(total.int().numpy()):
        color = "white" if abs(votes) == WORKERS else "#3f4650"
        text = f"{votes:+d}" if votes else "0"
        counted.text(column, row, text, ha="center", va="center", color=color)
    counted.set_title("3. votes\nare added", fontsize="medium")
    decided = figure.add_subplot(grid[2, half:])
    ties = total == 0
    decided.imshow(np.ma.masked_array(total.sign(), ties), cmap=SIGNS, vmin=-1, vmax=1)
    for row, column in ties.nonzero().tolist():
        decided.text(column, row, "?", ha="center", va="center", color="#3f4650")
    decided.set_title("4. the majority\ncomes back, 1 bit", fontsize="medium")
    kinds = {"+1, up": ORANGE, "-1, down": BLUE, "?, a tie: a random bit": "white"}
    patches = [Patch(facecolor=color, edgecolor="0.4") for color in kinds.values()]
    figure.legend(patches, kinds.keys(), loc="outside lower center", ncols=3, columnspacing=1)
    for each in figure.axes:
        each.set_xticks([])
        each.set_yticks([])
    return figure


def list_bytes(workers: int) -> dict[str, float]:
    """Return the bits that a worker sends per parameter and step, by method, from docs/compare.md.

    Args:
        workers: Number of workers.
    """
    share = (workers - 1) / workers
    return {
        "DDP, fp32": 64 * share,
        "DDP, sent in fp16": 32 * share,
        "DiLoCo, every 8 steps": 64 * share / 8,
        "votes with feedback,\n2 bits": 3 * share,
        "votes": 2 * share,
        "votes every 8 steps": 2 * share / 8,
    }


def draw_bytes(workers: int = 4) -> Figure:
    """Draw the megabytes that a worker sends in a step."""
    figure = Figure(figsize=(WIDTH, 3.4), dpi=160, layout="constrained")
    axes = figure.subplots()
    methods = list_bytes(workers)
    for row, (name, bits) in enumerate(reversed(methods.items())):
        megabytes = bits * PARAMETERS / 8e6
        color = ORANGE if name.startswith("votes") else GREY
        axes.barh(row, megabytes, color=color, height=0.72)
        axes.text(megabytes, row, f"  {megabytes:,.3g} MB", va="center")
    axes.set_yticks(range(len(methods)), list(reversed(methods)))
    axes.set_xlim(0, 1000)
    size = f"{PARAMETERS / 1e6:.0f} million parameters, {workers} workers"
    figure.supxlabel(
        f"megabytes that a worker sends in a step,\ncomputed; {size}", fontsize="medium"
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def list_marks(
    events: list[dict[str, Any]], members: list[tuple[float, int]]
) -> list[tuple[float, str, str]]:
    """Return moment, words and color of what happens to workers.

    Args:
        events: What is done to them.
        members: How many vote, and since when.
    """
    marks = []
    for event in events:
        worker = f"worker {event['worker']}"
        if event["kind"] == "stop":
            marks.append((event["time_s"], f"{worker} is frozen", BLUE))
            marks.append((event["woken_s"], f"{worker} goes on", GREEN))
        elif event["kind"] == "kill":
            marks.append((event["time_s"], f"{worker} is killed", RED))
        else:
            marks.append((event["time_s"], f"{worker} is started", GREY))
            more = [
                since_s
                for (_, before), (since_s, now) in pairwise(members)
                if now > before and since_s > event["time_s"]
            ]
            marks += [(since_s, f"{worker} votes", GREEN) for since_s in more[:1]]
    return marks


def draw_timeline(record: dict[str, Any]) -> Figure:
    """Draw a crew's steps a second, and its members, over time."""
    moments_s = np.array(record["step_s"])
    end_s = moments_s[-1]
    edges_s = np.arange(0.0, end_s, WINDOW_S)
    rates = np.histogram(moments_s, edges_s)[0] / WINDOW_S
    figure = Figure(figsize=(WIDTH, 5.0), dpi=160, layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    top.stairs(rates, edges_s, fill=True, color=ORANGE, alpha=0.35)
    top.stairs(rates, edges_s, color=ORANGE)
    top.set_ylabel("steps a second")
    most = float(rates.max())
    top.set_ylim(0, 2.0 * most)
    top.set_yticks(range(0, int(most) + 1, 5))
    since_s, counts = zip(*record["members"], strict=True)
    below.stairs(counts, [*since_s, end_s], fill=True, color=GREY, alpha=0.5, baseline=0)
    below.set_ylabel("members\nthat vote")
    below.set_yticks(range(max(counts) + 1))
    below.set_xlabel("seconds")
    for moment_s, words, color in list_marks(record["events"], record["members"]):
        for axes in (top, below):
            axes.axvline(moment_s, color=color, linewidth=1.2)
        top.text(moment_s + 0.4, 1.97 * most, words, rotation=90, va="top", color=color)
    for axes in (top, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, end_s)
    return figure


if __name__ == "__main__":
    draw_vote(find_directions()).savefig(RESULTS / "vote.png")
    draw_bytes().savefig(RESULTS / "bytes.png")
    timeline = json.loads((RESULTS / "crew_timeline.json").read_text())
    draw_timeline(timeline).savefig(RESULTS / "crew_timeline.png")
