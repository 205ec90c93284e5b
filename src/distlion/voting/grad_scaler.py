"""What a GradScaler is told: torch hands an optimizer what it found, and asks nothing in return."""

from __future__ import annotations

import sys

from torch.amp.grad_scaler import GradScaler


def note_overflow() -> None:
    """Let the GradScaler whose ``step()`` is under way find an overflow, if there is one.

    Its ``update()`` reads only what it found among this worker's gradients. Where another worker's
    overflow makes all of them drop a step, it would keep its scale while that one halves its own:
    scales part, every worker tries larger ones in a step of its own, and all of them lose each.

    Notes:
        torch gives an optimizer no way to the scaler but an argument of ``step()`` that it warns
        of, so that it is looked up among the callers. What it found lies in a private attribute,
        there since GradScaler exists; tests hold both.
    """
    frame = sys._getframe()
    while frame.f_code is not GradScaler.step.__code__:
        if frame.f_back is None:
            return
        frame = frame.f_back
    scaler: GradScaler = frame.f_locals["self"]
    if not scaler.is_enabled():
        return
    # Of this optimizer alone: others of the same scaler may have their step still before them.
    state = scaler._per_optimizer_states[id(frame.f_locals["optimizer"])]
    for found_inf in state["found_inf_per_device"].values():
        found_inf.fill_(1.0)
