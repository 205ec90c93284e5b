"""Processes that live as long as they are well, and play one program after another."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distlion import faults
from fuzz.failures import INTERRUPTED
from fuzz.judge import DIED, HUNG, Outcome, absent, attempt
from fuzz.players import Rank, odd_defaults
from fuzz.program import MOST_WORKERS, Op, Setup

LIMIT_S = 45.0
"""Whoever has not answered after this time hangs: each wait of an optimizer is a quarter of it."""
FRESH_EVERY = 100
"""Programs after which processes are started anew: groups of torch keep their sockets."""

_context = multiprocessing.get_context("forkserver")
# Under pytest the server of tests/cluster.py runs already, and is used.
_context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "distlion"])


class Crew:
    """Three processes, of which two or three play a program.

    They are started when they are needed, and again after one of them died or hung.
    """

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="distlion-fuzz-")
        self._launches = self._programs = 0
        self._n_workers, self._shared = 0, Path()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self._folder.cleanup()

    def _start(self) -> None:
        self._launches += 1
        rendezvous = os.path.join(self._folder.name, f"rendezvous-{self._launches}")
        for rank in range(MOST_WORKERS):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_work, args=(rank, rendezvous, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def begin(self, setup: Setup, folder: Path) -> list[Outcome]:
        """Let all processes make a group, and those that play their optimizers."""
        self._programs += 1
        if self._programs % FRESH_EVERY == 0:
            self.stop()
        if not self._processes:
            self._start()
        self._n_workers, self._shared = setup.workers, folder
        return self._ask(range(MOST_WORKERS), (setup, folder))[: setup.workers]

    def play(self, op: Op) -> list[Outcome]:
        """Let all who play do an operation; an interrupt strikes before the others begin."""
        ranks = range(self._n_workers)
        if op.name != "interrupt":
            return self._ask(ranks, op)
        victim = op.args["victim"]
        self._connections[victim].send(op)
        self._await_interrupt(self._connections[victim])
        return self._ask(ranks, op, told=(victim,))

    def _await_interrupt(self, victim: Connection) -> None:
        """Wait until a rank has been interrupted, or has answered without that."""
        note, deadline = self._shared / INTERRUPTED, time.monotonic() + LIMIT_S
        while not note.exists() and not victim.poll() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _ask(self, ranks: Sequence[int], what: Any, told: Sequence[int] = ()) -> list[Outcome]:
        """Ask ranks at once and wait for their answers; end all where there is one without."""
        for rank in set(ranks) - set(told):
            self._connections[rank].send(what)
        answers, deadline = [], time.monotonic() + LIMIT_S
        for rank in ranks:
            connection = self._connections[rank]
            try:
                is_there = connection.poll(max(0.0, deadline - time.monotonic()))
                answers.append(connection.recv() if is_there else absent(HUNG))
            except (EOFError, ConnectionResetError):
                answers.append(absent(DIED))
        if any(answer.error in (DIED, HUNG) for answer in answers):
            self.stop()
        return answers


def _work(rank: int, rendezvous: str, connection: Connection) -> None:
    """Play what is asked for until nobody asks any more."""
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("distlion").setLevel(logging.CRITICAL + 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=MOST_WORKERS
    )
    gc.freeze()  # what was imported is no garbage, and takes long to look through
    player: Rank | None = None
    with contextlib.suppress(EOFError):
        while True:
            what = connection.recv()
            if isinstance(what, Op):
                assert player is not None
                connection.send(attempt(player, what))
                continue
            player = None
            faults.disarm_all()
            gc.collect()  # a scheduler and its optimizer hold each other, and connections with them
            player, outcome = _begin(rank, *what)
            connection.send(outcome)
    os._exit(0)


def _begin(rank: int, setup: Setup, folder: Path) -> tuple[Rank | None, Outcome]:
    well = replace(absent(""), error=None, is_dead=False)
    group = dist.new_group(list(range(setup.workers)))
    if rank >= setup.workers:
        return None, well
    try:
        assert isinstance(group, dist.ProcessGroup)
        with odd_defaults(setup):
            player = Rank(setup, folder, group)
        return player, replace(well, after=player.snapshots())
    except Exception as error:
        return None, replace(well, error=type(error).__name__, text=traceback.format_exc())
