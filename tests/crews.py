"""Crews of processes that train a small model; what must hold of them in the end."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import distlion
from cluster import run_workers
from distlion.crew import CrewLion
from distlion.crew.store import ALIVE_S
from distlion.wire import watch

GOAL = 30
STRUCK_AT = 20

OPTIONS: dict[str, dict[str, Any]] = {
    "majority": {"exchange": distlion.AllReduce()},
    "feedback": {"exchange": distlion.AllReduce(), "aggregation": distlion.FeedbackVote()},
    "server": {"exchange": distlion.ParameterServer(), "aggregation": distlion.Average()},
    "overlap": {"exchange": distlion.AllGather(), "overlap": True, "bucket_elements": 600},
    "retry": {
        "exchange": distlion.AllReduce(),
        "clip_norm": distlion.ClipNorm(0.5, scope="global"),
        "retry": True,
    },
}

start = partial(run_workers, process_group=False)


def host_store() -> Any:
    """Keep a store in this process, which outlives all workers."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )


def make_crew(port: int, *, host: str = "127.0.0.1", **options: Any) -> distlion.Crew:
    # On a busy machine a store may be starved for longer than the default.
    limits = {"wait_timeout_s": 50, "store_timeout_s": 20, "silence_s": 20}
    options = {**limits, "secret": "of this test", **options}
    if multiprocessing.parent_process() is not None:  # the test's own process keeps its limits
        watch.SETTLE_S = 30.0  # on a busy machine too, all learn who was lost
    crew = distlion.Crew(f"{host}:{port}", **options)
    # Not twice that long where workers begin anew beside members that have fallen silent.
    crew._membership.rendezvous._alive_s = ALIVE_S
    return crew


def await_members(crew: distlion.Crew, size: int) -> None:
    """Wait until the crew has so many members, or has to form anew for more."""
    while crew.size < size and not crew.wants_change:
        crew._membership.ended.wait(0.05)


def await_true(holds: Callable[[], bool], *, limit_s: float = 30) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: It does not, for too long.
    """
    deadline_s = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"it does not hold after {limit_s:g} s")
        time.sleep(0.01)


def is_halted(pid: int) -> bool:
    """Return whether a process on this machine is stopped, or has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in "TZX"


def stop_self(store: Any) -> None:
    """Stop this process, until another one wakes it."""
    store.set("stopped", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def wake(store: Any) -> None:
    """Wake the process that has stopped itself."""
    pid = int(store.get("stopped"))
    await_true(lambda: is_halted(pid))
    os.kill(pid, signal.SIGCONT)


def make_model(seed: int) -> nn.Module:
    """Make the model of a worker."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))


def draw_loss(model: nn.Module, step: int, member: int) -> Tensor:
    """Return the loss of a member's batch in a step."""
    generator = torch.Generator().manual_seed(1000 * step + member)
    inputs = torch.randn(4, 8, generator=generator)
    return nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))


def train(
    crew: distlion.Crew,
    options: dict[str, Any],
    *,
    seed: int,
    size: int = 3,
    goal: int = GOAL,
    each: Callable[[CrewLion], None] = lambda optimizer: None,
    model: nn.Module | None = None,
    admits: bool = False,
) -> dict[str, Any]:
    """Train to the goal; return digests and epochs by step, and what there is at the end.

    Args:
        crew: The crew.
        options: Of the optimizer.
        seed: Of the weights, which differ: those of the most advanced worker count.
        size: Members with whom the second step is taken: some may be slow to start.
        goal: Steps.
        each: Called after each call of ``step()``, and before the first one.
        model: What to train; None makes one.
        admits: Let newcomers in before each backward pass.
    """
    model = make_model(seed) if model is None else model
    digests, epochs, said, n_given_up = {}, {}, collect_log(), 0
    with crew:
        settings = {
            "lr": 1e-2,
            "timeouts": distlion.Timeouts(step_s=4),
            "replicas": distlion.Replicas(check_every=5),
            **options,
        }
        optimizer = crew.optimizer(model.named_parameters(), **settings)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        crew.carry(scheduler=scheduler)
        each(optimizer)
        while optimizer.committed_step < goal:
            if admits:
                crew.admit()
            draw_loss(model, optimizer.committed_step, crew.id).backward()
            if optimizer.step():
                scheduler.step()
                step = optimizer.committed_step
                epochs[step] = (crew.epoch.number, crew.epoch.roster.ids)
                digests[step] = b"".join(bytes(p.detach().numpy()) for p in model.parameters())
            else:
                n_given_up += 1
            optimizer.zero_grad()
            await_members(crew, size if optimizer.committed_step == 1 else 0)
            each(optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    momenta = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
    return {
        "digests": digests,
        "epochs": epochs,
        "rates": rates,
        "id": crew.id,
        "momenta": momenta,
        "traffic": asdict(optimizer.traffic),
        "given_up": n_given_up,
        "said": said,
        "formed": [line for line in said if line.startswith("epoch ")],
    }


def collect_log() -> list[str]:
    """Return the messages of the library in this process from now on; the list grows."""
    said: list[str] = []
    logger, handler = logging.getLogger("distlion"), logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return said


def list_reasons(result: dict[str, Any]) -> set[str]:
    """Return why a worker has joined while others waited, as it has said."""
    found = [line.partition(" joins while others wait: ") for line in result["said"]]
    return {reason for _, there, reason in found if there}


def check_equal(results: list[dict[str, Any]], *, goal: int = GOAL) -> None:
    """Check that no step has two outcomes, and that all came to the goal."""
    seen: dict[int, dict[bytes, list[Any]]] = {}
    for result in results:
        assert max(result["digests"]) == goal
        for step, digest in result["digests"].items():
            seen.setdefault(step, {}).setdefault(digest, []).append(result["epochs"][step])
    twice = {step: list(found.values()) for step, found in seen.items() if len(found) > 1}
    assert not twice
    assert len({tuple(result["rates"]) for result in results}) == 1
    rosters: dict[int, set[tuple[int, ...]]] = {}
    for result in results:
        for number, ids in result["epochs"].values():
            rosters.setdefault(number, set()).add(ids)
    assert all(len(found) == 1 for found in rosters.values())
