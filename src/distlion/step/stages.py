"""The stages of an optimizer: a line for each option that has one."""

from __future__ import annotations

from distlion.step.clipping import build_clipping
from distlion.step.settings import Settings
from distlion.step.stage import Stage, Surroundings


def build_stages(settings: Settings, among: Surroundings) -> list[Stage]:
    """Build the stages that the settings ask for, in their order; every rank must call it.

    Args:
        settings: The optimizer's settings.
        among: The other parts of the optimizer.
    """
    built: list[Stage | None] = [
        build_clipping(settings.clip_norm, among),
    ]
    return [stage for stage in built if stage is not None]
