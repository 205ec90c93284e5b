"""A worker of a crew as seen by the others."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

STRANGER = (
    "the crew trains with other settings, other parameters or another version of distlion than "
    "this worker; start it with the same script as the others"
)


@dataclass(frozen=True)
class Member:
    """A worker of a crew.

    Attributes:
        id: Its unique number.
        epoch: The last epoch that it completed; 0 for a newcomer.
        step: Number of steps in its parameters.
        calls: Number of its local steps; 0 where every step is a vote.
        settings: Digest of its parameters' kinds and of its settings.
        host: Its host, for logs.
        pid: Its process number there.
    """

    id: int
    epoch: int
    step: int
    settings: int
    host: str
    pid: int
    calls: int = 0

    @property
    def progress(self) -> tuple[int, int, int]:
        """Its progress, for comparison: a later epoch wins, whatever the step."""
        return self.epoch, self.step, self.calls

    def describe(self) -> dict[str, Any]:
        """Return it in the form that the store keeps."""
        return asdict(self)

    @classmethod
    def parse(cls, text: str) -> Member:
        """Read it from the store.

        Raises:
            ValueError, TypeError: Another version has written it.
        """
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return f"worker {self.id} ({self.host}, process {self.pid})"


def describe_self(identity: int, *, epoch: int, step: int, calls: int, settings: int) -> Member:
    """Describe this process as a member."""
    return Member(identity, epoch, step, settings, os.uname().nodename, os.getpid(), calls)
