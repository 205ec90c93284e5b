"""Patience: how long a worker waits for an epoch, and when it gives up."""

from __future__ import annotations

import time

from distlion.crew.rendezvous import TooFewError
from distlion.errors import CrewError

_FIRST_WAIT_S, _LONGEST_WAIT_S, _SHORTEST_WAIT_S = 4.0, 60.0, 0.1


class Patience:
    """Of a worker that has no epoch.

    Args:
        limit_s: Seconds until it gives up.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.rest()

    def rest(self) -> None:
        """Note that an epoch was formed."""
        self._since_s: float | None = None
        self._wait_s = _FIRST_WAIT_S

    def next_wait_s(self) -> float:
        """Return how long to wait at the rendezvous until the next look at whether others train.

        It grows: who goes away for a moment may be the one that made those who wait enough.
        """
        now_s, wait_s = time.monotonic(), self._wait_s
        self._since_s = now_s if self._since_s is None else self._since_s
        self._wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        return max(min(wait_s, self._since_s + self._limit_s - now_s), _SHORTEST_WAIT_S)

    def check(self, error: Exception) -> None:
        """Go on after an epoch was not formed, for as long as there is time.

        Args:
            error: Why it was not.

        Raises:
            CrewError: There is none left.
        """
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s < self._limit_s:
            return
        if isinstance(error, TooFewError):
            raise CrewError(
                f"{error} within {self._limit_s:g} s; start more of them, and resume from a "
                "checkpoint"
            ) from error
        raise CrewError(
            f"workers came to the store and not to each other for {self._limit_s:g} s ({error}); "
            "can they connect at any port? GLOO_SOCKET_IFNAME names the interface"
        ) from error
