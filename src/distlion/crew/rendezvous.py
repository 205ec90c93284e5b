"""The rendezvous: torch finds the workers and keeps them alive; its shared state is signed here."""

from __future__ import annotations

import hashlib
import hmac
import inspect
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)

from distlion.crew.endpoint import parse_endpoint
from distlion.crew.lifeline import Lifeline
from distlion.crew.store import SignedStore
from distlion.errors import CrewError

logger = logging.getLogger("distlion")

DEFAULT_PORT = 29400
KEEP_ALIVE_S = 1
MISSED_KEEP_ALIVES = 6
"""Intervals of silence after which a worker is removed; it may just be busy, or starved."""
LAST_CALL_S = 1.5
"""Seconds within which all waiting workers come, as they look once a second."""
STORE_TIMEOUT_S = 5.0
"""Seconds that a store may be silent, unless the caller says otherwise."""
_NAME_SERVERS_S = 30
"""Seconds for torch's lookup of the name of each address that it connects to."""
_TRY_S = 0.1
_ROLL_BACK_S = 2.0
MOST_WORKERS = 1024
ALIVE_S = 2.0
"""Seconds within which workers show several times that they are alive."""
_BEGUN, _ALIVE = "begun", "alive"
NOW = "now"
"""Key of a line about the present members."""
_TAG_BYTES = hashlib.sha256().digest_size


def name_run(run_id: str) -> str:
    """Return the prefix of all keys of a run."""
    return f"distlion/{run_id}"


class FormingError(Exception):
    """A worker was lost while an epoch was formed."""


class TooFewError(FormingError):
    """Too few workers came to the rendezvous in time."""


class OthersTrainError(FormingError):
    """Others have begun an epoch without this worker."""


class MissingError(FormingError):
    """Some members did not come to form an epoch.

    Args:
        culprits: Their ranks.
    """

    def __init__(self, culprits: Sequence[int]) -> None:
        super().__init__(f"ranks {', '.join(map(str, culprits))} did not come")
        self.culprits = tuple(culprits)


