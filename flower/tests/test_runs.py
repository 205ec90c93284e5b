"""The example under `flwr run`: in Flower's simulation, and with a SuperLink and two SuperNodes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is tested in an environment of its own")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flower"
LIMIT_S = 240
pytestmark = pytest.mark.slow


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_environment(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def running(command: list[str], home: Path, name: str) -> Iterator[None]:
    """Run a process that has a log of its own; stop it, and what it started, at the end."""
    with open(home / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            command,
            env=make_environment(home),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_for(port: int) -> None:
    """Wait until a SuperLink answers."""
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no SuperLink on port {port}")


def start_superlink(stack: ExitStack, home: Path, *options: str) -> int:
    port = find_port()
    command = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--disable-runtime-dependency-installation", *options]
    stack.enter_context(running(command, home, "superlink"))
    wait_for(port)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        "insecure = true\n"
    )
    return port


def run_example(home: Path, config: str, *options: str) -> dict[str, Any]:
    """Run the example by `flwr run`; return what its server writes."""
    app, written = home / "app", home / "result.json"
    shutil.copytree(EXAMPLE, app, ignore=shutil.ignore_patterns("__pycache__"))
    command = ["flwr", "run", str(app), "here", "--stream", *options]
    command += ["--run-config", f'{config} result="{written}"']
    finished = subprocess.run(
        command,
        env=make_environment(home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    log = (home / "superlink.log").read_text()
    assert written.exists(), finished.stdout + finished.stderr + log
    found: dict[str, Any] = json.loads(written.read_text())
    return found


def test_example_trains_in_the_simulation(tmp_path: Path) -> None:
    with ExitStack() as stack:
        start_superlink(stack, tmp_path, "--simulation")
        found = run_example(
            tmp_path,
            "num-server-rounds=40",
            "--federation-config",
            "num-supernodes=6 client-resources-num-cpus=1",
        )
    assert (found["rounds"], found["votes"]) == (40, 120)
    assert found["accuracy"] > 0.75
    # 4,810 parameters: 4,096 and 64, 640 and 10 in words of 64, then 64 bytes of scales.
    assert found["bytes-up"] == 64 * 10 + 64
    assert found["bytes-up-float32"] == 4 * 4810


def test_example_trains_with_a_superlink_and_two_supernodes(tmp_path: Path) -> None:
    with ExitStack() as stack:
        port = start_superlink(stack, tmp_path)
        for number in range(2):
            command = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}"]
            command += ["--host", "127.0.0.1", "--port", str(find_port())]
            command += ["--node-config", f"partition-id={number} num-partitions=2"]
            stack.enter_context(running(command, tmp_path, f"supernode-{number}"))
        found = run_example(
            tmp_path, 'num-server-rounds=5 fraction-train=1.0 rule="residual" lr=1.0'
        )
    assert (found["rounds"], found["votes"]) == (5, 10)
    assert found["accuracy"] > 0.3
