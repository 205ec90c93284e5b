"""A lab: hosts on one machine, joined by a bridge, with a rate for each link, and a latency."""

from __future__ import annotations

import contextlib
import os
import secrets
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from distlion.errors import InvalidArgumentError
from distlion.signals import deferred_signals
from distlion_lab.errors import NetlabError
from distlion_lab.training.processes import leaving_in_order
from distlion_netlab.congestion import read_congestion_control, set_congestion_control
from distlion_netlab.enter import enter_namespace
from distlion_netlab.lab_plan import INTERFACE, NAMESPACE_FOLDER, LabPlan
from distlion_netlab.link_rate import UNLIMITED, TokenBucket, parse_host_rates
from distlion_netlab.state import LabState, list_states, read_state
from distlion_netlab.switch import check_latency, find_switch, start_switch, stop_switch
from distlion_netlab.wires import (
    Counters,
    Wires,
    check_names_free,
    check_rights,
    create_namespaces,
    list_processes,
    remove_namespaces,
)


@dataclass(frozen=True)
class EnterHost:
    """Put the calling process on a host of a lab, for Gloo to use its interface.

    Attributes:
        namespaces: Files of the hosts' namespaces.
    """

    namespaces: tuple[str, ...]

    def __call__(self, host: int) -> None:
        """Enter; threads that the process has already stay outside.

        Raises:
            OSError: The lab is gone, or root rights are.
        """
        enter_namespace(self.namespaces[host])
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


class Lab:
    """Make hosts in network namespaces of their own, each with one interface, ``eth0``.

    The bridge is in a namespace too, so the machine's own interfaces stay as they are.
    A lab is removed when its ``with`` block is left, also by Ctrl-C, SIGTERM and SIGHUP. Otherwise
    it is removed when it is collected or the interpreter ends. A killed process leaves its lab
    behind; making the next lab removes it.

    Args:
        n_hosts: Number of hosts, 1 to 250; host i has the address 10.77.0.(i + 1).
        rates: One rate for all hosts, as in "100mbit", "unlimited" or, up and down,
            "100mbit/20mbit"; or one for each, as in "1gbit,1gbit,1gbit,100mbit".
        latency_s: Seconds that a frame takes from any host to another, 0.001 to 10, or longer on
            busy cores: a process forwards frames in place of the bridge. 0 is for none.
        congestion_control: TCP congestion control of the hosts, such as "cubic", "reno" or "bbr".
            None is for cubic, which most Linux hosts use; where the kernel has none, a warning
            says that hosts use reno.
        name: Name of the lab; None for a random one.
        stays: True if the lab stays after this process, until ``remove_lab``.

    Raises:
        InvalidArgumentError: A rate, the latency, name or number of hosts is wrong, or the kernel
            has no such congestion control.
        NetlabError: No root rights, no Linux, the name is taken, or the kernel refuses.

    Example:
        >>> with Lab(4, "100mbit") as lab:
        ...     run_command(lab, ["python", "train.py"])
        ...     lab.set_rates("1gbit")
    """

    def __init__(
        self,
        n_hosts: int,
        rates: str = UNLIMITED,
        *,
        latency_s: float = 0.0,
        congestion_control: str | None = None,
        name: str | None = None,
        stays: bool = False,
    ) -> None:
        check_latency(latency_s)
        plan = LabPlan(secrets.token_hex(4) if name is None else name, n_hosts)
        parsed = parse_host_rates(rates, n_hosts)
        check_rights()
        remove_abandoned_labs()
        state = LabState.of(plan, stays=stays, latency_s=latency_s)
        state.check_free()
        check_names_free(plan)
        state.claim()
        removal = weakref.finalize(self, _remove, state, os.getpid())
        self._remove: Callable[[], object] = removal
        try:
            create_namespaces(plan)
            set_congestion_control(plan.host_namespaces, congestion_control)
            self._attach(plan)
            self._wires.build(joins=not latency_s)
            if latency_s:
                start_switch(plan, latency_s, stays=stays)
            self._wires.set_rates(parsed)
        except BaseException:
            self.close()
            raise
        if stays:
            removal.detach()

    def _attach(self, plan: LabPlan) -> None:
        self.plan = plan
        self._wires = Wires(plan)
        self._close_wires = weakref.finalize(self, _close, self._wires, os.getpid())

    @classmethod
    def find(cls, name: str) -> Lab:
        """Find a lab that stays; closing it leaves the lab in place.

        Raises:
            NetlabError: There is no such lab, or the process that forwards its packets is gone.
        """
        check_rights()
        state = read_state(name)
        if state.latency_s and not find_switch(state.plan):
            raise NetlabError(
                f"the process that forwards packets of lab {name!r} is gone: distlion netlab down "
                f"--name {name}, then up"
            )
        lab = cls.__new__(cls)
        lab._remove = _keep
        lab._attach(state.plan)
        return lab

    def __enter__(self) -> Lab:
        self._signals = leaving_in_order()
        self._signals.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        self._signals.__exit__(None, None, None)

    @property
    def name(self) -> str:
        """The lab's name."""
        return self.plan.name

    @property
    def n_hosts(self) -> int:
        """The number of hosts."""
        return self.plan.n_hosts

    @property
    def enter(self) -> EnterHost:
        """Puts a process on a host; for processes that this one starts."""
        folder = NAMESPACE_FOLDER
        return EnterHost(tuple(str(folder / name) for name in self.plan.host_namespaces))

    @property
    def congestion_control(self) -> str:
        """The TCP congestion control of new connections, read from the kernel."""
        return read_congestion_control(self.plan.host_namespaces[0])

    def set_congestion_control(self, name: str) -> None:
        """Change the TCP congestion control of all hosts; open connections keep theirs.

        Raises:
            InvalidArgumentError: The kernel has no such algorithm.
            NetlabError: The kernel refuses.
        """
        set_congestion_control(self.plan.host_namespaces, name)

    def set_rates(self, rates: str) -> None:
        """Change the rates, in the constructor's format; connections stay.

        Raises:
            InvalidArgumentError: A rate is wrong.
            NetlabError: The kernel refuses.
        """
        self._wires.set_rates(parse_host_rates(rates, self.n_hosts))

    def read_buckets(self) -> list[tuple[TokenBucket | None, TokenBucket | None]]:
        """Read each host's limits, up and down, back from the kernel; None is unlimited."""
        return self._wires.read_buckets()

    def set_link(self, host: int, *, up: bool) -> None:
        """Plug in a host's cable, or pull it.

        Raises:
            InvalidArgumentError: There is no such host.
            NetlabError: The kernel refuses.
        """
        if not 0 <= host < self.n_hosts:
            raise InvalidArgumentError(f"host {host}: expected 0 to {self.n_hosts - 1}")
        self._wires.set_link(host, up=up)

    def read_counters(self) -> list[Counters]:
        """Read the traffic of each host's interface since the lab was made."""
        return self._wires.read_counters()

    @deferred_signals("the end of a lab", gives_way=False)
    def close(self) -> None:
        """Remove the lab, unless it stays or belongs to another process; may be called twice."""
        if hasattr(self, "_close_wires"):
            self._close_wires()
        self._remove()


