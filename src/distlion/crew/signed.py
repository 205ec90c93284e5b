"""Entries of a store that are signed with the secret of a run."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from distlion.errors import CrewError

_Read = TypeVar("_Read")
_SHOWN = 60
"""Most characters of a value in an error."""
TAG_CHARACTERS = 2 * hashlib.sha256().digest_size


class SignedStore:
    """A store whose values are signed with the secret of a run.

        stored = HMAC-SHA256(key, name, value) in hex | value

    Counters (``add``) and what torch keeps under ``plain`` are not signed.

    Args:
        store: The store that keeps them.
        key: Key that only the workers of this run know.
        prefix: What stands before the names of all keys.

    Attributes:
        plain: The same keys, without signatures.
    """

    def __init__(self, store: Any, key: bytes, *, prefix: str = "") -> None:
        self.plain = PrefixStore(prefix, store) if prefix else store
        # torch keeps a store, and not what Python adds to it.
        self._store, self._key, self._prefix = store, key, prefix

    def at(self, prefix: str) -> SignedStore:
        """Return the part of the store with this prefix."""
        part = SignedStore(self._store, self._key)
        part.plain, part._prefix = PrefixStore(prefix, self.plain), f"{self._prefix}/{prefix}"
        return part

    def sign(self, name: str, text: str) -> str:
        """Return the signature of a value under this name."""
        said = f"{self._prefix}\0{name}\0{text}".encode()
        return hmac.digest(self._key, said, "sha256").hex()

    def check(self, names: Sequence[str]) -> bool:
        """Return whether there are values under all these names."""
        return bool(self.plain.check(list(names)))

    def set(self, name: str, text: str) -> None:
        """Set a value."""
        self.plain.set(name, self.sign(name, text) + text)

    def get(self, name: str) -> str:
        """Return a value.

        Raises:
            CrewError: Another secret, or none, has signed it.
        """
        return self._open(name, self.plain.get(name))

    def read(self, name: str, parse: Callable[[str], _Read]) -> _Read:
        """Return a value that has been parsed.

        Raises:
            CrewError: Another secret, or none, has signed it; or it cannot be parsed.
        """
        text = self.get(name)
        try:
            return parse(text)
        except (ValueError, TypeError, KeyError) as error:
            raise CrewError(
                f"the store has {name!r} = {text[:_SHOWN]!r}, which this worker cannot read "
                f"({type(error).__name__}: {error}); install the same distlion on all workers"
            ) from error

    def compare_set(self, name: str, expected: str, text: str) -> str:
        """Set a value if the present one is the expected one, "" for none; return the present one.

        Raises:
            CrewError: Another secret, or none, has signed it.
        """
        before = self.sign(name, expected) + expected if expected else ""
        return self._open(name, self.plain.compare_set(name, before, self.sign(name, text) + text))

    def add(self, name: str, number: int) -> int:
        """Add to a counter, and return it."""
        return int(self.plain.add(name, number))

    def delete_key(self, name: str) -> None:
        """Delete a value."""
        self.plain.delete_key(name)

    def _open(self, name: str, stored: bytes) -> str:
        found = stored.decode(errors="replace")
        tag, text = found[:TAG_CHARACTERS], found[TAG_CHARACTERS:]
        if not hmac.compare_digest(tag.encode(), self.sign(name, text).encode()):
            raise CrewError(
                f"the store has {name!r} = {found[:_SHOWN]!r}, which was not signed with the "
                "secret of this run; it is not used. Do all workers have the same secret and "
                "run_id, and does nobody else write to this store?"
            )
        return text
