"""Measure the default level widths of QuantizedVote: which step follows global Lion most closely.

Four virtual workers train the default text model by the sign of their mean direction (global Lion).
At some steps, their directions are also voted on with p bits and every candidate width. The error
is the share of |mean direction| on elements where the vote's sign differs from that of the mean:
0 is global Lion, 0.5 is chance. Printed: for each norm and p, the width with the smallest error.

    python benchmarks/quantized_step.py [--steps 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from distlion.kernels import BlockVotes, Coefficients, Coins, Segment, choose_kernels
from distlion.layout import BLOCK_WORDS, fill_buckets, place_parameters
from distlion.votes import QuantizedVote
from distlion_lab.tasks.base import batch_loss
from distlion_lab.tasks.text import TextTask, Tokenizer

WORKERS = 4
BETAS = (0.9, 0.99)
LR = 1e-3
SAMPLED_STEPS = (30, 100, 200, 400)
COARSE = {"l1": range(-6, 2), "linf": range(-11, 0)}  # exponents of 2


def vote_sign(directions: Tensor, rule: QuantizedVote, step: int) -> Tensor:
    """Vote on (workers, n) directions: (n,) of +-1."""
    kernels = choose_kernels(directions.device)
    (bucket,) = fill_buckets(
        place_parameters(["c"], [directions.shape[1]]), [0], n_shards=1, bucket_elements=1 << 40
    )
    # betas of 0 and a momentum of 0 make the direction the gradient.
    hyper = Coefficients(0.0, 0.0, 0.0, 0.0)
    nothing = torch.zeros_like(directions[0])
    votes = []
    for rank, direction in enumerate(directions):
        out = torch.empty((bucket.n_blocks, rule.bits, BLOCK_WORDS), dtype=torch.int64)
        segment = Segment(bucket.slots[0], nothing, direction.contiguous(), nothing, hyper)
        rule.encode(kernels, [segment], Coins(0, step, rank), out=out)
        votes.append(out)
    reply = torch.empty((bucket.n_blocks, 1, BLOCK_WORDS), dtype=torch.int64)
    present = torch.ones((len(votes), 1), dtype=torch.bool)
    cast = BlockVotes(torch.stack(votes), present, bucket, 0)
    rule.count(kernels, cast, Coins(0, step, 0), out=reply)
    bits = torch.zeros_like(nothing)
    moved = Segment(bucket.slots[0], bits, None, nothing, Coefficients(0, 0, 1.0, 0))
    kernels.commit([moved], [1], reply, reply_format=rule.reply_format, rounding=None)
    return -bits


def sample_directions(steps: int) -> list[tuple[int, list[Tensor]]]:
    """Train by global Lion; return (step, one (workers, n) tensor for each parameter)."""
    task = TextTask(data=None, tokenizer=Tokenizer.BYTE, model_config=None, batch_size=8)
    model = task.build_model(seed=0)
    params = [param for param in model.parameters() if param.requires_grad]
    momenta = [torch.zeros(WORKERS, param.numel()) for param in params]
    samples = []
    for step in range(steps + 1):
        grads: list[list[Tensor]] = []
        for rank in range(WORKERS):
            batch = task.training_batch(seed=0, step=step, rank=rank, world_size=WORKERS)
            batch_loss(model, batch).backward()
            grads.append([param.grad.detach().flatten().clone() for param in params])
            model.zero_grad()
        stacked = [torch.stack(rows) for rows in zip(*grads, strict=True)]
        directions = [
            BETAS[0] * m + (1 - BETAS[0]) * g for m, g in zip(momenta, stacked, strict=True)
        ]
        if step in SAMPLED_STEPS:
            samples.append((step, directions))
        for param, m, g, c in zip(params, momenta, stacked, directions, strict=True):
            param.data -= LR * (c.mean(0).sign().view(param.shape) + 0.1 * param.data)
            m.mul_(BETAS[1]).add_((1 - BETAS[1]) * g)
    return samples


def error_of(samples: list[tuple[int, list[Tensor]]], rule: QuantizedVote) -> float:
    """Weighted share of wrong signs."""
    wrong = total = 0.0
    for step, directions in samples:
        for c in directions:
            mean = c.double().mean(0)
            differs = vote_sign(c, rule, step).double() * mean < 0
            wrong += float(mean.abs()[differs].sum())
            total += float(mean.abs().sum())
    return wrong / total


def measure(samples: list[tuple[int, list[Tensor]]]) -> dict[str, dict[int, dict[float, float]]]:
    """Scan widths by factors of 2, then around the best: norm, bits, width, error."""
    errors: dict[str, dict[int, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for norm, exponents in COARSE.items():
        for bits in range(1, 9):
            found = errors[norm][bits]
            for width in [2.0**k for k in exponents] if bits > 1 else [1.0]:
                found[width] = error_of(samples, QuantizedVote(bits=bits, norm=norm, step=width))
            for factor in (2**0.5, 2**0.25) if bits > 1 else ():
                best = min(found, key=found.__getitem__)
                for width in (best * factor, best / factor):
                    found[width] = error_of(samples, QuantizedVote(bits, norm, width))
            best = min(found, key=found.__getitem__)
            print(f"{norm} p={bits}: width {best:.5f}, error {found[best]:.5f}", flush=True)
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    errors = measure(sample_directions(args.steps))
    if args.json:
        conditions = {
            "torch": torch.__version__,
            "machine": platform.machine(),
            "steps": args.steps,
        }
        args.json.write_text(json.dumps({"conditions": conditions, "errors": errors}, indent=1))


if __name__ == "__main__":
    main()
