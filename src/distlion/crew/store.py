"""The store through which workers of a crew meet, and what all write."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from secrets import token_hex
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError

from distlion.crew.lifeline import Lifeline, cut_after
from distlion.crew.memory import ALIVE, CREW, NOW, Memory, raise_begun, read_begun
from distlion.crew.signed import SignedStore
from distlion.errors import CrewError, InvalidArgumentError, UnsupportedTypeError
from distlion.wire.heartbeats import RETURN_S

_EXAMPLES = 'expected "host:port", such as "head:29400", "10.0.0.1:29400" or "[::1]:29400"'
_PATTERN = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([\w.-]+)):([0-9]{1,5})")
MOST_PORTS = 65_535


def parse_endpoint(endpoint: object) -> tuple[str, int]:
    """Return the host and the port of an endpoint.

    Raises:
        UnsupportedTypeError: It is not text.
        InvalidArgumentError: It has no host or no port, or is an IPv6 address without brackets.
    """
    if not isinstance(endpoint, str):
        raise UnsupportedTypeError(f"endpoint={endpoint!r}: {_EXAMPLES}")
    found = _PATTERN.fullmatch(endpoint.strip())
    if found is None or not 0 < int(found[3]) <= MOST_PORTS:
        raise InvalidArgumentError(f"endpoint={endpoint!r}: {_EXAMPLES}")
    host = found[1] or found[2]
    try:
        host.encode("idna")  # as for its lookup
    except UnicodeError as error:
        raise InvalidArgumentError(f"endpoint={endpoint!r}: {_EXAMPLES} ({error})") from error
    return host, int(found[3])


_TIMEOUT_S = 10


def start_store(port: int, *, host: str = "0.0.0.0") -> Any:
    """Start a store in this process; it ends with the returned object.

    Args:
        port: Port on which it listens; 0 for any free one.
        host: The address by which this process itself reaches it.

    Raises:
        CrewError: The port is taken.
    """
    # torch asks a name server about each worker that connects, and all others wait meanwhile.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_TIMEOUT_S),
        )
    except (RuntimeError, ValueError) as error:
        raise CrewError(
            f"no store can listen at port {port} ({str(error).splitlines()[0]}); choose another "
            "--port"
        ) from error


logger = logging.getLogger("distlion")

DEFAULT_PORT = 29400
STORE_TIMEOUT_S = 5.0
"""Seconds that a store may be silent, unless the caller says otherwise."""
_NAME_SERVERS_S = 30
"""Seconds for torch's lookup of the name of each address that it connects to, and for an answer."""
_TRY_S = 0.1
MOST_WORKERS = 1024
ALIVE_S = 4.0
"""Seconds in which a worker that lives shows itself often, also while one call holds it up."""
_LOOK_S = 0.5
"""Most seconds that count between two looks for it: in a longer pause this worker was held up."""
_OVER, _SIGNED = "over", "signed"
MEMBERS_FIRST, TRAINED = "distlion/members first", "distlion/trained"
"""Keys, of no run: newcomers have to wait for members that come back, and some crew has trained."""
STORE_WAIT_S = 600.0
"""Seconds to wait for a store that is away, unless the caller says otherwise."""
_TELL_S = 30.0
"""Seconds between two words about that wait."""


def name_run(run_id: str) -> str:
    """Return the prefix of all keys of a run."""
    return f"distlion/{run_id}"


def name_epoch(number: int) -> str:
    """Return the prefix of all keys of an epoch, within those of its run."""
    return f"epoch {number}"


def name_member(identity: int) -> str:
    """Return the prefix of the keys that the processes of a member share, within those of a run."""
    return f"member {identity}"


