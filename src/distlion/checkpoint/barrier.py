"""Steps that all processes take together or not at all: each reports its problems."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, TypeVar

from distlion.errors import CheckpointError, ReplicaMismatchError
from distlion.failures import name_ranks
from distlion.peers.ownership import Gather
from distlion.wire.ask import find_problem

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
            facts: Values that JSON can hold.

        Returns:
            The facts of each process.

        Raises:
            CheckpointError: Some process has a problem; on all of them.
        """
        self._rounds += 1
        at = f"{self._call}, round {self._rounds}"
        said = "" if problem is None else str(problem)
        record = json.dumps({"at": at, "problem": said, **facts}).encode()
        rows = [json.loads(row) for row in self._gather(record)]
        elsewhere = sorted({row["at"] for row in rows} - {at})
        if elsewhere:
            raise CheckpointError(f"{at}: another process is at {', '.join(elsewhere)}")
        culprits, told = find_problem([row["problem"] for row in rows])
        if culprits:
            raise self.refuse(culprits, told) from problem
        return rows

    def run(self, part: Callable[[], _Made]) -> _Made:
        """Do a part, and return its result once all processes have done theirs.

        Raises:
            CheckpointError: Some process could not; on all of them.
        """
        made, problem = attempt(part)
        self.share(problem)
        return made  # type: ignore[return-value]  # or all have raised

    def refuse(self, culprits: Sequence[int], said: str) -> CheckpointError:
        """Make the error that all processes raise."""
        who = name_ranks(culprits)
        error = CheckpointError(f"[rank {self._process}] {self._call} failed on {who}: {said}")
        # All raise it, and none has changed anything except files.
        error.is_recoverable = True
        return error

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
