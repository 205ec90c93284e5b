"""The names and addresses of a lab, before anything exists."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from distlion.errors import InvalidArgumentError

MOST_HOSTS = 250
INTERFACE = "eth0"
NAMESPACE_FOLDER = Path("/run/netns")
BRIDGE = "bridge"
PREFIX_LENGTH = 24

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


@dataclass(frozen=True)
class LabPlan:
    """Names of everything in a lab.

    Args:
        name: Name of the lab: at most 32 lower-case letters, digits and hyphens.
        n_hosts: Number of hosts, 1 to 250.

    Raises:
        InvalidArgumentError: Name or number is out of range.
    """

    name: str
    n_hosts: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidArgumentError(
                f"name {self.name!r}: expected 1 to 32 lower-case letters, digits and "
                "hyphens, the first one no hyphen"
            )
        if not 1 <= self.n_hosts <= MOST_HOSTS:
            raise InvalidArgumentError(f"hosts is {self.n_hosts}; expected 1 to {MOST_HOSTS}")

    @property
    def bridge_namespace(self) -> str:
        """The namespace of the bridge."""
        return f"distlion-{self.name}-{BRIDGE}"

    @property
    def host_namespaces(self) -> tuple[str, ...]:
        """The namespaces of the hosts."""
        return tuple(f"distlion-{self.name}-h{host}" for host in range(self.n_hosts))

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All namespaces, the bridge's first."""
        return (self.bridge_namespace, *self.host_namespaces)

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host's interface."""
        return f"10.77.0.{host + 1}"

    def port(self, host: int) -> str:
        """Name the bridge's end of a host's link."""
        return f"port{host}"