class SignedBackend(RendezvousBackend):
    """The signed state of a rendezvous: torch unpickles it, which would run a stranger's code.

        stored = HMAC-SHA256(key, state) | state

    Args:
        backend: The backend that keeps the bytes.
        key: Key that only the workers of this run know.
        before: Function called before each request; torch makes one a second while it waits.
    """

    def __init__(
        self, backend: RendezvousBackend, key: bytes, before: Callable[[], None] = lambda: None
    ) -> None:
        self._backend, self._key, self._before = backend, key, before

    @property
    def name(self) -> str:
        """Name of the backend that keeps the bytes."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state and its token, or None where there is none yet.

        Raises:
            RendezvousStateError: It was signed with another key, or not at all.
        """
        self._before()
        found = self._backend.get_state()
        return None if found is None else (self._open(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Replace the state that has this token; return what is there now.

        Raises:
            RendezvousStateError: The stored state was signed with another key, or not at all.
        """
        self._before()
        found = self._backend.set_state(self._tag(state) + state, token)
        return None if found is None else (self._open(found[0]), found[1], found[2])

    def _tag(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, "sha256")

    def _open(self, signed: bytes) -> bytes:
        tag, state = signed[:_TAG_BYTES], signed[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(state)):
            raise RendezvousStateError(
                "the state of the rendezvous was not signed with the secret of this run; it is not "
                "read. Do all workers have the same secret and run_id?"
            )
        return state


def _find_keep_alive() -> dict[str, int]:
    """Return the settings of torch's heartbeats; torch 2.6 does not take them."""
    wanted = {"keep_alive_interval": KEEP_ALIVE_S, "keep_alive_max_attempt": MISSED_KEEP_ALIVES}
    known = inspect.signature(DynamicRendezvousHandler.from_backend).parameters
    return {name: value for name, value in wanted.items() if name in known}


@dataclass(frozen=True)
class Round:
    """A round of the rendezvous: the workers that came to it.

    Attributes:
        store: This round's own part of the store.
        place: The place of this worker among the workers that came.
        size: Their number.
    """

    store: SignedStore
    place: int
    size: int


class Rendezvous:
    """A worker's end of the rendezvous of a crew.

    Args:
        endpoint: "host:port" of the store.
        run_id: Name of the run.
        secret: Secret of the workers of the run.
        min_workers: Fewest workers in a round.
        max_workers: Most workers in a round; with so many it does not wait for more.
        store_timeout_s: Seconds that the store may be silent.

    Attributes:
        store: The keys of this run, over a connection for this worker's own requests.

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
        self._min_workers, self._max_workers = min_workers, max_workers
        self._await_store()
        began_s = time.monotonic()
        self._lifeline = Lifeline(self._connect, store_timeout_s)
        # A read that waits blocks its connection, so heartbeats have their own.
        self._key = hashlib.sha256(f"{run_id}\0{secret}".encode()).digest()
        keys = self._lifeline.connect()
        self.store = SignedStore(keys, self._key, prefix=name_run(run_id))
        # Otherwise each round's first worker would open a port for a needless store.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._heartbeats, self._rounds = self._lifeline.connect(), self._lifeline.connect()
        if (took_s := time.monotonic() - began_s) > store_timeout_s:
            logger.warning(
                "it took %.0f s to connect to the store at %s: torch looks up the name of each "
                "address, and a name server of this host seems not to answer (see "
                "/etc/resolv.conf)",
                took_s,
                endpoint,
            )
        self._handler: DynamicRendezvousHandler | None = None
        self._begun_before: int | None = None
        self._join_until_s, self._joining_thread = 0.0, 0
        self._few = f"fewer than {min_workers} workers came to {endpoint}"

    def _make_handler(self, limit_s: float) -> DynamicRendezvousHandler:
        backend = C10dRendezvousBackend(self._heartbeats, self._run_id)
        made: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
            self._run_id,
            self._rounds,
            SignedBackend(backend, self._key, self._look_at_others),
            self._min_workers,
            self._max_workers,
            # Containers may share one host name and one process number.
            local_addr=f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}",
            timeout=RendezvousTimeout(
                join=timedelta(seconds=limit_s),
                last_call=timedelta(seconds=LAST_CALL_S),
            ),
            **_find_keep_alive(),
        )
        return made

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

    def join(self, limit_s: float, last: int) -> Round:
        """Wait for the next round, and take part in it.

        Args:
            limit_s: Seconds to wait.
            last: The number of the last epoch that had begun, as this worker knows.

        Raises:
            TooFewError: Fewer than ``min_workers`` came.
            OthersTrainError: Others have begun an epoch meanwhile.
            FormingError: The first worker that came is gone again.
            CrewError: A stranger writes to the store, or the store is gone.
        """
        try:
            if self._handler is None:
                self._handler = self._make_handler(limit_s)
            self._joining_thread = threading.get_ident()
            self._join_until_s = time.monotonic() + limit_s + _ROLL_BACK_S
            self._begun_before = last
            found = self._handler.next_rendezvous()
        except (FormingError, CrewError):  # of this worker's own look
            self._handler = None
            raise
        except RendezvousTimeoutError as error:
            self._handler = None
            raise TooFewError(self._few) from error
        except (RendezvousClosedError, RendezvousGracefulExitError) as error:
            raise CrewError(
                f"the run is over: the workers of {self._run_id!r} have finished; another run "
                "needs another run_id, or a restarted store"
            ) from error
        except DistStoreError as error:
            # All wait here for the first one's address, which nobody needs.
            raise FormingError(str(error)) from error
        except RendezvousStateError as error:
            raise CrewError(str(error)) from error
        except (RendezvousError, RuntimeError) as error:
            raise CrewError(
                f"the store at {self._endpoint} cannot be used ({error}); if it is gone, start it "
                "again and resume all workers from a checkpoint"
            ) from error
        finally:
            self._begun_before = None
        return Round(SignedStore(found.store, self._key), found.rank, found.world_size)

    def _look_at_others(self) -> None:
        """Give up this worker's wait once others have begun an epoch, or time is over."""
        before = self._begun_before
        if before is None or threading.get_ident() != self._joining_thread:
            return  # torch's heartbeats begin before the round's first worker has come
        if self.find_last_begun() != before:
            raise OthersTrainError("others train")
        if time.monotonic() > self._join_until_s:  # torch has the first round's limit
            raise TooFewError(self._few)

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

    def leave(self) -> None:
        """Leave the present round: nobody waits for this worker until it joins again.

        torch keeps a worker in its round while it sends heartbeats, and begins the next round
        without it only once they stop.
        """
        self._handler = None  # its heartbeats end with the object

    def end(self) -> None:
        """Leave, and disconnect from the store."""
        self.leave()
        self._lifeline.end()

    def close(self) -> None:
        """End the run, so that nobody can join any more."""
        try:
            # A worker that the others let in has none yet.
            (self._handler or self._make_handler(self._store_timeout_s)).shutdown()
        finally:
            self._lifeline.end()
