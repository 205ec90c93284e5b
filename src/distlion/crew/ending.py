"""The end of a run: a member waits for the others to finish."""

from __future__ import annotations

import logging
import time

from distlion.crew.epoch import Epoch
from distlion.crew.optimizer import CrewLion

logger = logging.getLogger("distlion")


def have_all_finished(epoch: Epoch, optimizer: CrewLion) -> bool:
    """Wait; return False if a member was lost, failed in its last step, or fell silent.

    Nobody waits for a member in a step any more, so each must show that it is alive; while it
    computes, its lookout does.

    Args:
        epoch: The present epoch.
        optimizer: This worker's optimizer.
    """
    limit_s = optimizer.silence_s
    heard: dict[str, tuple[str, float]] = {}
    epoch.store.set(f"finished/{epoch.members[epoch.place].id}", "")
    left = [str(member.id) for member in epoch.members]
    while left := [each for each in left if not epoch.store.check([f"finished/{each}"])]:
        if optimizer.has_lost_somebody:
            return False
        now_s = time.monotonic()
        for each in left:
            word = epoch.store.get(key) if epoch.store.check([key := f"alive/{each}"]) else ""
            if each not in heard or heard[each][0] != word:
                heard[each] = word, now_s
            elif now_s - heard[each][1] > limit_s:
                logger.warning("worker %s is silent; the others end without it", each)
                return False
        time.sleep(0.05)
    return True
