"""Patience: the limits of a worker's wait for an epoch."""

from __future__ import annotations

import time

from distlion.crew.rendezvous import OthersTrainError, TooFewError
from distlion.errors import CrewError

_FIRST_WAIT_S, _LONGEST_WAIT_S, _SHORTEST_WAIT_S = 15.0, 60.0, 0.1

# Longer than the others need: torch removes a worker 6 s after its last heartbeat.
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
        self._wait_s = _FIRST_WAIT_S

    def next_wait_s(self) -> float:
        """Return the wait at the rendezvous until the next check whether others train.

        It grows, so that a worker does not leave just before enough have come.
        """
        now_s, wait_s = time.monotonic(), self._wait_s
        self._since_s = now_s if self._since_s is None else self._since_s
        self._wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        return max(min(wait_s, self._since_s + self._limit_s - now_s), _SHORTEST_WAIT_S)

    def find_pause_s(self) -> float:
        """Return the time to leave the others alone: 0 after one failure, then longer each time.

        At least half of the time left remains for new attempts.
        """
        if self.failures < 2:
            return 0.0
        wanted_s: float = min(_PAUSE_S * 2 ** (self.failures - 2), _LONGEST_WAIT_S)
        since_s = time.monotonic() if self._since_s is None else self._since_s
        left_s: float = since_s + self._limit_s - time.monotonic()
        return max(0.0, min(wanted_s, left_s / 2))

    def check(self, error: Exception) -> None:
        """Allow another attempt after an epoch was not formed, as long as there is time.

        Args:
            error: The reason why it was not formed.

        Raises:
            CrewError: No time is left.
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
        if isinstance(error, OthersTrainError):
            raise CrewError(f"{error} for {self._limit_s:g} s; is max_workers reached?") from error
        raise CrewError(
            f"workers came to the store and not to each other for {self._limit_s:g} s ({error}); "
            "can they connect at any port? GLOO_SOCKET_IFNAME names the interface"
        ) from error
