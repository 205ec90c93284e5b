"""The example of images trains on two machines, as torchrun sees them, and its workers save alike.

Each machine is an agent of torchrun with one process: Lightning compares the number of machines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from endings import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "10_images.py"
STEPS = 6


def test_two_machines_train_validate_and_save_alike(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    last = tmp_path / "runs" / "votes" / "last.ckpt"
    last.parent.mkdir(parents=True)
    last.write_bytes(b"of an earlier run")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launcher += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    script = [str(SCRIPT), "--num-nodes=2", "--width=4", "--pictures=192", f"--steps={STEPS}"]
    machines = [
        subprocess.Popen(
            [*launcher, f"--node-rank={rank}", *script, f"--folder={tmp_path / 'runs'}"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [machine.communicate(timeout=240) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], ended
    (printed, errors), (_, more_errors) = ended
    assert re.search(rf"accuracy [01]\.\d+ after {STEPS} steps", printed)
    # A bit up and a bit down, half of them to oneself, and headers.
    (found,) = re.findall(r"([\d,]+) parameters, ([\d,]+) bytes sent", printed)
    n_parameters, n_bytes = (int(each.replace(",", "")) for each in found)
    assert n_parameters / 8 < n_bytes < 3 * n_parameters / 8
    assert "DifferingModelsWarning" not in errors + more_errors
    assert last.read_bytes() != b"of an earlier run"
    assert not (last.parent / "last-v1.ckpt").exists()  # --resume reads last.ckpt
