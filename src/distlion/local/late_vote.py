"""A vote that travels during local steps; its outcome is taken some steps later."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence, Set
from dataclasses import dataclass
from threading import Event, Thread

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from distlion.local.pairs import Pairs, forget_deltas, set_deltas
from distlion.optim.distributed_lion import DistributedLion

logger = logging.getLogger("distlion")


@dataclass
class _Outcome:
    """The end of a late vote.

    Attributes:
        error: Error that it raised; None for none, or before its end.
        is_taken: Whether a caller has received the outcome.
    """

    error: BaseException | None = None
    is_taken: bool = False


def _log_untaken(outcome: _Outcome) -> None:
    """Log the failure of a vote if nobody takes its outcome."""
    if outcome.error is not None and not outcome.is_taken:
        logger.error(
            "a late vote has failed, and nobody took its outcome: %s: %s",
            type(outcome.error).__name__,
            outcome.error,
        )


class LateVote:
    """A vote that is under way or has landed, and this worker's place when it began.

    Equation:
        y_i = x' + (y_i - b_i), b_i where the worker was when the vote began, x' the common point
        after it; x' where that is not finite

    The process does not exit before the vote ends, within the timeout of a step. An error that
    nobody takes is logged.

    Attributes:
        begun: b_i of each parameter, in its dtype.
        turn: The part of the parameters that it votes on.
        steps: Local steps that its deltas cover.
    """

    def __init__(self, begun: Sequence[Tensor], turn: int = 0, *, steps: int = 0) -> None:
        self.begun, self.turn, self.steps = list(begun), turn, steps
        self._thread: Thread | None = None
        self._outcome = _Outcome()
        weakref.finalize(self, _log_untaken, self._outcome)

    @classmethod
    def start(
        cls,
        votes: DistributedLion,
        has_entered: Event,
        pairs: Pairs,
        inner: Optimizer,
        turn: int,
        *,
        steps: int,
    ) -> LateVote:
        """Begin a vote on this worker's deltas, on a thread of its own.

        Args:
            votes: The optimizer that votes.
            has_entered: Event that it sets once a vote has begun its exchange.
            pairs: The parameters that vote, each with its common point.
            inner: The optimizer that takes the local steps.
            turn: The part of the parameters.
            steps: Local steps that the deltas cover.
        """
        late = cls([param.detach().clone() for param, _ in pairs], turn, steps=steps)
        set_deltas(pairs, inner)
        devices = {common.device for _, common in pairs if common.device.type == "cuda"}
        _wait_for(devices)  # the thread has streams of its own
        # No daemon: one that is still in Gloo when the interpreter exits dies by SIGABRT.
        thread = Thread(
            target=late._run,
            args=(votes, has_entered, pairs, devices),
            name="distlion-vote",
            daemon=False,
        )
        late._thread = thread
        has_entered.clear()
        thread.start()
        # On all workers its turn comes before the next calls of this thread; and the process group
        # may be destroyed from here on.
        has_entered.wait()
        return late

    def _run(
        self, votes: DistributedLion, has_entered: Event, pairs: Pairs, devices: Set[torch.device]
    ) -> None:
        try:
            if len(devices) == 1:  # a new thread is at device 0
                torch.cuda.set_device(*devices)
            votes.step()
            _wait_for(devices)
        except BaseException as error:  # noqa: BLE001, raised by land()
            self._outcome.error = error
        finally:
            has_entered.set()
            forget_deltas(pairs)

    @property
    def has_failed(self) -> bool:
        """True if the vote is over and changed nothing."""
        self.wait()
        return self._outcome.error is not None

    def wait(self) -> None:
        """Wait until the vote is over, however it ends; its optimizer may then be called."""
        if self._thread is not None:
            self._thread.join()

    @torch.no_grad()
    def land(self, pairs: Pairs) -> None:
        """Take the outcome; keep this worker's moves since the vote began.

        Raises:
            StepError, ProcessGroupError: The vote failed; nothing was taken.
        """
        self.wait()
        self._outcome.is_taken = True
        if self._outcome.error is not None:
            raise self._outcome.error
        for (param, common), begun in zip(pairs, self.begun, strict=True):
            move_on(param, common, begun)


def _wait_for(devices: Set[torch.device]) -> None:
    """Wait for this thread's work on the current streams of devices."""
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


@torch.no_grad()
def move_on(param: Tensor, common: Tensor, begun: Tensor) -> None:
    """Write x' + (y - b) into a parameter, computed in float32 where the parameter is."""
    target = common.detach().to(param.device, torch.float32)
    moved = target + (param.detach().float() - begun.float())
    param.copy_(torch.where(moved.isfinite(), moved, target))
