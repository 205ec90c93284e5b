"""Patience: the limits of a worker's wait for an epoch."""

from __future__ import annotations

import time

from distlion.crew.rendezvous import TooFewError
from distlion.errors import CrewError

_LONGEST_PAUSE_S = 60.0
# Longer than the others need to form an epoch.
_PAUSE_S = 10.0


class Patience:
    """The patience of a worker without an epoch.

    Args:
        limit_s: Seconds until it gives up.

    Attributes:
        failures: Number of epochs in a row that failed to form with it.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.rest()

    def rest(self) -> None:
        """Note that an epoch was formed."""
        self.failures = 0
        self._since_s: float | None = None

    def find_left_s(self) -> float:
        """Return the time until this worker gives up; it begins with the first call."""
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        return self._since_s + self._limit_s - now_s

    def find_pause_s(self) -> float:
        """Return the time to leave the others alone: 0 after one failure, then longer each time.

        At least half of the time left remains for new attempts.
        """
        if self.failures < 2:
            return 0.0
        wanted_s: float = min(_PAUSE_S * 2 ** (self.failures - 2), _LONGEST_PAUSE_S)
        return max(0.0, min(wanted_s, self.find_left_s() / 2))

    def check(self, error: Exception) -> None:
        """Allow another attempt after an epoch was not formed, as long as there is time.

        Args:
            error: The reason why it was not formed.

        Raises:
            CrewError: No time is left.
        """
        if self.find_left_s() > 0:
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
