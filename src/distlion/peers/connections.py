"""Process groups of an optimizer's own, which carry only its own bytes."""

from __future__ import annotations

import torch.distributed as dist

from distlion.errors import ProcessGroupError
from distlion.step.ranks import Ranks
from distlion.step.settings import Settings
from distlion.wire.groups import carries_host_memory, own_group
from distlion.wire.tcp import WIRE_VARIABLE, choose_wire, link_over
from distlion.wire.transport import Transport


class Connections:
    """The process groups of an optimizer, and links over them.

    On shared groups its bytes could meet those of other optimizers or the caller, and different
    sizes can abort a process inside Gloo. Votes have a group of their own for the same reason: all
    other calls begin with a question on the group of all ranks.

    Args:
        ranks: All ranks of the optimizer; one has no connections.
        settings: The optimizer's settings.
        name: Name of the optimizer, unique on the process group.

    Attributes:
        wire: How its groups are connected.
        lost_checkpoints: Whether a save in the background has failed on the group for checkpoints.

    Raises:
        InvalidArgumentError: ``DISTLION_WIRE`` names no transport, or a variable for own sockets
            is wrong.
        KernelBackendError: Own sockets were not built.
    """

    def __init__(self, ranks: Ranks, settings: Settings, *, name: str) -> None:
        self._ranks, self._settings, self._name = ranks, settings, name
        self.wire = choose_wire(alone=ranks.is_alone)
        self._everybody = ranks.process_group
        self._inside: dist.ProcessGroup | None = None
        self._between: dist.ProcessGroup | None = None
        self._for_checkpoints: dist.ProcessGroup | None = None
        self._n_checkpoint_groups, self.lost_checkpoints = 0, False

    def approach(self) -> None:
        """Make a group for the handshake, if the workers' own group cannot carry host memory.

        Raises:
            ProcessGroupError: Some rank did not take part.
        """
        workers = self._ranks.process_group
        if workers is not None and not carries_host_memory(workers):
            try:
                self._everybody = self._make("handshake")
            except ProcessGroupError as error:  # transports are compared over this group
                raise ProcessGroupError(f"{error} Is {WIRE_VARIABLE} the same on all?") from None

    def connect(self) -> None:
        """Make groups for this optimizer alone; every rank must call it.

        Raises:
            ProcessGroupError: Some rank did not take part.
        """
        ranks = self._ranks
        self._everybody = self._make("")
        self._between = self._make(f"between {ranks.between[0]}", ranks.between)
        if len(ranks.inside) > 1 or ranks.is_sharded:
            self._inside = self._make(f"inside {ranks.inside[0]}", ranks.inside)

    def link_all(self, timeout_s: float) -> Transport:
        """Return a link between all ranks, on their own group once they are connected."""
        assert self._everybody is not None  # there are two ranks or more
        return self._link(self._everybody, timeout_s)

    def link_voters(self, timeout_s: float, *, shares: bool = False) -> Transport:
        """Return a link between the ranks that vote with each other, one of each worker.

        Args:
            timeout_s: Seconds that one collective may take.
            shares: Whether small transfers may share a message; only where a worker is one rank, as
                a worker's ranks have transfers of different sizes, and meet between them.
        """
        assert self._between is not None  # they are connected
        shares = shares and self._inside is None
        return self._link(self._between, timeout_s, self._ranks.between, shares=shares)

    def link_worker(self, timeout_s: float) -> Transport | None:
        """Return a link between the ranks of this worker; None for a worker of one rank."""
        if self._inside is None:
            return None
        return self._link(
            self._inside, timeout_s, self._ranks.inside, are_one=self._ranks.are_members
        )

    def link_replicas(self, timeout_s: float) -> Transport:
        """Return a link between the ranks that hold the same parameters, or the same shards."""
        return self.link_voters(timeout_s) if self._ranks.is_sharded else self.link_all(timeout_s)

    def link_lane(self, timeout_s: float) -> Transport:
        """Return a link to those that keep the same momenta: of a crew's members, this lane."""
        if self._ranks.come_and_go:
            return self.link_voters(timeout_s)
        return self.link_replicas(timeout_s)

    @property
    def has_checkpoints(self) -> bool:
        """True if all ranks are connected for checkpoints."""
        return self._for_checkpoints is not None

    def connect_for_checkpoints(self) -> None:
        """Make a group for checkpoints alone; without it the steps go on.

        Raises:
            ProcessGroupError: Some rank did not take part; perhaps on this rank alone.
        """
        self._n_checkpoint_groups += 1
        self._for_checkpoints = self._make_group(f"checkpoints {self._n_checkpoint_groups}")

    def disconnect_for_checkpoints(self) -> None:
        """Free the group for checkpoints, which some rank could not make, or has lost."""
        self._for_checkpoints, self.lost_checkpoints = None, False

    def link_checkpoints(self, *, in_background: bool) -> Transport:
        """Return a link between all ranks on a group of its own, which waits for slow disks.

        In the background it has no watch, as the watch belongs to the thread of the steps.
        """
        assert self._for_checkpoints is not None  # they are connected
        timeouts = self._settings.timeouts
        if in_background:
            return link_over(self._for_checkpoints, timeout_s=timeouts.group_s)
        return self._link(self._for_checkpoints, timeouts.connect_s)

    def _link(
        self,
        group: dist.ProcessGroup,
        timeout_s: float,
        ranks: tuple[int, ...] | None = None,
        *,
        shares: bool = False,
        are_one: bool = False,
    ) -> Transport:
        # The workers' own group, before there are others, has a shorter limit in a crew.
        is_own = group is not self._ranks.process_group
        busy_s = self._settings.timeouts.busy_s if is_own else None
        return link_over(
            group,
            timeout_s=timeout_s,
            busy_timeout_s=busy_s,
            ranks=ranks,
            watch=self._ranks.watch,
            shares=shares,
            are_one=are_one,
        )

    def _make(self, what: str, ranks: tuple[int, ...] | None = None) -> dist.ProcessGroup:
        watch = self._ranks.watch
        assert watch is not None  # there are two ranks or more
        with watch.connecting():
            return self._make_group(what, ranks)

    def _make_group(self, what: str, ranks: tuple[int, ...] | None = None) -> dist.ProcessGroup:
        workers, settings = self._ranks.process_group, self._settings
        assert workers is not None  # there are two ranks or more
        return own_group(
            workers,
            name=f"{self._name}/{what}" if what else self._name,
            timeout_s=settings.timeouts.group_s,
            connect_timeout_s=self._ranks.connect_timeout_s or settings.timeouts.connect_s,
            ranks=ranks,
            wire=self.wire,
        )
