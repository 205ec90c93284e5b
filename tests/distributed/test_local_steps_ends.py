"""Processes that end while a late vote travels: they wait for it, and end with status 0."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forked_programs import Ended, Programs

pytestmark = pytest.mark.distributed

PROGRAM = """
import sys, torch, torch.distributed as dist, distlion

folder, rank, steps, reads_at, destroys = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
weight = torch.nn.Parameter(torch.ones(300_000))
inner = torch.optim.SGD([weight], lr=0.1)
optimizer = distlion.LocalSteps(inner, every=4, delay=2, timeouts=distlion.Timeouts(step_s=20))
for step in range(steps):
    if rank == 1 and step == reads_at:
        open(f"{folder}/end").read()  # until rank 0 is at the end of its program
    weight.grad = torch.ones_like(weight)
    optimizer.step()
if rank == 0:
    open(f"{folder}/end", "w").write("end")
if destroys:
    dist.destroy_process_group()
print("end of the program")
"""


def run(programs: Programs, folder: Path, steps: int, *more: int) -> list[Ended]:
    """Run two ranks, of which rank 1 does so many steps; return how they ended.

    Args:
        programs: What starts them.
        folder: Where they meet.
        steps: Of rank 1; rank 0 does 4, and begins a vote.
        more: At which step rank 1 waits for the end of rank 0's program; whether both destroy their
            process group at its end.
    """
    os.mkfifo(folder / "end")
    started = [
        programs.start(
            PROGRAM,
            folder,
            *map(str, (folder, rank, n_steps, *more)),
            GLOO_SOCKET_IFNAME="lo",
        )
        for rank, n_steps in enumerate((4, steps))
    ]
    return [program.end() for program in started]


@pytest.mark.parametrize("destroys", [0, 1])
def test_a_process_ends_after_its_late_vote(
    programs: Programs, tmp_path: Path, destroys: int
) -> None:
    for ended in run(programs, tmp_path, 4, 3, destroys):
        assert (ended.status, ended.text) == (0, "end of the program\n"), ended.errors
        assert "late vote" not in ended.errors


def test_a_late_vote_that_fails_at_the_end_is_logged(programs: Programs, tmp_path: Path) -> None:
    ended, other = run(programs, tmp_path, 3, 2, 0)  # rank 1 leaves without a vote
    assert (ended.status, ended.text) == (0, "end of the program\n"), ended.errors
    assert "a late vote has failed, and nobody took its outcome: PeerLostError" in ended.errors
    assert other.status == 0
