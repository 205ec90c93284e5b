"""Optimizers that vote after several local steps."""

from distlion.local.local_steps import LocalSteps

__all__ = ["LocalSteps"]
