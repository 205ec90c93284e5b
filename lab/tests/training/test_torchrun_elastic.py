"""Under ``torchrun --nnodes 2:3`` a host is lost and another one comes; runs resume in between."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CONFIG = (
    '{"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": 1, '
    '"n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}'
)
QUICK = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=10"
TRAIN = {
    "--batch-size": 2,
    "--steps": 100_000,
    "--checkpoint-every": 100,
    "--eval-every": 100,
    "--exchange": "all-reduce",
    "--on-world-change": "mean",
}
EVALUATED = r"step [1-9]\d*00/100000 "


def find_free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Host:
    """torchrun on a host: its agent, in a session of its own, and below it a worker."""

    def __init__(self, folder, port, *, out):
        torchrun = shutil.which("torchrun", path=Path(sys.executable).parent)
        assert torchrun is not None
        command = [
            *(torchrun, "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=5"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"),
            f"--rdzv-conf=is_host={int(out == subprocess.PIPE)},{QUICK}",
            *("-m", "distlion", "train", "--model-config", str(folder / "config.json")),
            *("--run-dir", str(folder / "run"), "--resume"),
            *(str(part) for pair in TRAIN.items() for part in pair),
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        self.process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, text=True
        )
        self.said = []

    def read_until(self, pattern):
        """Read what it says, up to a line that has this; an end without it is a failure."""
        for line in self.process.stdout:
            self.said.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f"{pattern!r} is not in {self.said[-30:]}")

    def lose(self):
        """Kill the agent, then its worker."""
        workers = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        self.process.kill()
        self.process.wait()
        for worker in workers.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(worker), signal.SIGKILL)


def test_a_host_is_lost_and_another_one_comes(tmp_path):
    (tmp_path / "config.json").write_text(CONFIG)
    port = find_free_port()
    first = Host(tmp_path, port, out=subprocess.PIPE)
    hosts = [first, *(Host(tmp_path, port, out=subprocess.DEVNULL) for _ in range(2))]
    try:
        first.read_until("starting 3 workers")
        # Wherever they begin, there is a checkpoint by the second of these.
        first.read_until(EVALUATED)
        first.read_until(EVALUATED)
        hosts[2].lose()
        first.read_until("is gone")
        first.read_until("starting 2 workers")
        first.read_until("resumed from")
        hosts.append(Host(tmp_path, port, out=subprocess.DEVNULL))
        first.read_until("starting 3 workers")
        first.read_until("resumed from")
        # It trains on; the run itself is far longer than a newcomer needs to start.
        first.read_until("/100000")
        first.read_until("/100000")
    finally:
        for host in hosts:
            if host.process.poll() is None:
                host.lose()
