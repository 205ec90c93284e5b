"""Rates as people write them: ``100mbit``, ``10gbit``."""

from __future__ import annotations

import math
import re

from distlion.errors import InvalidArgumentError

_RATE = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?)bit(?:/s)?", re.IGNORECASE)
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_rate(text: str) -> float:
    """Read a rate such as ``100mbit``, ``2.5gbit`` or ``800kbit/s``, in bit/s.

    Prefixes are decimal and their case does not matter, as for ``tc``. ``mbps`` and the like are
    refused: to some programs they mean bits, to others bytes.

    Raises:
        InvalidArgumentError: It is no rate, or not above 0.
    """
    match = _RATE.fullmatch(text.strip())
    rate_bit_per_s = float(match[1]) * _PREFIXES[match[2].lower()] if match else 0.0
    if not 0 < rate_bit_per_s < math.inf:
        raise InvalidArgumentError(
            f"rate {text!r}: expected a number above 0 with bit, kbit, mbit, gbit or tbit, such as "
            "100mbit or 2.5gbit"
        )
    return rate_bit_per_s


def format_rate(rate_bit_per_s: float) -> str:
    """Write a rate in bit/s to three digits with the prefix that fits, such as ``2.5gbit``."""
    for prefix in ("t", "g", "m", "k"):
        if rate_bit_per_s >= 0.9995 * _PREFIXES[prefix]:
            scaled = float(f"{rate_bit_per_s / _PREFIXES[prefix]:.3g}")
            return f"{scaled:g}{prefix}bit"
    return f"{float(f'{rate_bit_per_s:.3g}'):g}bit"
