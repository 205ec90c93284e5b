"""Rates as people read them: ``100mbit``, ``10gbit``."""

from __future__ import annotations

_PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def format_rate(rate_bit_per_s: float) -> str:
    """Write a rate in bit/s to three digits with the prefix that fits, such as ``2.5gbit``."""
    for prefix in ("t", "g", "m", "k"):
        if rate_bit_per_s >= 0.9995 * _PREFIXES[prefix]:
            scaled = float(f"{rate_bit_per_s / _PREFIXES[prefix]:.3g}")
            return f"{scaled:g}{prefix}bit"
    return f"{float(f'{rate_bit_per_s:.3g}'):g}bit"
