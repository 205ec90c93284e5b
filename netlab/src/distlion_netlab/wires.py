"""Namespaces, links, rates and counters in the kernel; only this module uses pyroute2."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from distlion.errors import MissingDependencyError
from distlion_lab.errors import NetlabError
from distlion_netlab.lab_plan import BRIDGE, INTERFACE, PREFIX_LENGTH, LabPlan
from distlion_netlab.link_rate import LinkRate, TokenBucket

try:
    from pyroute2 import IPRoute, config, netns  # type: ignore[import-untyped]
    from pyroute2.ethtool.ioctl import IoctlEthtool  # type: ignore[import-untyped]
    from pyroute2.netlink.exceptions import NetlinkError  # type: ignore[import-untyped]
except ImportError as error:
    raise MissingDependencyError(
        "the network lab needs the package 'pyroute2': pip install \"distlion[netlab]\""
    ) from error

_Answer = TypeVar("_Answer")

# With any of these on, an interface counts and forwards packets of up to 64 KiB.
OFFLOADS = (
    "tcp-segmentation-offload",
    "generic-segmentation-offload",
    "generic-receive-offload",
)
# Making a namespace waits for the removal of others, for several seconds on a busy machine;
# pyroute2 expects 2.
_PATIENCE_S = 60
_ROOT_QDISC = 0xFFFFFFFF
_NO_IPV6_ADDRESS = {"attrs": [["AF_INET6", {"attrs": [["IFLA_INET6_ADDR_GEN_MODE", 1]]}]]}


@dataclass(frozen=True)
class Counters:
    """Traffic of a host's interface since the lab was made, in whole frames."""

    tx_bytes: int
    tx_packets: int
    rx_bytes: int
    rx_packets: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.tx_bytes - earlier.tx_bytes,
            self.tx_packets - earlier.tx_packets,
            self.rx_bytes - earlier.rx_bytes,
            self.rx_packets - earlier.rx_packets,
        )


def check_rights() -> None:
    """Check that this process may make namespaces.

    Raises:
        NetlabError: The system is not Linux, or the user not root.
    """
    if sys.platform != "linux":
        raise NetlabError(f"the network lab needs Linux; this is {sys.platform}")
    if os.geteuid() != 0:
        raise NetlabError("the network lab needs root rights: sudo distlion netlab ...")


def check_names_free(plan: LabPlan) -> None:
    """Check that no namespace has one of a lab's names.

    Raises:
        NetlabError: One has.
    """
    taken = sorted(set(plan.namespaces) & set(netns.listnetns()))
    if taken:
        raise NetlabError(
            f"network namespaces of these names exist already: {', '.join(taken)}; choose another "
            "lab name"
        )


def create_namespaces(plan: LabPlan) -> None:
    """Make the namespaces of a lab.

    Raises:
        NetlabError: The kernel refuses.
    """
    with _explained("make network namespaces"):
        for name in plan.namespaces:
            netns.create(name)


def remove_namespaces(plan: LabPlan) -> None:
    """Remove a lab's existing namespaces; the kernel frees each one with its last process.

    Raises:
        NetlabError: The kernel refuses.
    """
    with _explained("remove network namespaces"):
        for name in sorted(set(plan.namespaces) & set(netns.listnetns())):
            # Every new lab removes abandoned ones, and several may begin at once.
            with contextlib.suppress(FileNotFoundError):
                netns.remove(name)


def list_processes(plan: LabPlan) -> list[int]:
    """List the processes that run inside a lab."""
    inside = netns.ns_pids()
    return sorted(pid for name in plan.namespaces for pid in inside.get(name, []))


def run_inside(namespaces: Sequence[str], function: Callable[[], _Answer]) -> list[_Answer]:
    """Call a function in each namespace; the calling thread stays outside."""

    def enter(namespace: str) -> _Answer:
        netns.setns(namespace, flags=os.O_RDONLY)
        return function()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return list(thread.map(enter, namespaces))


