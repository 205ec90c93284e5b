"""What stands in for ``torch.distributed`` in a crew: groups that are made again and again."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

from simulation.crews.network import CrewMachine, CrewNetwork, CrewStore
from simulation.crews.streams import make_side_links
from simulation.distributed import Distributed, PrefixStore
from simulation.groups import End
from simulation.kernel import running


class _Alone:
    """The group of a worker that has nobody to meet."""


class CrewDistributed(Distributed):
    """``torch.distributed`` as the workers of a crew see it; each asks for itself."""

    PrefixStore = PrefixStore
    HashStore = _Alone
    distributed_c10d = SimpleNamespace(_set_pg_timeout=lambda timeout, group: None)
    network: CrewNetwork

    def __init__(self, network: CrewNetwork) -> None:
        super().__init__(network)
        self.listen, self.dial = make_side_links(network)

    @property
    def _machine(self) -> CrewMachine:
        machine = running().current.process
        assert isinstance(machine, CrewMachine)
        return machine

    @property
    def WORLD(self) -> End | _Alone | None:  # noqa: N802
        return self._machine.world

    def get_rank(self, group: End) -> int:
        if group is not self._machine.world:
            raise ValueError("the group is not registered")
        return group.rank()

    def get_process_group_ranks(self, group: End) -> list[int]:
        return list(range(group.size()))

    def TCPStore(  # noqa: N802
        self, host: str, port: int, *, is_master: bool, timeout: timedelta
    ) -> CrewStore:
        return CrewStore(self.network, self._machine, timeout.total_seconds())

    def create_connection(self, address: tuple[str, int], timeout: float) -> SimpleNamespace:
        """Look whether the store listens: its machine answers for one that is silent."""
        network, machine, kernel = self.network, self._machine, running()
        silent_until_s = max(
            network.silent_until_s(machine, network.keeper, is_store=True),
            network.silent_until_s(network.keeper, machine, is_store=True),
        )
        if silent_until_s > kernel.now_s:
            kernel.sleep(min(timeout, silent_until_s - kernel.now_s))
            if silent_until_s > kernel.now_s:
                raise TimeoutError("timed out")
        if network.keeper.is_gone:
            raise ConnectionRefusedError("Connection refused")
        return SimpleNamespace(close=lambda: None)

    def init_process_group(  # type: ignore[override]
        self,
        backend: str,
        *,
        store: PrefixStore | _Alone,
        rank: int,
        world_size: int,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        """Make the default group; its number counts those that did not come about, as torch does.

        Raises:
            RuntimeError: Somebody did not come, or the store is gone.
        """
        machine = self._machine
        assert machine.world is None, "the default group is made twice"
        number, machine.n_groups = machine.n_groups, machine.n_groups + 1
        if isinstance(store, _Alone):
            machine.world = store
            return
        place = PrefixStore(f"default {number}", store)
        machine.world = self.make_group(place, rank, world_size, timeout)

    def destroy_process_group(self) -> None:
        """Give the default group up, and with it all connections that are not kept."""
        machine = self._machine
        assert machine.world is not None
        world, machine.world, machine.n_groups = machine.world, None, 0
        if not isinstance(world, _Alone):
            self._close_all(world)

    def drop_store(self, group: End) -> None:
        """Forget a group's store; nothing else refers to a group beside the default one."""
        super().drop_store(group)
        if group is not self._machine.world:
            self._close_all(group)

    def _close_all(self, group: End) -> None:
        """Close a group and those made of it, but for what is kept."""
        for key, end in list(self._machine.groups.items()):
            if key.startswith(group.key) and not getattr(end, "is_kept", False):
                self._close(end)

    def keep_forever(self, group: End) -> None:
        group.is_kept = True  # type: ignore[attr-defined]

    def _close(self, end: End) -> None:
        self.network.kernel.tell(end.machine, f"closes {end.key}")
        self.network.close(end)
        end.machine.groups.pop(end.key, None)  # so that the thread that watches it ends

    def make_group(self, store: PrefixStore, rank: int, size: int, timeout: timedelta) -> End:
        """Make a group: each says in the store where it is, then connects with all others.

        Raises:
            RuntimeError: Somebody did not come, or the store is gone.
        """
        network, machine, kernel = self.network, self._machine, running()
        made = End(network, machine, store.path)
        made._store = store  # type: ignore[assignment]
        deadline_s = kernel.now_s + timeout.total_seconds()
        try:
            store.set(f"rank {rank}", str(machine.rank))
            places = [
                int(store.get(f"rank {peer}", max(0.0, deadline_s - kernel.now_s)))
                for peer in range(size)
            ]
            made.ranks = tuple(places)
            for peer in places:
                if peer != machine.rank:
                    self._connect(made, peer, deadline_s)
        except RuntimeError:
            self._close(made)
            raise
        for peer in places:
            if network.machines[peer].is_gone:
                made.lose(peer)
        return made

    def _connect(self, made: End, peer: int, deadline_s: float) -> None:
        network, kernel, own = self.network, running(), made.machine
        target = network.machines[peer]
        while True:
            if target.is_gone or peer in made._closed:
                if kernel.random.random() < 0.5:
                    raise RuntimeError("Gloo connectFullMesh failed: Connection refused")
                kernel.sleep(deadline_s - kernel.now_s)
            silent_s = max(
                network.silent_until_s(own, target, is_store=False),
                network.silent_until_s(target, own, is_store=False),
            )
            if kernel.now_s >= deadline_s:
                raise RuntimeError("Gloo connectFullMesh failed with Timed out")
            if silent_s <= kernel.now_s:
                kernel.sleep(2 * network.draw_delay_s())
                return
            kernel.sleep(min(0.1, deadline_s - kernel.now_s))
