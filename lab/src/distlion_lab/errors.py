"""Exceptions of the lab; each is a ``DistlionError``."""

from __future__ import annotations

from typing import Any

from distlion.errors import DistlionError


class DataError(DistlionError, ValueError):
    """A data set, or a file of one, cannot be used."""


class UnwrittenRunError(DistlionError, OSError):
    """A run has ended, and a file of its folder cannot be written.

    Attributes:
        record: The run's record, for a caller that can save it elsewhere.
        is_record_written: Whether ``record.json`` was written nevertheless.
    """

    def __init__(self, message: str, *, record: Any, is_record_written: bool) -> None:
        super().__init__(message)
        self.record = record
        self.is_record_written = is_record_written


class WorkerFailedError(DistlionError, RuntimeError):
    """A worker process that distlion started has died."""


class NetlabError(DistlionError, RuntimeError):
    """A lab of network namespaces cannot be made, found or used."""