class Wires:
    """The links of a lab whose namespaces exist, seen from outside.

    Raises:
        NetlabError: The kernel refuses; every method may raise this.
    """

    def __init__(self, plan: LabPlan) -> None:
        self._plan = plan
        self._open = contextlib.ExitStack()
        with _explained("open the lab's namespaces"):
            self._bridge = self._enter(plan.bridge_namespace)
            self._hosts = [self._enter(name) for name in plan.host_namespaces]

    def _enter(self, namespace: str) -> Any:
        # Without these flags, a missing namespace would be made.
        return self._open.enter_context(IPRoute(netns=namespace, flags=os.O_RDONLY))

    def close(self) -> None:
        """Close the sockets into the namespaces."""
        self._open.close()

    def build(self, *, joins: bool = True) -> None:
        """Make bridge and links, switch offloads off, set addresses, and bring everything up.

        Args:
            joins: Whether the bridge joins the links; without, no frame goes from link to link.
        """
        with _explained("make bridge and links"):
            # A bridge with snooping sends reports of its own.
            self._bridge.link("add", ifname=BRIDGE, kind="bridge", br_mcast_snooping=0)
            bridge = _index(self._bridge, BRIDGE)
            _switch_on(self._bridge, bridge)
            for number, host in enumerate(self._hosts):
                self._build_link(number, host, bridge if joins else None)
        switch_offloads_off(self._plan.bridge_namespace, self._ports())
        for namespace in self._plan.host_namespaces:
            switch_offloads_off(namespace, [INTERFACE])

    def _build_link(self, number: int, host: Any, bridge: int | None) -> None:
        namespace, port_name = self._plan.host_namespaces[number], self._plan.port(number)
        peer = {"ifname": INTERFACE, "net_ns_fd": namespace}
        self._bridge.link("add", ifname=port_name, kind="veth", peer=peer)
        port, eth0 = _index(self._bridge, port_name), _index(host, INTERFACE)
        host.addr("add", index=eth0, address=self._plan.address(number), prefixlen=PREFIX_LENGTH)
        host.link("set", index=_index(host, "lo"), state="up")
        _switch_on(host, eth0)
        if bridge is not None:
            self._bridge.link("set", index=port, master=bridge)
        _switch_on(self._bridge, port)

    def _ports(self) -> list[str]:
        return [self._plan.port(host) for host in range(self._plan.n_hosts)]

    def set_rates(self, rates: Sequence[LinkRate]) -> None:
        """Limit each host's link in both directions, even while it is in use."""
        with _explained("limit a rate"):
            for number, rate in enumerate(rates):
                _limit(self._hosts[number], INTERFACE, rate.up_bit_per_s)
                _limit(self._bridge, self._plan.port(number), rate.down_bit_per_s)

    def read_buckets(self) -> list[tuple[TokenBucket | None, TokenBucket | None]]:
        """Read each host's limits, up and down, back from the kernel; None is unlimited."""
        with _explained("read a rate"):
            return [
                (_read_bucket(host, INTERFACE), _read_bucket(self._bridge, self._plan.port(number)))
                for number, host in enumerate(self._hosts)
            ]

    def set_link(self, host: int, *, up: bool) -> None:
        """Plug in a host's cable, or pull it, at the bridge's end."""
        with _explained("set a link"):
            port = _index(self._bridge, self._plan.port(host))
            self._bridge.link("set", index=port, state="up" if up else "down")

    def read_counters(self) -> list[Counters]:
        """Read the traffic of each host.

        One call reads the ports of the bridge: a port receives the bytes that its host sends.
        """
        with _explained("read counters"):
            links = {link.get_attr("IFLA_IFNAME"): link for link in self._bridge.get_links()}
        return [_host_counters(links[port].get_attr("IFLA_STATS64")) for port in self._ports()]


