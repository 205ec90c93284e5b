"""The stages of an optimizer: a line for each option that has one."""

from __future__ import annotations

from collections.abc import Sequence

from distlion.step.clipping import build_clipping
from distlion.step.diagnostics import build_examination
from distlion.step.momentum import build_averaging
from distlion.step.settings import Settings
from distlion.step.stage import Stage, Surroundings


def build_stages(settings: Settings, among: Surroundings, earlier: Sequence[Stage]) -> list[Stage]:
    """Build the stages that the settings ask for, in their order; every rank must call it.

    Args:
        settings: The optimizer's settings.
        among: The other parts of the optimizer.
        earlier: The stages for fewer parameters, or other workers.

    Raises:
        InvalidArgumentError, UnsupportedTypeError: A setting does not suit the others.
    """
    built: list[Stage | None] = [
        build_clipping(settings.clip_norm, among),
        build_examination(settings, among, earlier),
        build_averaging(settings.momentum_sync, settings.exchange, among),
    ]
    return [stage for stage in built if stage is not None]
