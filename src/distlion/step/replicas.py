"""The intervals at which replicas are compared, and the response where they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distlion.numpy_numbers import keep_as_python
from distlion.step.arguments import check_choice, check_count


@dataclass(frozen=True)
class Replicas:
    """Compare the parameters of all workers at intervals, which must be bitwise identical.

    Args:
        check_every: Steps between comparisons, 1 or more; None: never. Replicas are also compared
            in the first step after a start, a load or a change of workers, and 10 and 100 steps
            later.
        on_mismatch: "raise" ReplicaMismatchError where replicas differ, or "repair" them from the
            majority of workers.

    Raises:
        InvalidArgumentError: A value is out of range.
        UnsupportedTypeError: ``check_every`` is not an integer.

    Notes:
        ``verify_replicas()`` and ``save_checkpoint`` compare whatever ``check_every`` is.
    """

    check_every: int | None = 1000
    on_mismatch: Literal["raise", "repair"] = "raise"

    def __post_init__(self) -> None:
        keep_as_python(self, "check_every")
        check_count("Replicas.check_every", self.check_every, or_none=True)
        check_choice("Replicas.on_mismatch", self.on_mismatch, ("raise", "repair"))
