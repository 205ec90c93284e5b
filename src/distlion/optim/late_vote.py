"""A vote whose outcome is taken some steps after it began, so that it travels meanwhile."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence, Set
from dataclasses import dataclass
from threading import Thread

import torch
from torch import Tensor

from distlion.optim.common_point import CommonPoint
from distlion.optim.local_pairs import Pairs, forget_deltas, set_deltas

logger = logging.getLogger("distlion")


@dataclass
class _Outcome:
    """How a late vote ended.

    Attributes:
        error: What it raised; None for nothing, or before its end.
        is_taken: Whether somebody has heard of it.
    """

    error: BaseException | None = None
    is_taken: bool = False


def _log_untaken(outcome: _Outcome) -> None:
    """Say that a vote has failed whose outcome nobody takes any more."""
    if outcome.error is not None and not outcome.is_taken:
        logger.error(
            "a late vote has failed, and nobody took its outcome: %s: %s",
            type(outcome.error).__name__,
            outcome.error,
        )


class LateVote:
    """A vote that is under way, or has landed, and where this worker was when it began.

    Equation:
        y_i = x' + (y_i - b_i), b_i where the worker was when the vote began, x' the common point
        after it; x' where that is not finite

    The end of the process waits for its end, which the timeout of a step bounds. An error that
    nobody takes is logged.

    Attributes:
        begun: b_i of each parameter, in its dtype.
        turn: The part of the parameters that it is about.
        steps: Local steps that it is about.
    """

    def __init__(self, begun: Sequence[Tensor], turn: int = 0, *, steps: int = 0) -> None:
        self.begun, self.turn, self.steps = list(begun), turn, steps
        self._thread: Thread | None = None
        self._outcome = _Outcome()
        weakref.finalize(self, _log_untaken, self._outcome)

    @classmethod
    def start(cls, votes: CommonPoint, pairs: Pairs, turn: int, *, steps: int) -> LateVote:
        """Begin a vote on how far this worker has come, on a thread of its own."""
        late = cls([param.detach().clone() for param, _ in pairs], turn, steps=steps)
        set_deltas(pairs)
        devices = {common.device for _, common in pairs if common.device.type == "cuda"}
        _wait_for(devices)  # the thread has streams of its own
        # No daemon: one that is still in Gloo when the interpreter goes ends by SIGABRT.
        thread = Thread(
            target=late._run, args=(votes, pairs, devices), name="distlion-vote", daemon=False
        )
        late._thread = thread
        votes.has_entered.clear()
        thread.start()
        # Its turn is before all that this thread calls next, on all workers; and the process group
        # may be destroyed from here on.
        votes.has_entered.wait()
        return late

    def _run(self, votes: CommonPoint, pairs: Pairs, devices: Set[torch.device]) -> None:
        try:
            if len(devices) == 1:  # a new thread is at device 0
                torch.cuda.set_device(*devices)
            votes.step()
            _wait_for(devices)
        except BaseException as error:  # noqa: BLE001, raised by land()
            self._outcome.error = error
        finally:
            votes.has_entered.set()
            forget_deltas(pairs)

    @property
    def has_failed(self) -> bool:
        """True if the vote is over, and has taken nothing."""
        self.wait()
        return self._outcome.error is not None

    def wait(self) -> None:
        """Wait until the vote is over, however it ends: then its optimizer may be called."""
        if self._thread is not None:
            self._thread.join()

    @torch.no_grad()
    def land(self, pairs: Pairs) -> None:
        """Take the outcome; what this worker has moved since the vote began stays.

        Raises:
            StepError, ProcessGroupError: As the vote; nothing was taken.
        """
        self.wait()
        self._outcome.is_taken = True
        if self._outcome.error is not None:
            raise self._outcome.error
        for (param, common), begun in zip(pairs, self.begun, strict=True):
            move_on(param, common, begun)


def _wait_for(devices: Set[torch.device]) -> None:
    """Wait for what this thread has put on the current streams of devices."""
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


@torch.no_grad()
def move_on(param: Tensor, common: Tensor, begun: Tensor) -> None:
    """Write x' + (y - b) into a parameter, computed in float32 where the parameter is."""
    target = common.detach().to(param.device, torch.float32)
    moved = target + (param.detach().float() - begun.float())
    param.copy_(torch.where(moved.isfinite(), moved, target))