def remove_lab(name: str) -> list[int]:
    """Remove a lab that stays, or that an ended process left behind.

    Returns:
        Processes that still run inside, now without a network.

    Raises:
        NetlabError: There is no such lab, or the kernel refuses.
    """
    check_rights()
    state = read_state(name)
    running = set(list_processes(state.plan)) - set(find_switch(state.plan))
    _remove(state, os.getpid())
    return sorted(running)


def remove_abandoned_labs() -> None:
    """Remove the labs that have outlived their owner process."""
    for state in list_states():
        if state.is_abandoned:
            _remove(state, os.getpid())


# A forked child inherits the finalizers, but not the lab.


def _close(wires: Wires, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        wires.close()


def _remove(state: LabState, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        if state.latency_s:
            stop_switch(state.plan)
        remove_namespaces(state.plan)
        state.forget()


def _keep() -> None:
    """Remove nothing."""


@contextlib.contextmanager
def temporary_or_named(
    name: str | None,
    n_hosts: int,
    rates: str | None,
    *,
    latency_s: float = 0.0,
    congestion_control: str | None = None,
) -> Iterator[Lab]:
    """Find a lab by name, or make one for the time of a ``with`` block.

    Args:
        name: Name of a lab that stays; None makes a new one.
        n_hosts: Number of hosts of a new lab.
        rates: Rates to set; None keeps the rates of a lab that stays, and leaves a new one
            unlimited.
        latency_s: Latency of a new lab.
        congestion_control: TCP congestion control to set; None keeps that of a lab that stays, and
            leaves a new one its default.
    """
    with (
        leaving_in_order(),  # also while the lab is made
        Lab(
            n_hosts,
            UNLIMITED if rates is None else rates,
            latency_s=latency_s,
            congestion_control=congestion_control,
        )
        if name is None
        else Lab.find(name) as lab,
    ):
        if name is not None and rates is not None:
            lab.set_rates(rates)
        if name is not None and congestion_control is not None:
            lab.set_congestion_control(congestion_control)
        yield lab
