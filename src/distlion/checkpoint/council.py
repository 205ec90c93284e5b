"""Processes that do something together, or not at all: each says what kept it from its part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from distlion.errors import CheckpointError, ReplicaMismatchError
from distlion.voting import Gather

RECORD_BYTES = 4096
"""Of each record, so that what travels has one size."""

_PROBLEM_CHARACTERS = 1500


class Council:
    """All processes of an optimizer, during one save or load.

    Args:
        gather: Connects them.
        process: The number of this one.
        call: What they are at, for errors.
    """

    def __init__(self, gather: Gather, *, process: int, call: str) -> None:
        self._gather = gather
        self._process = process
        self._call = call

    def share(self, problem: Exception | None, **facts: Any) -> list[dict[str, Any]]:
        """Hear from all processes what they found, unless one of them has a problem.

        Args:
            problem: What keeps this one from going on; None for nothing.
            facts: What JSON can hold, short.

        Returns:
            The facts of each.

        Raises:
            CheckpointError: Some process has a problem; on all of them.
        """
        said = "" if problem is None else str(problem)[:_PROBLEM_CHARACTERS]
        record = json.dumps({"problem": said, **facts}).encode()
        if len(record) > RECORD_BYTES:
            record = json.dumps({"problem": said[:200] or "a record is too long"}).encode()
        gathered = self._gather(record.ljust(RECORD_BYTES, b"\0"))
        rows = [json.loads(row.rstrip(b"\0")) for row in gathered]
        culprits = [number for number, row in enumerate(rows) if row["problem"]]
        if culprits:
            error = self._refuse(culprits, rows[culprits[0]]["problem"])
            raise error from problem
        return rows

    def _refuse(self, culprits: Sequence[int], said: str) -> CheckpointError:
        who = f"rank{'s' if len(culprits) > 1 else ''} {', '.join(map(str, culprits))}"
        error = CheckpointError(f"[rank {self._process}] {self._call} failed on {who}: {said}")
        # All raise it, and none has changed anything but files.
        error.is_recoverable = True
        return error

    def gather_equal(self, row: bytes, what: str) -> list[bytes]:
        """Gather rows that must have one length on all processes.

        Raises:
            CheckpointError: They have not; on all processes.
        """
        lengths = {fact["length"] for fact in self.share(None, length=len(row))}
        if len(lengths) > 1:
            raise self._refuse([self._process], f"processes have different {what}")
        return self._gather(row)

    def refuse_replicas(self, names: Sequence[str], *, step: int) -> ReplicaMismatchError:
        """Say that parameters which all processes share are not equal."""
        listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return ReplicaMismatchError(
            f"{self._call}: replicas differ in {listed}; a checkpoint of them would hide it. "
            "Restart from an earlier one",
            rank=self._process,
            step=step,
            is_recoverable=True,
        )
