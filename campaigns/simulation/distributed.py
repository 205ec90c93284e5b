"""What stands in for ``torch.distributed``: what the package calls and makes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from distlion.wire.groups import drop_store
from simulation.groups import End
from simulation.kernel import running
from simulation.network import Machine, Network


class Distributed:
    """``torch.distributed`` as the workers of a network see it; each asks for itself."""

    ProcessGroup = End

    def __init__(self, network: Network) -> None:
        self.network = network
        self.group = self

    @property
    def _machine(self) -> Machine:
        machine = running().current.process
        assert isinstance(machine, Machine)
        return machine

    @property
    def WORLD(self) -> End | None:  # noqa: N802
        return self._machine.groups.get("world")

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.WORLD is not None

    def get_rank(self, group: End) -> int:
        return group.rank()

    def get_world_size(self, group: End) -> int:
        return group.size()

    def get_process_group_ranks(self, group: End) -> list[int]:
        return list(group.ranks)

    def get_backend_config(self, group: End) -> str:
        return "cpu:gloo"

    def GatherOptions(self) -> Any:  # noqa: N802
        return SimpleNamespace(rootRank=0)

    ScatterOptions = BroadcastOptions = GatherOptions

    def keep_forever(self, group: End) -> None:
        """Keep a group, as every group is kept here until its process ends."""

    def drop_store(self, group: End) -> None:
        """Forget a group's store, as the package does."""
        drop_store(group)  # type: ignore[arg-type]

    def init_process_group(self, timeout_s: float) -> None:
        """Join a group that all others have joined long ago: nobody expects this process.

        Raises:
            RuntimeError: Always, after the time it may take.
        """
        running().sleep(timeout_s)
        raise RuntimeError("Gloo connectFullMesh failed")

    def make_group(self, store: PrefixStore, rank: int, size: int, timeout: timedelta) -> End:
        """Make a group of those who meet at one place in the store, as ``ProcessGroupGloo``.

        Raises:
            RuntimeError: Somebody did not come, or the store is gone.
        """
        network, machine, kernel = self.network, self._machine, running()
        made = End(network, machine, store.path)
        machine.note_progress(kernel.now_s)
        deadline_s = kernel.now_s + timeout.total_seconds()
        present = network.meetings.setdefault(store.path, {})
        present[rank] = machine.rank
        while True:
            store.meet(max(0.0, deadline_s - kernel.now_s))
            if len(present) == size:
                break
            if kernel.now_s >= deadline_s:
                raise RuntimeError("Gloo connectFullMesh failed with Timed out")
            kernel.sleep(0.01)
        made.ranks = tuple(present[rank] for rank in range(size))
        for member in made.ranks:
            if network.machines[member].is_gone:
                made.lose(member)
        return made


class PrefixStore:
    """``torch.distributed.PrefixStore``: a place in a store."""

    def __init__(self, prefix: str, store: Any) -> None:
        self.prefix, self.store = prefix, store

    @property
    def path(self) -> str:
        """The place in the store below all prefixes."""
        below = getattr(self.store, "path", "")
        return f"{below}/{self.prefix}" if below else self.prefix

    def meet(self, timeout_s: float) -> None:
        self.store.meet(timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self.store.check([self._place(key) for key in keys]))

    def set(self, key: str, value: str | bytes) -> None:
        self.store.set(self._place(key), value)

    def get(self, key: str, limit_s: float | None = None) -> bytes:
        found: bytes = self.store.get(self._place(key), limit_s)
        return found

    def add(self, key: str, amount: int) -> int:
        return int(self.store.add(self._place(key), amount))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        found: bytes = self.store.compare_set(self._place(key), expected, value)
        return found

    def delete_key(self, key: str) -> bool:
        return bool(self.store.delete_key(self._place(key)))

    def _place(self, key: str) -> str:
        return f"{self.prefix}/{key}"
