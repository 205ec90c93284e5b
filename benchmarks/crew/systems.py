"""The systems that a soak compares: how each is started, and how it is tuned."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from training_load import ADDRESS_KEY, CHECKPOINTS_KEY, RETRIES_KEY, SIZE_KEY, SIZES, Size

from distlion_netlab import Lab, enter

FOLDER = Path(__file__).resolve().parent
TORCHFT_PYTHON = FOLDER.parents[1] / "build" / "venv-torchft" / "bin" / "python"
ELASTIC_SETTINGS = {
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
    "last_call_timeout": 1,
    "join_timeout": 600,
    "is_host": 0,
}
LIGHTHOUSE_SETTINGS = {
    "heartbeat_timeout_ms": 1000,
    "join_timeout_ms": 1000,
    "quorum_tick_ms": 50,
}
RESTARTS = 10_000
MACHINE_PROCESSES = 2


COORDINATOR = -1
"""The number of the coordinator, where workers count from 0."""


@dataclass(frozen=True)
class System:
    """One way to train on while workers are lost.

    Args:
        name: Of the system.
        port: Of its coordinator, which outlives all workers.
        folder: What workers may share.
        size_name: Of the network.
        lab: Hosts of the network lab, one for the coordinator and one for each worker; None if all
            run on this machine's loopback.
        saves: Whether workers make checkpoints; those of torchelastic always do.

    Attributes:
        environment: Further variables of all its processes.
        tuning: What was set otherwise than by default.
    """

    name: str
    port: int
    folder: Path
    size_name: str = "1m"
    lab: Lab | None = None
    saves: bool = False

    @property
    def size(self) -> Size:
        """The network."""
        return SIZES[self.size_name]

    @property
    def environment(self) -> dict[str, str]:
        # Where modules may not be kept compiled, an interpreter takes twice as long to start.
        compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONUNBUFFERED": "1"}
        interface = "lo" if self.lab is None else "eth0"
        checkpoints = {CHECKPOINTS_KEY: str(self.folder / "checkpoints")} if self.saves else {}
        return {
            **checkpoints,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": interface,
            SIZE_KEY: self.size_name,
            **compiled,
        }

    def address(self, number: int) -> str:
        """Return the address of a worker or of the coordinator."""
        return "127.0.0.1" if self.lab is None else self.lab.plan.address(number + 1)

    def list_environment(self, number: int) -> dict[str, str]:
        """Return further variables of the process of a worker or of the coordinator."""
        return {**self.environment, ADDRESS_KEY: self.address(number)}

    def list_entrance(self, number: int) -> list[str]:
        """Return what a command begins with so that it runs on its host."""
        if self.lab is None:
            return []
        namespace = self.lab.enter.namespaces[number + 1]
        return [sys.executable, "-I", "-S", enter.__file__, namespace, str(os.getpid())]

    @property
    def tuning(self) -> str:
        return f"silence_s=1 without a heartbeat, Timeouts(step_s={self.size.silence_s})"

    def command_coordinator(self) -> list[str]:
        """Return what keeps the word between workers."""
        return [sys.executable, "-m", "distlion", "crew", "--port", str(self.port)]

    def command_worker(self, number: int, log: Path) -> list[str]:
        """Return what one worker runs."""
        raise NotImplementedError


class CrewSystem(System):
    """distlion's crew; the store of ``distlion crew`` finds the workers."""

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "DISTLION_CREW_SECRET": "of this benchmark"}

    def command_worker(self, number: int, log: Path) -> list[str]:
        endpoint = f"{self.address(COORDINATOR)}:{self.port}"
        return [sys.executable, str(FOLDER / "run_crew.py"), str(log), endpoint]


class RetryingCrewSystem(CrewSystem):
    """A crew whose steps vote again where members change, so that no gradient is lost."""

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, RETRIES_KEY: "1"}

    @property
    def tuning(self) -> str:
        return f"{super().tuning}, retry=True"


class MachinesSystem(CrewSystem):
    """A crew of machines: each worker has two processes, over which FSDP2 shards its replica."""

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    @property
    def tuning(self) -> str:
        return f"{super().tuning}, {MACHINE_PROCESSES} processes a worker, FSDP2 inside"

    def command_worker(self, number: int, log: Path) -> list[str]:
        interpreter, *program = super().command_worker(number, log)
        launch = [interpreter, "-m", "torch.distributed.run", "--standalone"]
        return [*launch, "--nproc-per-node", str(MACHINE_PROCESSES), *program]


class TorchftSystem(System):
    """torchft: a lighthouse finds the workers, each of which is a replica group."""

    @property
    def environment(self) -> dict[str, str]:
        # Each replica's manager logs every heartbeat otherwise.
        return {**super().environment, "RUST_LOG": "warn"}

    @property
    def tuning(self) -> str:
        tuned = ", ".join(f"--{name} {value}" for name, value in LIGHTHOUSE_SETTINGS.items())
        limit = f"timeout={self.size.average_s} s"
        return f"lighthouse {tuned}; Manager({limit}, quorum_retries=3), asynchronous quorum"

    def command_coordinator(self) -> list[str]:
        command = [str(TORCHFT_PYTHON.with_name("torchft_lighthouse")), "--min_replicas", "2"]
        for name, value in LIGHTHOUSE_SETTINGS.items():
            command += [f"--{name}", str(value)]
        return [*command, "--bind", f"[::]:{self.port}"]

    def command_worker(self, number: int, log: Path) -> list[str]:
        lighthouse = f"http://{self.address(COORDINATOR)}:{self.port}"
        return [str(TORCHFT_PYTHON), str(FOLDER / "run_torchft.py"), str(log), lighthouse]


class ElasticSystem(System):
    """torchelastic: each worker has an agent; a store of its own outlives all agents."""

    @property
    def environment(self) -> dict[str, str]:
        # Otherwise agents keep the address of the store of their first round, and a newcomer waits
        # for it in vain (torch 2.13).
        return {**super().environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    @property
    def tuning(self) -> str:
        tuned = ",".join(f"{name}={value}" for name, value in ELASTIC_SETTINGS.items())
        return f"--rdzv-conf {tuned} --monitor-interval 0.1; a checkpoint every 20 steps"

    def command_worker(self, number: int, log: Path) -> list[str]:
        endpoint = f"{self.address(COORDINATOR)}:{self.port}"
        tuned = ",".join(f"{name}={value}" for name, value in ELASTIC_SETTINGS.items())
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2:6", "--nproc-per-node", "1", "--max-restarts", str(RESTARTS)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
            *("--rdzv-id", "soak", "--rdzv-conf", tuned, "--monitor-interval", "0.1"),
            *("--local-addr", self.address(number)),
            *(str(FOLDER / "run_elastic.py"), str(log), str(self.folder / "checkpoint.pt")),
        ]


SYSTEMS: dict[str, type[System]] = {
    "crew": CrewSystem,
    "crew-retry": RetryingCrewSystem,
    "crew-machines": MachinesSystem,
    "torchft": TorchftSystem,
    "torchelastic": ElasticSystem,
}


COMPARED = ("crew", "torchft", "torchelastic")
SIZED = ("crew", "crew-retry", "torchft")


def build_system(
    name: str, folder: Path, size: str = "1m", lab: Lab | None = None, *, saves: bool = False
) -> System:
    """Return a system on a port that is free now."""
    (folder / "checkpoints").mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return SYSTEMS[name](name, probe.getsockname()[1], folder, size, lab, saves)


def is_there(name: str) -> bool:
    """Return whether a system is installed."""
    return name != "torchft" or os.access(TORCHFT_PYTHON, os.X_OK)
