"""An emulated network between local workers, which another distribution may bring."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import Protocol

from distlion_lab.errors import NetlabError

GROUP = "distlion.networks"
"""Group of entry points: functions of a number of hosts and of a rate, as ``open_network``."""

Enter = Callable[[int], None]
"""Puts the calling process on a host, counted from 0, and names Gloo's interface there.

It is pickled, and called before the process has further threads, or sockets.
"""


class Network(Protocol):
    """Hosts on this machine, joined by links of one rate."""

    @property
    def enter(self) -> Enter:
        """Return the function that puts a worker on its host."""

    def set_rates(self, rates: str) -> None:
        """Change the rate of all links, such as to ``1gbit``.

        Raises:
            NetlabError: The kernel refuses.
        """


def open_network(n_hosts: int, rate: str) -> AbstractContextManager[Network]:
    """Make a network that lasts as long as a ``with`` block.

    Raises:
        NetlabError: No package that emulates networks is installed, or it cannot do so here, such
            as without root rights.
        InvalidArgumentError: The rate is not one that it knows.
    """
    for point in entry_points(group=GROUP):
        try:
            make: Callable[[int, str], AbstractContextManager[Network]] = point.load()
        except ModuleNotFoundError as error:
            raise NetlabError(f"the package {error.name!r} is not installed") from error
        return make(n_hosts, rate)
    raise NetlabError("distlion-netlab is not installed")
