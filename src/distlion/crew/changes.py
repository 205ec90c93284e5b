"""Changes of a crew's members: logged with their reasons, and counted."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch.distributed import DistError

from distlion.crew.epoch import Epoch, Member
from distlion.errors import CrewError, PeerLostError, StepTimeoutError
from distlion.step.traffic import Traffic

logger = logging.getLogger("distlion")

_LONGEST_REASON = 200
_UNKNOWN = "did not come to this epoch"


@dataclass(frozen=True)
class CrewTraffic(Traffic):
    """The traffic of a crew's worker in all epochs, and the changes of members.

    No figure includes the bytes that form an epoch, such as a newcomer's parameters.

    Attributes:
        members: Members of the last epoch that this worker was in.
        epoch: Its number, which grows whenever members change; not a pass over the data.
        epochs_formed: Epochs that this worker was in.
        members_lost: Number of members that were in one of these epochs and not in the next.
        forming_s: Seconds in which this worker formed epochs and took no steps. They include the
            wait for the others before its first step, but not the time until a loss is noticed.
    """

    members: int = 0
    epoch: int = 0
    epochs_formed: int = 0
    members_lost: int = 0
    forming_s: float = 0.0

    def list_scalars(self) -> dict[str, float]:
        """Return the numbers that loggers show."""
        return super().list_scalars() | {
            "members": float(self.members),
            "epoch": float(self.epoch),
            "epochs_formed": float(self.epochs_formed),
            "members_lost": float(self.members_lost),
            "forming_s": self.forming_s,
        }


class Changes:
    """The changes of a crew's members, as one worker sees them.

    Attributes:
        counted: Totals so far; steps and bytes are 0.
    """

    def __init__(self) -> None:
        self.counted = CrewTraffic()
        self._epoch: Epoch | None = None
        self._reasons: dict[int, str] = {}

    def note_loss(self, error: BaseException, epoch: Epoch) -> None:
        """Note why members of an epoch are lost.

        Args:
            error: The error; it names their ranks if it is about a loss.
            epoch: The epoch, which may not have been formed completely.
        """
        if isinstance(error, (PeerLostError, StepTimeoutError)):
            reason = "silent" if isinstance(error, StepTimeoutError) else "connection closed"
            for place in epoch.find_places(error.culprits):
                self._reasons[epoch.members[place].id] = reason

    def note_epoch(self, epoch: Epoch, *, seconds: float) -> None:
        """Count an epoch, and log the members that left or came, with reasons."""
        before, members = self._epoch, epoch.members
        left = [] if before is None else _list_missing(before.members, epoch)
        logger.info(
            "epoch %d formed in %.2f s: %d workers, at step %d, rank %d here; left: %s; came: %s",
            epoch.number,
            seconds,
            len(members),
            members[0].step,
            epoch.place,
            _join(f"worker {each} ({self._explain(each)})" for each in left),
            _join(_describe_arrivals(before, epoch)),
        )
        self.counted = replace(
            self.counted,
            members=len(members),
            epoch=epoch.number,
            epochs_formed=self.counted.epochs_formed + 1,
            members_lost=self.counted.members_lost + len(left),
            forming_s=self.counted.forming_s + seconds,
        )
        self._epoch = epoch
        self._reasons.clear()

    def say_goodbye(self, error: BaseException) -> None:
        """Tell the others why this worker leaves, before its connections close."""
        # After a CrewError the store may not answer, and this would wait for it again.
        if not isinstance(error, CrewError):
            self.tell_end(f"{type(error).__name__}: {error}")

    def tell_end(self, why: str) -> None:
        """Tell the others, in case that they train on, why this worker does not."""
        epoch = self._epoch
        if epoch is None:
            return
        key = _name_goodbye(epoch.members[epoch.place].id)
        with suppress(DistError):
            epoch.store.set(key, _shorten(why))

    def _explain(self, identity: int) -> str:
        """Explain why a member of the last epoch is gone, in its own words or from observation."""
        seen, key = self._reasons.get(identity, _UNKNOWN), _name_goodbye(identity)
        assert self._epoch is not None  # it was a member
        # These are words for the log: a store that is gone is noticed where it is needed.
        with suppress(DistError, CrewError):
            if self._epoch.store.check([key]):
                return f"left by itself, {_shorten(self._epoch.store.get(key))}"
        return seen


def _name_goodbye(identity: int) -> str:
    return f"goodbye/{identity}"


def _shorten(said: str) -> str:
    """Shorten words to a part of one line."""
    return " ".join(said.split())[:_LONGEST_REASON]


def _list_missing(members: Sequence[Member], epoch: Epoch) -> list[int]:
    """List the ids of members that an epoch lacks."""
    return sorted({member.id for member in members} - {member.id for member in epoch.members})


def _describe_arrivals(before: Epoch | None, epoch: Epoch) -> list[str]:
    """Describe the members that are new or return; on a newcomer, also those there before."""
    known = set() if before is None else {member.id for member in before.members}
    described = []
    for member in sorted(epoch.members, key=lambda member: member.id):
        if member.epoch == 0:
            described.append(f"worker {member.id} (new)")
        elif before is None:
            described.append(f"worker {member.id} (there before)")
        elif member.id not in known or member.epoch < epoch.members[0].epoch:
            described.append(f"worker {member.id} (back)")
    return described


def _join(described: Iterable[str]) -> str:
    return ", ".join(described) or "nobody"
