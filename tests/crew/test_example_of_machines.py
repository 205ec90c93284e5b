"""The script of a crew of machines goes on under torchrun after a process was killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from crews import await_true, host_store

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "11_crew_of_machines.py"
N_BOXES, N_PROCESSES, STEPS = 2, 2, 400
LIMIT_S = 240


def start_box(port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start a machine's processes as the script says."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"),
        *("--nproc-per-node", str(N_PROCESSES), str(SCRIPT), "--store", f"localhost:{port}"),
        *("--steps", str(STEPS)),
    ]
    environment = {
        **os.environ,
        "DISTLION_CREW_SECRET": "of this test",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )


def list_processes(box: subprocess.Popen[bytes]) -> list[int]:
    """List the processes that torchrun has started."""
    return [
        int(each) for each in Path(f"/proc/{box.pid}/task/{box.pid}/children").read_text().split()
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are listed in /proc")
def test_a_machine_that_loses_a_process_comes_back(tmp_path: Path) -> None:
    store = host_store()
    logs = [tmp_path / f"box-{number}.log" for number in range(N_BOXES)]
    boxes = [start_box(store.port, log) for log in logs]
    try:
        await_true(lambda: "2 workers, at step 0" in logs[0].read_text(), limit_s=LIMIT_S)
        os.kill(list_processes(boxes[1])[-1], signal.SIGKILL)
        codes = [box.wait(LIMIT_S) for box in boxes]
    finally:
        for box in boxes:
            with suppress(ProcessLookupError):
                os.killpg(box.pid, signal.SIGKILL)
    texts = [log.read_text() for log in logs]
    assert codes == [0] * N_BOXES, texts
    assert re.search(r"left: worker \d+ .*; came: worker \d+", texts[0]), texts[0]
    endings = [re.findall(r"test accuracy (0\.\d+), with 2 machines", text) for text in texts]
    assert endings[0] == endings[1]
    assert len(endings[0]) == 1
