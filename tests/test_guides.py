"""Whole scripts of the guides, run by two workers, before the change that they show and after."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from forked_programs import Programs
from test_docs import Block, apply_diff, by_place, diff_blocks, python_blocks
from tiers import in_tiers

pytestmark = pytest.mark.distributed

N = 2
STOPPED_AT = 3
PREEMPTED = f"""
import os, signal, distlion
commit = distlion.DistributedLion.step
def step(optimizer):
    if os.environ["RANK"] == "1" and optimizer.committed_step == {STOPPED_AT}:
        os.kill(os.getpid(), signal.SIGTERM)  # the host of rank 1 alone is taken away
    return commit(optimizer)
distlion.DistributedLion.step = step
"""
"""What stands before a script to let SIGTERM come to one of its workers, in a step."""

BLOCKS = [block for block in diff_blocks() if "run" in block.info]


def run_workers(programs: Programs, code: str, folder: Path) -> list[str]:
    """Run a script as torchrun would, and return what each worker prints."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = [
        programs.start(
            code,
            folder,
            RANK=str(rank),
            WORLD_SIZE=str(N),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(store.port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
            OMP_NUM_THREADS="1",
        )
        for rank in range(N)
    ]
    ended = [program.end() for program in started]
    for each in ended:
        assert each.status == 0, each.errors
    return [each.text for each in ended]


def test_there_is_a_whole_script() -> None:
    assert BLOCKS


@pytest.mark.parametrize("side", in_tiers(["before", "after"], lambda side: side == "after"))
@pytest.mark.parametrize("block", BLOCKS, ids=by_place)
def test_whole_script_runs_and_evaluates_alike_on_all_ranks(
    block: Block, side: str, programs: Programs, tmp_path: Path
) -> None:
    before, after = apply_diff(block)
    printed = run_workers(programs, before if side == "before" else after, tmp_path)
    losses = [re.findall(r"validation loss (\S+)", each) for each in printed]
    assert losses[0] == losses[1] != []
    assert len(re.findall(r"norm of the gradients [\d.]+", printed[0])) == 2
    assert any(tmp_path.iterdir()), "nothing was saved"


def test_all_workers_save_and_leave_at_one_step_once_one_of_them_was_asked_to(
    programs: Programs, tmp_path: Path
) -> None:
    (block,) = [block for block in python_blocks() if "two-workers" in block.info]
    printed = run_workers(programs, PREEMPTED + block.code, tmp_path)
    assert [each.strip() for each in printed] == [f"left after step {STOPPED_AT + 1}"] * N
    assert (tmp_path / "checkpoints" / "latest").exists()


ALIKE = """
import hashlib
parts = [param.detach().numpy().tobytes() for param in model.parameters()]
print("parameters", hashlib.sha256(b"".join(parts)).hexdigest())
"""


def test_votes_beside_averaged_gradients_leave_replicas_alike(
    programs: Programs, tmp_path: Path
) -> None:
    (block,) = [block for block in python_blocks() if "ranks" in block.info]
    printed = run_workers(programs, block.code + ALIKE, tmp_path)
    assert printed[0] == printed[1]
    assert printed[0].startswith("parameters ")