def switch_offloads_off(namespace: str, interfaces: Sequence[str]) -> None:
    """Switch the segmentation offloads of a namespace's interfaces off, and check the result.

    Raises:
        NetlabError: The kernel refuses.
    """
    with _explained("switch segmentation offload off"), _ethtool(namespace) as ethtool:
        for interface in interfaces:
            ethtool.change_ifname(interface)
            for offload in OFFLOADS:
                ethtool.set_offload_flag(offload, 0)
    left = read_offloads(namespace, interfaces)
    if left:
        raise NetlabError(f"segmentation offload cannot be switched off: {', '.join(left)}")


def read_offloads(namespace: str, interfaces: Sequence[str]) -> list[str]:
    """List the segmentation offloads that are on, as ``interface: offload``."""
    on = []
    with _explained("read segmentation offload"), _ethtool(namespace) as ethtool:
        for interface in interfaces:
            ethtool.change_ifname(interface)
            flags = ethtool.get_offload_flags()
            on += [f"{interface}: {offload}" for offload in OFFLOADS if flags[offload]]
    return on


@contextlib.contextmanager
def _ethtool(namespace: str) -> Iterator[Any]:
    ethtool = IoctlEthtool()
    ethtool.close()
    ethtool.sock = netns.create_socket(
        namespace, socket.AF_INET, socket.SOCK_DGRAM, flags=os.O_RDONLY
    )
    try:
        yield ethtool
    finally:
        ethtool.close()


def _index(end: Any, interface: str) -> int:
    return int(end.link_lookup(ifname=interface)[0])


def _switch_on(end: Any, index: int) -> None:
    if Path("/proc/net/if_inet6").exists():
        # Otherwise announcements of a link-local address would be counted.
        end.link("set", index=index, IFLA_AF_SPEC=_NO_IPV6_ADDRESS)
    end.link("set", index=index, state="up")


def _limit(end: Any, interface: str, rate_bit_per_s: float | None) -> None:
    index = _index(end, interface)
    if rate_bit_per_s is not None:
        bucket = TokenBucket.for_rate(rate_bit_per_s)
        end.tc(
            "replace",
            "tbf",
            index,
            0,
            rate=bucket.bytes_per_s,
            burst=bucket.burst_bytes,
            limit=bucket.queue_bytes,
        )
    elif _read_bucket(end, interface) is not None:
        end.tc("del", index=index, parent=_ROOT_QDISC)


def _read_bucket(end: Any, interface: str) -> TokenBucket | None:
    for qdisc in end.get_qdiscs(index=_index(end, interface)):
        if qdisc.get_attr("TCA_KIND") == "tbf":
            parms = qdisc.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")
            burst_bytes = round(parms["buffer"] * _TICK_S * parms["rate"])
            return TokenBucket(parms["rate"], burst_bytes, parms["limit"])
    return None


# The kernel reports a burst as its duration, in ticks of 64 ns (PSCHED_SHIFT).
_TICK_S = 64e-9


def _host_counters(port: dict[str, int]) -> Counters:
    return Counters(
        tx_bytes=port["rx_bytes"],
        tx_packets=port["rx_packets"],
        rx_bytes=port["tx_bytes"],
        rx_packets=port["tx_packets"],
    )


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Give the kernel time, and name the attempted action in its refusals."""
    before = config.default_communicate_timeout, config.default_create_socket_timeout
    config.default_communicate_timeout = config.default_create_socket_timeout = _PATIENCE_S
    # pyroute2 forks children and ends them by SIGTERM. A handler of the caller's that raises would
    # leave the caller's blocks in the child, and so clean up what the caller still uses.
    config.disable_mp_signal = True
    try:
        yield
    except (OSError, NetlinkError) as error:
        raise NetlabError(
            f"cannot {what}: {error}. In a container, this takes CAP_SYS_ADMIN and CAP_NET_ADMIN"
        ) from error
    finally:
        config.default_communicate_timeout, config.default_create_socket_timeout = before
