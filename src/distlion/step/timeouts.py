"""The limits of waits for other workers."""

from __future__ import annotations

from dataclasses import dataclass

from distlion.numpy_numbers import keep_as_python
from distlion.step.arguments import check_seconds
from distlion.wire.roll_call import BUSY_TIMEOUT_S

_INIT_S = 300.0


@dataclass(frozen=True)
class Timeouts:
    """Limit the waits for other workers; each worker may have limits of its own.

    Args:
        init_s: Seconds for the handshake, the initial broadcast, and each exchange of a load or of
            a save in the foreground; None: 300. In a crew, seconds to wait for a member that falls
            silent while an epoch is formed; None: 30.
        step_s: Seconds of silence in a collective after which a worker counts as failed; below 2
            there is no time to ask whether it is busy. A member of a crew that sends no heartbeats
            is given up sooner: ``Crew(silence_s=)``.
        busy_s: Seconds to wait for a worker that answers but is elsewhere, such as in an
            evaluation, and for the slowest disk of a save in the background; torch's default. Up to
            ``step_s``: no longer than for a silent one.

    Raises:
        InvalidArgumentError: A value is not above 0, or is above 1e9.
        UnsupportedTypeError: A value is not a number.
    """

    init_s: float | None = None
    step_s: float = 60.0
    busy_s: float = BUSY_TIMEOUT_S

    def __post_init__(self) -> None:
        keep_as_python(self, "init_s", "step_s", "busy_s")
        if self.init_s is not None:
            check_seconds("Timeouts.init_s", self.init_s)
        check_seconds("Timeouts.step_s", self.step_s)
        check_seconds("Timeouts.busy_s", self.busy_s)

    @property
    def start_s(self) -> float:
        """Seconds for each exchange of a construction: ``init_s`` or its default."""
        return _INIT_S if self.init_s is None else self.init_s

    @property
    def connect_s(self) -> float:
        """Seconds to make the optimizer's own groups, and for an exchange of a checkpoint."""
        return max(self.start_s, self.step_s)

    @property
    def group_s(self) -> float:
        """Longest time of an operation on the optimizer's own process groups, in seconds."""
        return max(self.connect_s, self.busy_s)
