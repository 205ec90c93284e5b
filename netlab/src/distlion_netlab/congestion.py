"""The TCP congestion control of hosts: a setting of each network namespace."""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from distlion.errors import InvalidArgumentError
from distlion_lab.errors import NetlabError
from distlion_netlab.wires import run_inside

logger = logging.getLogger("distlion")

USUAL = "cubic"
"""The default of nearly every Linux distribution, and of hosts."""

FALLBACK = "reno"
"""Compiled into every Linux kernel."""

_SETTINGS = Path("/proc/sys/net/ipv4")
_CURRENT = _SETTINGS / "tcp_congestion_control"
_ALLOWED = _SETTINGS / "tcp_allowed_congestion_control"
_AVAILABLE = _SETTINGS / "tcp_available_congestion_control"


def set_congestion_control(namespaces: Sequence[str], name: str | None) -> None:
    """Set the congestion control of the connections that namespaces make from now on.

    Args:
        namespaces: Names of network namespaces.
        name: An algorithm of the kernel. None is for ``USUAL``, and ``FALLBACK`` with a warning
            where the kernel refuses that.

    Raises:
        InvalidArgumentError: The kernel has no such algorithm.
        NetlabError: The kernel refuses.
    """
    if name is not None:
        _set(namespaces, name)
        return
    try:
        _set(namespaces, USUAL)
    except (InvalidArgumentError, NetlabError) as refusal:
        _set(namespaces, FALLBACK)
        logger.warning("hosts use %s, not %s: %s", FALLBACK, USUAL, refusal)


def read_congestion_control(namespace: str) -> str:
    """Read the congestion control of a namespace's new connections."""
    return run_inside([namespace], _read)[0]


def _set(namespaces: Sequence[str], name: str) -> None:
    try:
        try:
            run_inside(namespaces, partial(_write, name))
        except PermissionError:
            with _allowed(name):
                run_inside(namespaces, partial(_write, name))
    except OSError as error:
        raise NetlabError(
            f"congestion control {name} cannot be set: {error}. In a container, /proc/sys must be "
            f"writable; its hosts can always use the machine's own, {_read()}"
        ) from error


def _write(name: str) -> None:
    if _read() == name:
        return
    if name.isidentifier():  # the kernel would take the first line of several
        with contextlib.suppress(FileNotFoundError):  # no such algorithm
            _CURRENT.write_text(name)
    if _read() != name:
        offered = ", ".join(_AVAILABLE.read_text().split())
        raise InvalidArgumentError(
            f"congestion control {name!r}: expected one that this kernel offers: {offered}"
        )


def _read() -> str:
    return _CURRENT.read_text().strip()


@contextlib.contextmanager
def _allowed(name: str) -> Iterator[None]:
    """Allow all processes of the machine to use an algorithm, for a moment.

    Only then can it be set in a namespace, which keeps it. One process does this at a time, so
    that the machine's setting is as before at the end.
    """
    with _ALLOWED.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = _ALLOWED.read_text()
        _ALLOWED.write_text(f"{before.strip()} {name}")
        try:
            yield
        finally:
            _ALLOWED.write_text(before)
