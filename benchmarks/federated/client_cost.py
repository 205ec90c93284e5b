"""Seconds of a client's vote beside those of its local steps, for a network without data."""

from __future__ import annotations

import statistics
import time
from typing import Any

import study_path  # noqa: F401
import torch
import torch.nn.functional as F
from design import BATCH, LOCAL_STEPS, METHODS, NETWORK
from images import build_network
from torch import nn

import distlion_flower
from training import AveragedClients

CLIENTS, PART, ROUNDS = 1000, 50, 2


def train_on_noise(model: nn.Module, generator: torch.Generator) -> None:
    """Do local steps of the study's size on random images."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(LOCAL_STEPS):
        images = torch.randn(BATCH, 3, 32, 32, generator=generator)
        inputs = images.contiguous(memory_format=torch.channels_last)
        loss = F.cross_entropy(model(inputs), torch.arange(BATCH) % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def make(method: str, model: nn.Module) -> Any:
    """Return the server with its clients."""
    if method == "fedavg":
        return AveragedClients(
            model.named_parameters(), clients=CLIENTS, lr=lambda _: 0.01, momentum=0.9, seed=0
        )
    return distlion_flower.VirtualClients(
        model.named_parameters(), clients=CLIENTS, rule=method, lr=0.01, seed=0
    )


def measure() -> dict[str, dict[str, float]]:
    """Measure all methods, one after the other: milliseconds of a core for a client, medians."""
    found = {}
    for method in METHODS:
        model, generator = build_network(**NETWORK, seed=0), torch.Generator().manual_seed(0)
        clients = make(method, model)
        local_s, vote_s, count_s = [], [], []
        for _ in range(ROUNDS):
            for client in clients.draw(PART):
                began = time.process_time()
                train_on_noise(model, generator)
                trained = time.process_time()
                clients.collect(client, 1)
                local_s.append(trained - began)
                vote_s.append(time.process_time() - trained)
            began = time.process_time()
            clients.step()
            count_s.append((time.process_time() - began) / PART)
        found[method] = {
            "local_ms": 1e3 * statistics.median(local_s),
            "vote_ms": 1e3 * statistics.median(vote_s),
            "count_ms": 1e3 * statistics.median(count_s),
            "payload_bytes": clients.payload_bytes,
        }
    return found


def describe(found: dict[str, dict[str, float]]) -> str:
    """Return the table."""
    n_steps = f"{LOCAL_STEPS} local steps of {BATCH} images"
    lines = [
        "# What a client costs in a simulation",
        "",
        f"{CLIENTS:,} clients, {PART} in a round, {ROUNDS} rounds, one thread; a client does "
        f"{n_steps}. Milliseconds of a core, medians of one process. The share depends less on the "
        "machine than the milliseconds.",
        "",
        "| method | local steps, ms | vote, ms | server, ms a client | share of local steps | "
        "bytes up |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for method, row in found.items():
        share = (row["vote_ms"] + row["count_ms"]) / row["local_ms"]
        lines.append(
            f"| {method} | {row['local_ms']:.0f} | {row['vote_ms']:.2f} | {row['count_ms']:.2f} | "
            f"{share:.1%} | {row['payload_bytes']:,} |"
        )
    return "\n".join([*lines, ""])
