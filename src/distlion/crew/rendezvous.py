"""The rendezvous: a worker's connection to the store of a run, and what all write there."""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError

from distlion.crew.endpoint import parse_endpoint
from distlion.crew.lifeline import Lifeline
from distlion.crew.store import SignedStore
from distlion.errors import CrewError

logger = logging.getLogger("distlion")

DEFAULT_PORT = 29400
STORE_TIMEOUT_S = 5.0
"""Seconds that a store may be silent, unless the caller says otherwise."""
_NAME_SERVERS_S = 30
"""Seconds for torch's lookup of the name of each address that it connects to."""
_TRY_S = 0.1
MOST_WORKERS = 1024
ALIVE_S = 2.0
"""Seconds within which workers show several times that they are alive."""
_BEGUN, _ALIVE, _OVER, _SIGNED = "begun", "alive", "over", "signed"
NOW = "now"
"""Key of a line about the present members."""


def name_run(run_id: str) -> str:
    """Return the prefix of all keys of a run."""
    return f"distlion/{run_id}"


class FormingError(Exception):
    """A worker was lost while an epoch was formed."""


class TooFewError(FormingError):
    """Too few workers came in time."""


class MissingError(FormingError):
    """Some members did not come to form an epoch.

    Args:
        culprits: Their ranks.
    """

    def __init__(self, culprits: Sequence[int]) -> None:
        super().__init__(f"ranks {', '.join(map(str, culprits))} did not come")
        self.culprits = tuple(culprits)


class Rendezvous:
    """A worker's end of the rendezvous of a crew.

    Args:
        endpoint: "host:port" of the store.
        run_id: Name of the run.
        secret: Secret of the workers of the run.
        min_workers: Fewest workers that train.
        max_workers: Most workers that train.
        store_timeout_s: Seconds that the store may be silent.

    Attributes:
        store: The keys of this run.
        few: Text of the error where too few workers came.

    Raises:
        InvalidArgumentError, UnsupportedTypeError: The endpoint is not of this form.
        CrewError: No store answers there.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        run_id: str,
        secret: str,
        min_workers: int,
        max_workers: int,
        store_timeout_s: float = STORE_TIMEOUT_S,
    ) -> None:
        self._endpoint, self._run_id = endpoint, run_id
        self._address, self._store_timeout_s = parse_endpoint(endpoint), store_timeout_s
        self._max_workers = max_workers
        self._await_store()
        began_s = time.monotonic()
        self._lifeline = Lifeline(self._connect, store_timeout_s)
        key = hashlib.sha256(f"{run_id}\0{secret}".encode()).digest()
        self.store = SignedStore(self._lifeline.connect(), key, prefix=name_run(run_id))
        if (took_s := time.monotonic() - began_s) > store_timeout_s:
            logger.warning(
                "it took %.0f s to connect to the store at %s: torch looks up the name of each "
                "address, and a name server of this host seems not to answer (see "
                "/etc/resolv.conf)",
                took_s,
                endpoint,
            )
        self.few = f"fewer than {min_workers} workers came to {endpoint}"

    def _await_store(self) -> None:
        """Wait until a store listens at the endpoint.

        Raises:
            CrewError: None does.
        """
        until_s = time.monotonic() + self._store_timeout_s
        while True:
            try:
                socket.create_connection(self._address, timeout=self._store_timeout_s).close()
                return
            except OSError as error:
                if time.monotonic() + _TRY_S > until_s:
                    raise self._make_no_store_error() from error
            time.sleep(_TRY_S)

    def _connect(self) -> Any:
        host, port = self._address
        limit = timedelta(seconds=_NAME_SERVERS_S)
        try:
            store = dist.TCPStore(host, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        except (RuntimeError, ValueError) as error:
            raise self._make_no_store_error() from error
        store.set_timeout(timedelta(seconds=self._store_timeout_s))
        return store

    def _make_no_store_error(self) -> CrewError:
        port = self._address[1]
        return CrewError(
            f"no store answers at {self._endpoint} for the crew {self._run_id!r}; start one on a "
            f"host that stays: distlion crew --port {port}"
        )

    def make_gone_error(self, error: RuntimeError) -> CrewError:
        """Make the error for a store that does not answer any more."""
        return CrewError(
            f"the store at {self._endpoint} cannot be used ({error}); if it is gone, start it "
            "again and resume all workers from a checkpoint"
        )

    def check_secret(self) -> None:
        """Check that all workers of the run have the same secret.

        Raises:
            CrewError: They do not.
        """
        self.store.compare_set(_SIGNED, "", _SIGNED)

    def check_open(self) -> None:
        """Check that this worker may still join.

        Raises:
            CrewError: The run is over.
        """
        if self.store.check([_OVER]):
            raise CrewError(
                f"the run is over: the workers of {self._run_id!r} have finished; another run "
                "needs another run_id, or a restarted store"
            )

    def note_begun(self, number: int) -> None:
        """Note that the members of an epoch have begun it."""
        while (found := self.find_last_begun()) < number:
            self.store.compare_set(_BEGUN, str(found) if found else "", str(number))

    def say_alive(self, word: str) -> None:
        """Show that a worker that has trained is alive."""
        self.store.set(_ALIVE, word)

    def is_somebody_alive(self) -> bool:
        """Wait for the next sign of a worker that has trained; return False if none comes."""
        if not self.store.check([_ALIVE]):
            return False
        before, until_s = self.store.get(_ALIVE), time.monotonic() + ALIVE_S
        while time.monotonic() < until_s:
            time.sleep(ALIVE_S / 20)
            if self.store.get(_ALIVE) != before:
                return True
        return False

    def find_last_begun(self) -> int:
        """Return the number of the last epoch that has begun, 0 before the first one.

        Later numbers may be given, but unused.
        """
        return self.store.read(_BEGUN, int) if self.store.check([_BEGUN]) else 0

    def count_places(self, n_members: int) -> int:
        """Return how many more members there may be."""
        return self._max_workers - n_members

    def publish(self, now: str) -> None:
        """Publish the present members for observers."""
        with suppress(RuntimeError):  # a store that is gone is noticed where it is needed
            self.store.plain.set(NOW, now)

    def close(self) -> None:
        """End the run, so that nobody can join any more."""
        with suppress(DistError):  # nobody can join a store that is gone
            self.store.set(_OVER, "")
        self.end()

    def end(self) -> None:
        """Disconnect from the store."""
        self._lifeline.end()