@dataclass(frozen=True)
class Address:
    """The address of a run's store.

    Attributes:
        endpoint: "host:port".
        run_id: Name of the run.
        timeout_s: Seconds that the store may be silent.
    """

    endpoint: str
    run_id: str
    timeout_s: float

    @property
    def pair(self) -> tuple[str, int]:
        """Host and port."""
        return parse_endpoint(self.endpoint)

    def await_store(self) -> None:
        """Wait until a store listens there.

        Raises:
            CrewError: None does.
        """
        until_s = time.monotonic() + self.timeout_s
        while True:
            try:
                self.look()
                return
            except OSError as error:
                if time.monotonic() + _TRY_S > until_s:
                    raise self._make_no_store_error() from error
            time.sleep(_TRY_S)

    def look(self) -> None:
        """Look up the host, and see whether anybody listens.

        Raises:
            OSError: Nobody does.
        """
        socket.create_connection(self.pair, timeout=self.timeout_s).close()

    def connect(self) -> Any:
        """Connect to the store.

        Raises:
            CrewError: No store answers.
        """
        try:
            self.look()  # torch would try for long
        except OSError as error:
            raise self._make_no_store_error() from error
        host, port = self.pair
        limit = timedelta(seconds=_NAME_SERVERS_S)
        try:
            with cut_after(max(_NAME_SERVERS_S, self.timeout_s), port):
                store = dist.TCPStore(host, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        except (RuntimeError, ValueError) as error:
            raise self._make_no_store_error() from error
        store.set_timeout(timedelta(seconds=self.timeout_s))
        return store

    def _make_no_store_error(self) -> CrewError:
        return CrewError(
            f"no store answers at {self.endpoint} for the crew {self.run_id!r}; start one on a "
            f"host that stays: distlion crew --port {self.pair[1]}"
        )

    def make_gone_error(self, error: Exception) -> CrewError:
        """Make the error for a store that does not answer any more."""
        return CrewError(
            f"the store at {self.endpoint} cannot be used ({error}); if it is gone, start it "
            "again and resume all workers from a checkpoint"
        )


def _restore(memory: Memory, key: bytes, run_id: str, store: Any) -> None:
    memory.restore(SignedStore(store, key, prefix=name_run(run_id)))
    if memory.now:
        store.set(TRAINED, "")


class Rendezvous:
    """A worker's end of the rendezvous of a crew.

    Args:
        endpoint: "host:port" of the store.
        run_id: Name of the run.
        secret: Secret of the workers of the run.
        min_workers: Fewest workers that train.
        max_workers: Most workers that train.
        store_timeout_s: Seconds that the store may be silent.
        store_wait_s: Seconds that this worker waits for a store that is away once it needs it; None
            where a store that is lost ends it.
        silence_s: Seconds without a heartbeat after which a member is given up. All that have
            trained count as gone after twice as long without a sign; ``ALIVE_S`` is the least.

    Attributes:
        address: Host and port of the store.
        store: The keys of this run.
        memory: What this worker knows of the run.
        pulse: The heartbeats of this worker.
        few: Text of the error where too few workers came.
        name: The run and its endpoint, in words.

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
        store_wait_s: float | None = STORE_WAIT_S,
        silence_s: float = ALIVE_S / 2,
    ) -> None:
        self._address = Address(endpoint, run_id, store_timeout_s)
        self.name, self.address = f"{run_id!r} at {endpoint}", self._address.pair
        self._max_workers, self._store_wait_s = max_workers, store_wait_s
        self._waited_s = 0.0
        self.memory = Memory()
        # Whether this worker saw the store before any epoch was begun in it, and the signs after.
        self._was_new, self._came_s = False, -math.inf
        self._alive_s = max(ALIVE_S, 2 * silence_s)
        self._sign, self._quiet_s, self._looked_s = "", 0.0, -math.inf
        self._address.await_store()
        began_s = time.monotonic()
        # The environment may have bytes that are no text.
        key = hashlib.sha256(f"{run_id}\0{secret}".encode(errors="surrogateescape")).digest()
        self._lifeline = Lifeline(
            self._address.connect,
            store_timeout_s,
            restore=partial(_restore, self.memory, key, run_id),
            make_gone_error=None if store_wait_s is not None else self._address.make_gone_error,
            name=f"the store of the crew at {endpoint}",
        )
        self._connections, self.pulse = self._lifeline.connections, self._lifeline.pulse
        self.store = SignedStore(self._connections.main, key, prefix=name_run(run_id))
        self._beating = SignedStore(self._connections.asked, key, prefix=name_run(run_id))
        if (took_s := time.monotonic() - began_s) > store_timeout_s:
            logger.warning(
                "it took %.0f s to connect to the store at %s: torch looks up the name of each "
                "address, and a name server of this host seems not to answer (see "
                "/etc/resolv.conf)",
                took_s,
                endpoint,
            )
        self.few = f"fewer than {min_workers} workers came to {endpoint}"

    def make_gone_error(self, error: Exception) -> CrewError:
        """Make the error for a store that does not answer any more."""
        return self._address.make_gone_error(error)

    @property
    def trouble(self) -> CrewError | None:
        """The error for which this worker cannot go on, whatever becomes of the store."""
        return self._connections.trouble

    def await_back(self, error: Exception) -> bool:
        """Wait for a store that is away; return whether it was.

        Waits add up until an epoch is entered, so that a store that comes and goes has an end too.

        Args:
            error: The error of a request, of which the store may be the cause.

        Raises:
            CrewError: It stays away for ``store_wait_s``, or is of no use to this worker.
        """
        limit_s, was_away = self._store_wait_s, False
        told_s = time.monotonic()
        began_s = told_s - self._waited_s
        while self._connections.are_away:
            was_away = True
            if self.trouble is not None:
                raise self.trouble
            if limit_s is None:
                raise self.make_gone_error(error)
            now_s = time.monotonic()
            if now_s - began_s >= limit_s:
                why = f"it stayed away for {limit_s:g} s, the store_wait_s= of this worker"
                raise self.make_gone_error(RuntimeError(why))
            if now_s - told_s >= _TELL_S:
                told_s = now_s
                logger.warning(
                    "this worker has waited %.0f s for the store at %s, and waits for %g s in all; "
                    "start it again: distlion crew --port %d --members-first",
                    now_s - began_s,
                    self._address.endpoint,
                    limit_s,
                    self.address[1],
                )
            time.sleep(_TRY_S)
            self._waited_s = time.monotonic() - began_s
        return was_away

    def note_entered(self) -> None:
        """Note that this worker has what it needed from the store: an epoch."""
        self._waited_s, self._was_new = 0.0, False

    @property
    def is_away(self) -> bool:
        """True while the store is away."""
        return self._connections.are_away

    @property
    def was_away(self) -> bool:
        """True if this store is not the first one of this worker."""
        return self._connections.back_s > -math.inf

    def find_grace_s(self) -> float:
        """Return the seconds that others may still need to come back to the store."""
        return max(0.0, self._connections.back_s + RETURN_S - time.monotonic())

    def await_members(self) -> None:
        """Wait as long as the store lets nobody in but members that come back."""
        if self._connections.main.check([MEMBERS_FIRST]) and not self.store.check([CREW]):
            logger.info("newcomers wait: the store was started again, and members come back first")
        while self._connections.main.check([MEMBERS_FIRST]) and not self.store.check([CREW]):
            time.sleep(_TRY_S)

    def name_crew(self) -> str:
        """Return the token of the run's crew; draw it if this worker begins a crew."""
        return self.memory.crew or self.store.compare_set(CREW, "", token_hex(8))

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
                f"the run is over: the workers of {self._address.run_id!r} have finished; another "
                "run needs another run_id, or a restarted store"
            )

    def note_begun(self, number: int) -> None:
        """Note that the members of an epoch have begun it."""
        raise_begun(self.store, number)

    def begin_beating(self, epoch: int, place: int) -> None:
        """Show the other members of an epoch from now on that this one runs.

        Args:
            epoch: The number of the epoch.
            place: This worker's place among its members.
        """
        self.pulse.begin(self._beating.at(name_epoch(epoch)).plain, place)

    def begin_beating_inside(self, member: int, lane: int) -> SignedStore:
        """Show the other processes of a member from now on that this one runs.

        Args:
            member: The member's id.
            lane: The number of this process in it.

        Returns:
            The part of the store for these processes.
        """
        part = name_member(member)
        self.pulse.begin_inside(self._beating.at(part).plain, lane)
        return self.store.at(part)

    def say_alive(self, word: str) -> None:
        """Show that a worker that has trained is alive."""
        self.store.set(ALIVE, word)

    @property
    def has_signs(self) -> bool:
        """True if a worker that has trained is in this store, or was."""
        return self.store.check([ALIVE])

    def is_somebody_alive(self) -> bool:
        """Look for a new sign of a worker that has trained; return True for some time after one.

        Call this several times a second, for as long as the answer may matter. Where such workers
        have just come, as back to an empty store, more of them may come.
        """
        if not self.has_signs:
            return False
        now_s, word = time.monotonic(), self.store.get(ALIVE)
        since_s, self._looked_s = min(now_s - self._looked_s, _LOOK_S), now_s
        # A first word may be old.
        self._quiet_s = self._quiet_s + since_s if word == self._sign else 0.0
        self._sign = word
        if self._was_new:
            self._was_new, self._came_s = False, now_s
        return now_s < self._came_s + RETURN_S or self._quiet_s < self._alive_s

    def find_last_begun(self) -> int:
        """Return the last epoch that has begun, or was claimed to be the first one; 0 before.

        Later numbers may be given, but unused. In a store that has come back empty, the last one
        that this worker has heard of counts.
        """
        found = read_begun(self.store)
        self._was_new |= not found
        self.memory.note_begun(found)
        return self.memory.begun

    def count_places(self, n_members: int) -> int:
        """Return how many more members there may be."""
        return self._max_workers - n_members

    def publish(self, now: str) -> None:
        """Publish the present members for observers."""
        with suppress(RuntimeError):  # a store that is gone is noticed where it is needed
            self.store.plain.set(NOW, now)
            self._connections.main.set(TRAINED, "")

    def close(self) -> None:
        """End the run, so that nobody can join any more."""
        with suppress(DistError):  # nobody can join a store that is gone
            self.store.set(_OVER, "")
        self.end()

    def end(self) -> None:
        """Disconnect from the store."""
        self._lifeline.end()
