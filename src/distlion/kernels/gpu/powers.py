"""Powers of x modulo the polynomial of the CRC-32, bits reflected: bit 31 - i stands for x^i."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from distlion.kernels.gpu import checks

ONE = 1 << 31
POLYNOMIAL = checks.CRC_POLYNOMIAL.value
LANES, TURNS = checks.LANES.value, checks.TURNS.value


def multiply(one: int, other: int) -> int:
    """Multiply two polynomials modulo the CRC's polynomial."""
    product = 0
    while other:
        if other & ONE:
            product ^= one
        other = (other << 1) & 0xFFFFFFFF
        one = (one >> 1) ^ (POLYNOMIAL if one & 1 else 0)
    return product


def raise_x(exponent: int) -> int:
    """Compute x^exponent."""
    power, square = ONE, ONE >> 1
    while exponent:
        if exponent & 1:
            power = multiply(power, square)
        square = multiply(square, square)
        exponent >>= 1
    return power


def _list_multiples(first: int, factor: int, count: int) -> list[int]:
    powers = [first]
    while len(powers) < count:
        powers.append(multiply(powers[-1], factor))
    return powers


@functools.lru_cache(maxsize=8)
def _list_fixed(n_chunks: int) -> tuple[int, ...]:
    """List the powers that do not depend on the length of a row."""
    word, step = raise_x(32), raise_x(32 * LANES)
    steps = [multiply(1 << bit, step) for bit in range(32)]
    lanes = _list_multiples(word, word, LANES)[::-1]
    chunks = _list_multiples(ONE, raise_x(32 * LANES * TURNS), n_chunks)
    return (*steps, *lanes, *chunks)


def list_powers(n_bytes: int, n_chunks: int) -> npt.NDArray[np.uint32]:
    """List the factors of ``checks.checksum_kernel``, in its order."""
    return np.array([raise_x(8 * n_bytes), *_list_fixed(n_chunks)], dtype=np.uint32)
