"""The store of a crew is lost for good: members stop once they need it, and a new crew resumes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import distlion
from cluster import WorkerDiedError
from crews import (
    OPTIONS,
    STRUCK_AT,
    await_true,
    check_equal,
    host_store,
    is_halted,
    make_crew,
    make_model,
    start,
    train,
)
from distlion.crew import CrewLion
from distlion.errors import CrewError

pytestmark = pytest.mark.distributed

SAVED_AT, LEFT_AT, GOAL = 10, STRUCK_AT + 5, 30
NEVER = 1_000_000
STORE_WAIT_S = 2
# A store that is gone is noticed at once, and a silent one after 5 s; a busy machine has time.
KILLED_LIMIT_S, SILENT_LIMIT_S = 10.0, 25.0


def keep_store(control: Any) -> str:
    """Keep the store of the crew in a process of its own, which is struck from outside."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    control.set("pid", str(os.getpid()))
    control.set("port", str(store.port))
    control.wait(["over"])
    return "woken"


def lose_store(rank: int, size: int, port: int, how: signal.Signals, folder: str) -> Any:
    """The last process keeps the store; the first worker strikes it, and the second one leaves."""
    control = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    if rank == size - 1:
        return keep_store(control)
    pid, crew_port = int(control.get("pid")), int(control.get("port"))
    model = make_model(rank)
    limits = {"store_timeout_s": 5, "store_wait_s": STORE_WAIT_S}
    crew = make_crew(crew_port, min_workers=size - 1, **limits)
    digests: dict[int, bytes] = {}

    def act(optimizer: CrewLion) -> None:
        step = optimizer.committed_step
        is_due = step == SAVED_AT and step not in digests
        digests[step] = b"".join(bytes(param.detach().numpy()) for param in model.parameters())
        if is_due:
            scheduler = crew._membership.carried._carried["scheduler"]
            distlion.save_checkpoint(folder, model, optimizer, scheduler)  # type: ignore[arg-type]
        if rank == 0 and step == STRUCK_AT:
            control.set("struck_s", str(time.monotonic()))
            os.kill(pid, how)
            await_true(lambda: is_halted(pid))
        if rank == 1 and step == LEFT_AT:
            raise EOFError("it has no more data")

    try:
        options = OPTIONS["feedback"]
        train(crew, options, seed=rank, size=size - 1, goal=NEVER, each=act, model=model)
    except (CrewError, EOFError) as error:
        took_s = time.monotonic() - float(control.get("struck_s"))
        if control.add("ended", 1) == size - 1:
            control.set("over", "")
            if how == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
        return str(error), took_s, digests
    raise AssertionError("it came to its goal alone")


def resume(rank: int, size: int, port: int, folder: str) -> dict[str, Any]:
    model, crew = make_model(rank + 10), make_crew(port, min_workers=size)
    loaded: list[tuple[int, bytes]] = []

    def load(optimizer: CrewLion) -> None:
        if not loaded:
            scheduler = crew._membership.carried._carried["scheduler"]
            found = distlion.load_checkpoint(folder, model, optimizer, scheduler)  # type: ignore[arg-type]
            digest = b"".join(bytes(param.detach().numpy()) for param in model.parameters())
            loaded.append((found.step, digest))

    options = OPTIONS["feedback"]
    result = train(crew, options, seed=rank, size=size, goal=GOAL, each=load, model=model)
    return {**result, "loaded": loaded[0]}


@pytest.mark.parametrize(
    ("how", "limit_s"),
    [
        (signal.SIGKILL, KILLED_LIMIT_S),
        pytest.param(signal.SIGSTOP, SILENT_LIMIT_S, marks=pytest.mark.slow),
    ],
    ids=["killed", "silent"],
)
def test_who_needs_a_store_that_is_lost_stops_and_a_new_crew_resumes(
    tmp_path: Path, how: signal.Signals, limit_s: float
) -> None:
    control, folder = host_store(), str(tmp_path / "saved")
    *ended, kept = start(lose_store, 3, control.port, how, folder, may_die=True)
    assert isinstance(kept, WorkerDiedError) if how == signal.SIGKILL else kept == "woken"
    before: dict[int, bytes] = {}
    assert "start it again and resume" in ended[0][0]
    for _, took_s, digests in ended:
        assert 0 < took_s < limit_s
        assert max(digests) >= LEFT_AT
        assert all(before.setdefault(step, digest) == digest for step, digest in digests.items())
    store = host_store()
    results = start(resume, 2, store.port, folder)
    check_equal(results, goal=GOAL)
    for result in results:
        assert result["loaded"] == (SAVED_AT, before[SAVED_AT])
        # As many workers do the same steps again: none was lost, and none is another one.
        for step in range(SAVED_AT + 1, STRUCK_AT + 1):
            assert result["digests"][step] == before[step]
