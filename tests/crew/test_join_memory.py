"""The memory of a donor and of its newcomer, at the size of a small language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distlion
from crews import host_store, make_crew, start
from distlion.crew import side_link
from distlion.crew.catch_up import Newcomer
from distlion.crew.replies import Replica, StepReply

N_ELEMENTS = 125_000_000
PARAMETERS_BYTES = 4 * N_ELEMENTS
REPLAY_STEPS, FILLED = 8, 6
REPLY_BYTES = N_ELEMENTS / 8
SLACK_BYTES = 200e6
"""For pieces, frames, threads and the buffers of another epoch: under half of all parameters."""
BEGUN, MEMBERS = 3, 2


def read_most() -> int:
    """Read the most memory that this process has had since ``forget_most``, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("VmHWM:")[1].split()[0])


def forget_most() -> None:
    """Let the most memory begin anew from what this process has now."""
    Path("/proc/self/clear_refs").write_text("5")


def replay_late(store: Any) -> None:
    """Let this process, once it has all pieces, replay nothing before its donor holds replies.

    The members wait for it then: at this size they may train faster than it replays.
    """
    replay, is_ready = Replica.replay, Newcomer.is_ready

    def wait(replica: Replica, reply: StepReply) -> None:
        if replica.is_complete:
            store.wait(["filled"])
        replay(replica, reply)

    def tell(newcomer: Newcomer, donor_trains: bool) -> bool:
        found = is_ready(newcomer, donor_trains)
        if found:
            store.set("ready", "")
        return found

    Replica.replay = wait  # type: ignore[method-assign]
    Newcomer.is_ready = tell  # type: ignore[method-assign]


def vote_on_much(rank: int, size: int, port: int) -> dict[str, Any]:
    """Vote on one large parameter, whose gradient stays, until all have taken two steps."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    torch.manual_seed(rank)
    side_link.SILENT_S = 300.0  # the newcomer is late on purpose
    if rank == MEMBERS:
        store.wait(["come"])
        replay_late(store)
    param = nn.Parameter(torch.randn(N_ELEMENTS))
    param.grad = torch.randn_like(param)
    crew = make_crew(port, min_workers=MEMBERS, max_workers=size, replay_steps=REPLAY_STEPS)
    before, held, goal = 0, 0, 1 << 60
    with crew:
        timeouts = distlion.Timeouts(step_s=60)
        optimizer = crew.optimizer([("weight", param)], lr=1e-4, timeouts=timeouts)
        while optimizer.committed_step < goal:
            if crew.admit():
                continue
            optimizer.step()
            if crew.size == size and goal == 1 << 60:
                goal = optimizer.committed_step + 2
            held = max([held, *(len(feed._waiting) for feed in optimizer._donor._feeds)])
            if held >= FILLED:
                store.set("filled", "")
            if store.check(["filled"]):
                store.wait(["ready"])
            if optimizer.committed_step == BEGUN - 1:
                forget_most()
            if optimizer.committed_step == BEGUN:
                before = read_most()
                store.set("come", "")
    return {"before": before, "most": read_most(), "held": held}


@pytest.mark.slow
def test_a_donor_adds_its_replies_and_a_newcomer_its_parameters_once_more() -> None:
    store = host_store()
    *members, newcomer = start(vote_on_much, MEMBERS + 1, store.port, timeout_s=300)
    (donor,) = [each for each in members if each["held"]]
    assert donor["held"] >= FILLED
    grown = donor["most"] - donor["before"]
    assert FILLED * REPLY_BYTES < grown < (REPLAY_STEPS + 2) * REPLY_BYTES + SLACK_BYTES
    # The parameter, its gradient, its momentum, and the parameter as it was.
    assert newcomer["most"] < 4 * PARAMETERS_BYTES + 4 * REPLY_BYTES + 3 * SLACK_BYTES
