"""The trial of overlap: the first steps run with and without it, and the faster way stays."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean, median
from typing import Literal

from distlion.wire.ask import ask_texts
from distlion.wire.transport import Transport

logger = logging.getLogger("distlion")

UNTIMED_STEPS = 2
TIMED_STEPS = 6
# With overlap first, so that violations of its rules are reported at once.
STRETCHES = (True, False) * 4


class OverlapTrial:
    """The choice whether votes are sent during backward: given, or measured.

    With "auto" the first 64 steps run in stretches, with overlap and without. The results are
    bitwise identical. A stretch's time is the median of its steps, from the end of one to the end
    of the next, so that it covers everything in training. A stretch with overlap is compared with
    the next one, without. The median of these differences, averaged over all ranks, decides for all
    of them.

    Args:
        overlap: The given setting.
        clock: Function that returns seconds.

    Attributes:
        overlaps: Whether votes are sent during backward now.
        is_over: Whether the choice is final.
    """

    def __init__(
        self, overlap: bool | Literal["auto"], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.is_over = overlap != "auto"
        self.overlaps = STRETCHES[0] if overlap == "auto" else overlap
        self._clock = clock
        self._stretch = 0
        self._ends: list[float] = []
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def note_step(self, link: Callable[[], Transport], *, step: int) -> bool:
        """Note that a step is over; every rank must call it after the same steps.

        Args:
            link: Function that makes a link between all ranks.
            step: The step that errors name.

        Returns:
            Whether ``overlaps`` has changed.
        """
        if self.is_over:
            return False
        self._ends.append(self._clock())
        if len(self._ends) < UNTIMED_STEPS + TIMED_STEPS:
            return False
        ends = self._ends[UNTIMED_STEPS - 1 :]
        self._seconds[self.overlaps].append(median(end - start for start, end in pairwise(ends)))
        self._ends = []
        self._stretch += 1
        before = self.overlaps
        self.overlaps = (
            STRETCHES[self._stretch]
            if self._stretch < len(STRETCHES)
            else self._decide(link(), step)
        )
        return self.overlaps is not before

    def _decide(self, link: Transport, step: int) -> bool:
        differences = [
            with_s - without_s
            for with_s, without_s in zip(self._seconds[True], self._seconds[False], strict=True)
        ]
        medians = [median(each) for each in (differences, *self._seconds.values())]
        found = map(json.loads, ask_texts(link, json.dumps(medians), step=step))
        difference_s, with_s, without_s = map(fmean, zip(*found, strict=True))
        self.is_over = True
        faster = difference_s < 0
        if link.rank == 0:
            logger.info(
                "overlap='auto': a step takes %.3g ms with overlap, %.3g ms without; from step %d "
                "on votes leave %s backward",
                with_s * 1e3,
                without_s * 1e3,
                step,
                "during" if faster else "after",
            )
        return faster
