"""Rates of a lab's links, and the token buckets that enforce them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from distlion.errors import InvalidArgumentError
from distlion_lab.planning.quantity import format_rate, parse_rate

UNLIMITED = "unlimited"

# The separator of "up" and "down", but not the slash in "mbit/s" and "mbit/sec".
_SEPARATOR = re.compile(r"/(?!s(?:ec)?\b)", re.IGNORECASE)
# Below this rate, a burst of one frame takes minutes, which the kernel cannot count.
_LEAST_BIT_PER_S = 8_000.0
# The kernel takes bytes per second in 32 bits.
_MOST_BIT_PER_S = 8.0 * 0xFFFFFFFF
# Tokens that a bucket saves while a link is idle let bytes pass above the rate, so the bucket is
# small. With this size, one TCP stream carries 95.6 Mbit/s at 100mbit and 946 at 1gbit; headers
# leave 95.6 %. A larger bucket changes neither. At 10gbit the processor is the limit.
_BURST_S = 0.0002
_LEAST_BURST_BYTES = 16 * 1024
# Queue in front of a bucket. At 1gbit, three senders to one receiver lose packets with 1 MB, and
# none with 4 MB.
_LEAST_QUEUE_BYTES = 4 * 1024 * 1024
_QUEUE_S = 0.05


@dataclass(frozen=True)
class LinkRate:
    """The rate of one host's link in each direction.

    Args:
        up_bit_per_s: Limit of the host's sending; None is unlimited.
        down_bit_per_s: Limit of the host's receiving; None is unlimited.

    Raises:
        InvalidArgumentError: A rate is below 8 kbit/s or above 34 Gbit/s.
    """

    up_bit_per_s: float | None = None
    down_bit_per_s: float | None = None

    def __post_init__(self) -> None:
        for rate in (self.up_bit_per_s, self.down_bit_per_s):
            if rate is not None and not _LEAST_BIT_PER_S <= rate <= _MOST_BIT_PER_S:
                raise InvalidArgumentError(
                    f"rate {format_rate(rate)}: expected {format_rate(_LEAST_BIT_PER_S)} to "
                    f"{format_rate(_MOST_BIT_PER_S)}, or {UNLIMITED}"
                )

    @classmethod
    def parse(cls, text: str) -> LinkRate:
        """Read ``100mbit``, ``unlimited``, or separate rates up and down: ``100mbit/20mbit``.

        Raises:
            InvalidArgumentError: It is no rate, or out of range.
        """
        parts = _SEPARATOR.split(text)
        if len(parts) > 2:
            raise InvalidArgumentError(f"rate {text!r}: expected RATE or UP/DOWN")
        return cls(_parse_direction(parts[0]), _parse_direction(parts[-1]))

    def __str__(self) -> str:
        up, down = _format_direction(self.up_bit_per_s), _format_direction(self.down_bit_per_s)
        return up if up == down else f"{up}/{down}"


@dataclass(frozen=True)
class TokenBucket:
    """Parameters of a ``tbf`` queueing discipline.

    Attributes:
        bytes_per_s: Rate; Ethernet headers count, but checksum, preamble and gap do not.
        burst_bytes: Bytes that may leave at once after a pause.
        queue_bytes: Bytes that may wait; more are dropped.
    """

    bytes_per_s: int
    burst_bytes: int
    queue_bytes: int

    @classmethod
    def for_rate(cls, rate_bit_per_s: float) -> TokenBucket:
        """Choose burst and queue for a rate."""
        bytes_per_s = round(rate_bit_per_s / 8)
        return cls(
            bytes_per_s=bytes_per_s,
            burst_bytes=max(_LEAST_BURST_BYTES, round(bytes_per_s * _BURST_S)),
            queue_bytes=max(_LEAST_QUEUE_BYTES, round(bytes_per_s * _QUEUE_S)),
        )


def parse_host_rates(text: str, n_hosts: int) -> tuple[LinkRate, ...]:
    """Read one rate for all hosts, or one for each, separated by commas.

    Raises:
        InvalidArgumentError: A part is no rate, or their number is neither 1 nor ``n_hosts``.
    """
    rates = [LinkRate.parse(part) for part in text.split(",")]
    if len(rates) == 1:
        rates *= n_hosts
    if len(rates) != n_hosts:
        raise InvalidArgumentError(
            f"{len(rates)} rates for {n_hosts} hosts in {text!r}: expected one for all, or one for "
            "each"
        )
    return tuple(rates)


def _parse_direction(text: str) -> float | None:
    return None if text.strip().lower() == UNLIMITED else parse_rate(text)


def _format_direction(rate_bit_per_s: float | None) -> str:
    return UNLIMITED if rate_bit_per_s is None else format_rate(rate_bit_per_s)
