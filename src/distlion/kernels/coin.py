"""The coin: unbiased random bits that are the same on every machine and in every backend.

Equation:
    mix(z): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB;
            z ^= z >> 31                                                          (modulo 2^64)
    key = mix(mix(mix(seed) + t) + domain)
    coin(w) = mix(key + (w + 1) * 0x9E3779B97F4A7C15): 64 bits, one for each element of word w

Ties and zeros take t = step // 2 and the inverse of the coin at odd steps, so that an element
without any information is back in its place after every second step, instead of drifting.

Reference:
    splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

from dataclasses import dataclass

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB

COINS = 1
"""Version of the coins: a saved run draws the same ones again only with the same version."""

TIE_DOMAIN = 0
ROUNDING_DOMAIN = 1
ZERO_DOMAIN = 2
LOT_DOMAIN = 1 << 63
"""Domain beyond every voter's zero coin, as ids are less than this."""


def mix(value: int) -> int:
    """Finalize ``value`` modulo 2^64 as splitmix64 does: a bijection that spreads every bit."""
    value &= MASK
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & MASK
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & MASK
    return value ^ (value >> 31)


def derive_key(seed: int, t: int, domain: int) -> int:
    """Derive the key of one domain at time ``t``: mix(mix(mix(seed) + t) + domain)."""
    z = 0
    for value in (seed, t, domain):
        # The same as ``mix``, without three calls for each coin of each step.
        z = (z + value) & MASK
        z = ((z ^ (z >> 30)) * MULTIPLIER_1) & MASK
        z = ((z ^ (z >> 27)) * MULTIPLIER_2) & MASK
        z ^= z >> 31
    return z


@dataclass(frozen=True)
class Coin:
    """A row of random words, addressed by global word.

    Attributes:
        key: 64 bits, unsigned.
        inverted: Whether every bit is flipped.
    """

    key: int
    inverted: bool = False

    @property
    def second(self) -> Coin:
        """A coin that is independent of this one, and inverted if this one is."""
        return Coin(mix(self.key), self.inverted)

    def word(self, w: int) -> int:
        """Draw word ``w``, unsigned, one by one; ops draw many words at once."""
        bits = mix(self.key + (w + 1) * GOLDEN)
        return bits ^ MASK if self.inverted else bits


@dataclass(frozen=True)
class Coins:
    """The coins of one step on one worker.

    Attributes:
        seed: The optimizer's seed, equal on all workers.
        step: The step, counted from 0.
        voter: The worker's id among the voters.
    """

    seed: int
    step: int
    voter: int

    @property
    def tie(self) -> Coin:
        """The coin that breaks ties; equal on all workers."""
        return self._paired(TIE_DOMAIN)

    @property
    def zero(self) -> Coin:
        """The coin that votes where directions are 0; each worker has its own."""
        return self._paired(ZERO_DOMAIN + self.voter)

    @property
    def rounding(self) -> Coin:
        """The coin of stochastic rounding; equal on all workers, so that replicas stay equal."""
        return Coin(derive_key(self.seed, self.step, ROUNDING_DOMAIN))

    @property
    def lot(self) -> Coin:
        """The coin of 16 bits per element, as for ``rounding``; each worker has its own."""
        return Coin(derive_key(self.seed, self.step, LOT_DOMAIN + self.voter))

    def _paired(self, domain: int) -> Coin:
        return Coin(derive_key(self.seed, self.step // 2, domain), inverted=self.step % 2 == 1)
