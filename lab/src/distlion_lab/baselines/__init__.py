"""Baselines for comparisons: DDP hooks over pure functions, one file for each paper."""

from distlion_lab.baselines.virtual import VirtualBaseline

__all__ = ["VirtualBaseline"]
