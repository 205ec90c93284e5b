"""Steps that all processes take together or not at all: each reports its problems."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, TypeVar

from distlion.errors import CheckpointError, ReplicaMismatchError
from distlion.peers.ownership import Gather

RECORD_BYTES = 4096
"""Size of each record, so that all messages have one size."""

_PROBLEM_CHARACTERS = 1500


_Made = TypeVar("_Made")


def attempt(part: Callable[[], _Made]) -> tuple[_Made | None, CheckpointError | None]:
    """Do a part, and return its result or its error."""
    try:
        return part(), None
    except CheckpointError as error:
        return None, error
    except OSError as error:
        found = CheckpointError(f"{error.filename or 'the disk'}: {error.strerror or error}")
        found.__cause__ = error
        return None, found
    except Exception as error:  # noqa: BLE001, all others wait for this process
        found = CheckpointError(f"{type(error).__name__}: {str(error)[:300]}")
        found.__cause__ = error
        return None, found


class CheckpointBarrier:
    """Let all processes of a save or load agree before any goes on.

    Args:
        gather: Function that exchanges records between them.
        process: The number of this process.
        call: Name of their call, for errors.
    """

    def __init__(self, gather: Gather, *, process: int, call: str) -> None:
        self._gather = gather
        self._process = process
        self._call = call
        self._rounds = 0

    def share(self, problem: Exception | None, **facts: Any) -> list[dict[str, Any]]:
        """Share facts with all processes, unless one of them has a problem.

        Args:
            problem: Reason why this process cannot go on; None for no reason.
            facts: Short values that JSON can hold.

        Returns:
            The facts of each process.

        Raises:
            CheckpointError: Some process has a problem; on all of them.
        """
        self._rounds += 1
        at = f"{self._call}, round {self._rounds}"
        said = "" if problem is None else str(problem)[:_PROBLEM_CHARACTERS]
        record = json.dumps({"at": at, "problem": said, **facts}).encode()
        if len(record) > RECORD_BYTES:
            record = json.dumps(
                {"at": at, "problem": said[:200] or "a record is too long"}
            ).encode()
        gathered = self._gather(record.ljust(RECORD_BYTES, b"\0"))
        rows = [json.loads(row.rstrip(b"\0")) for row in gathered]
        elsewhere = sorted({row["at"] for row in rows} - {at})
        if elsewhere:
            raise CheckpointError(f"{at}: another process is at {', '.join(elsewhere)}")
        culprits = [number for number, row in enumerate(rows) if row["problem"]]
        if culprits:
            error = self.refuse(culprits, rows[culprits[0]]["problem"])
            raise error from problem
        return rows

    def refuse(self, culprits: Sequence[int], said: str) -> CheckpointError:
        """Make the error that all processes raise."""
        who = f"rank{'s' if len(culprits) > 1 else ''} {', '.join(map(str, culprits))}"
        error = CheckpointError(f"[rank {self._process}] {self._call} failed on {who}: {said}")
        # All raise it, and none has changed anything except files.
        error.is_recoverable = True
        return error

    def gather(self, row: bytes) -> list[bytes]:
        """Gather rows that have one length on all processes."""
        return self._gather(row)

    def compare(self, text: str, what: str) -> None:
        """Compare something that must be equal on all processes.

        Raises:
            CheckpointError: It is not; names the processes that differ from the first; on all.
        """
        sums = [row["sum"] for row in self.share(None, sum=sha256(text.encode()).hexdigest())]
        culprits = [number for number, each in enumerate(sums) if each != sums[0]]
        if culprits:
            raise self.refuse(culprits, f"{what} differ from rank 0's")

    def refuse_replicas(self, names: Sequence[str], *, step: int) -> ReplicaMismatchError:
        """Make the error for shared parameters that differ between processes."""
        listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return ReplicaMismatchError(
            f"{self._call}: replicas differ in {listed}; a checkpoint of them would hide it. "
            "Restart from an earlier one",
            rank=self._process,
            step=step,
            is_recoverable=True,
        )
