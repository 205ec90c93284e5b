"""Numbers as people write them: ``1,000``, ``125M`` parameters, ``1Gbps``, ``500ms``."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from distlion.errors import InvalidArgumentError

# A comma or underscore stands before groups of three digits only: 1,3 is no number.
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?:_[0-9]{3})+|[0-9]+)"
_NUMBER = rf"(?P<number>(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]{{1,3}})?)"
_BARE = re.compile(rf"[+-]?{_NUMBER}", re.IGNORECASE)
_COUNT = re.compile(rf"{_NUMBER}\s*(?P<unit>[kmbgt]?)", re.IGNORECASE)
_RATE = re.compile(
    rf"{_NUMBER}\s*(?P<prefix>[kmgt]?)i?(?P<noun>b(?:it|yte)?s?)?(?:ps|/s(?:ec)?)?", re.IGNORECASE
)
_TIME = re.compile(rf"{_NUMBER}\s*(?P<unit>[a-zµ]*)", re.IGNORECASE)

_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_NANOSECONDS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "sec": 10**9,
    "min": 60 * 10**9,
    "h": 3600 * 10**9,
}
_MOST = Decimal(10) ** 18
# A bare number below this more likely means Gbit/s, with the unit forgotten.
_LEAST_BARE_BIT_PER_S = 1000

_MOST_WHOLE = (1 << 63) - 1

WHOLE_FORMS = "a whole number of 64 bits, such as 4, 1000, 1,000 or 1e3"
NUMBER_FORMS = "a finite number, such as 0.5, 1,000 or 1e-3"
COUNT_FORMS = "a whole number above 0, such as 1e9, 125M or 1.3B (K, M, B or G, T)"
RATE_FORMS = "a number of bits a second above 0, such as 100mbit, 10gbit, 1Gbps, 2.5Gbit/s or 1e9"
TIME_FORMS = "a number with ns, us, ms, s, min or h, such as 500ms"


def parse_whole(text: str) -> int:
    """Read a whole number such as ``4``, ``-1``, ``1,000`` or ``1e3``.

    Raises:
        InvalidArgumentError: ``text`` is no whole number, or one of more than 64 bits.
    """
    number = _read_bare(text)
    if number is None or abs(number) > _MOST_WHOLE or number != number.to_integral_value():
        raise InvalidArgumentError(f"{text!r}: expected {WHOLE_FORMS}")
    return int(number)


def parse_number(text: str) -> float:
    """Read a number such as ``0.5``, ``-1``, ``1,000`` or ``1e-3``.

    Raises:
        InvalidArgumentError: ``text`` is no number, or none that float64 holds.
    """
    number = _read_bare(text)
    if number is None or not math.isfinite(float(number)):
        raise InvalidArgumentError(f"{text!r}: expected {NUMBER_FORMS}")
    return float(number)


def parse_count(text: str) -> int:
    """Read a whole number such as ``1e9``, ``125M``, ``1.3B`` or ``1,000,000``.

    Suffixes are decimal, and their case does not matter: K, M, B or G, T.

    Raises:
        InvalidArgumentError: ``text`` is no whole number, or one below 1 or above 10^18.
    """
    match = _COUNT.fullmatch(text.strip())
    count = _read(match["number"]) * _THOUSANDS[match["unit"].lower()] if match else Decimal(0)
    if not 1 <= count <= _MOST or count != count.to_integral_value():
        raise InvalidArgumentError(f"count {text!r}: expected {COUNT_FORMS}")
    return int(count)


def parse_rate(text: str) -> float:
    """Read a rate such as ``100mbit``, ``2.5Gbit/s``, ``1Gbps`` or ``1e9``, in bit/s.

    Prefixes are decimal. Case matters only for a lone letter: b is a bit, B a byte. Rates in bytes
    are refused, and the message converts them to bits.

    Raises:
        InvalidArgumentError: ``text`` is no rate, in bytes, or not above 0.
    """
    match = _RATE.fullmatch(text.strip())
    rate = _read(match["number"]) * _THOUSANDS[match["prefix"].lower()] if match else Decimal(0)
    # The least Decimals are 0 as a float.
    if match is None or not 0 < float(rate) <= _MOST:
        raise InvalidArgumentError(f"rate {text!r}: expected {RATE_FORMS}")
    noun = match["noun"] or ""
    if noun.lower().startswith("byte") or (noun.startswith("B") and len(noun) < len("bit")):
        raise InvalidArgumentError(
            f"rate {text!r} is in bytes; expected {RATE_FORMS}. In bits it is "
            f"{format_rate(float(8 * rate))}"
        )
    is_bare = not noun and not match["prefix"]
    if is_bare and rate < _LEAST_BARE_BIT_PER_S:
        raise InvalidArgumentError(f"rate {text!r} has no unit; expected {RATE_FORMS}")
    return float(rate)


def format_rate(rate_bit_per_s: float) -> str:
    """Format a rate in bit/s to three digits with the fitting prefix, such as ``2.5gbit``."""
    for prefix in ("t", "g", "m", "k"):
        if rate_bit_per_s >= 0.9995 * _THOUSANDS[prefix]:
            scaled = float(f"{rate_bit_per_s / _THOUSANDS[prefix]:.3g}")
            return f"{scaled:g}{prefix}bit"
    return f"{float(f'{rate_bit_per_s:.3g}'):g}bit"


def parse_seconds(text: str, *, unit: str = "s") -> float:
    """Read a time such as ``500ms``, ``0.5``, ``100us`` or ``2min``, in seconds.

    Args:
        text: The time.
        unit: Unit of a number without one.

    Raises:
        InvalidArgumentError: ``text`` is no time, or negative.
    """
    match = _TIME.fullmatch(text.strip())
    nanoseconds = _NANOSECONDS.get(match["unit"].lower() or unit) if match else None
    if match is None or nanoseconds is None or _read(match["number"]) > _MOST:
        raise InvalidArgumentError(
            f"time {text!r}: expected {TIME_FORMS}; without a unit it is in {unit}"
        )
    return float(_read(match["number"]) * nanoseconds / 10**9)


def _read_bare(text: str) -> Decimal | None:
    match = _BARE.fullmatch(text.strip())
    return _read(match[0]) if match else None


def _read(number: str) -> Decimal:
    return Decimal(re.sub("[,_]", "", number))
