"""An independent oracle of clients' votes: numpy, the equations, nothing of distlion or torch.

Of the layout on the wire it knows what is written in the documents: words of 64 elements, lowest
bit first, parameters one after the other, whole blocks of 8 words, then float32 scales in pieces of
64 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from delta_oracle import lots
from oracle import F32, FIRST_ZERO_DOMAIN, FLT_MAX, I64, TIE_DOMAIN, signs_by_coin, tree_mean

MOST_VOTES = 2**24


@dataclass(frozen=True)
class Sent:
    """A ballot that is in order: its node, its number of examples and its bytes."""

    node: int
    n_examples: int
    payload: bytes


def first_words(sizes: Sequence[int]) -> list[int]:
    return [sum(math.ceil(size / 64) for size in sizes[:index]) for index in range(len(sizes))]


def write_payload(signs: Sequence[I64], scales: Sequence[np.float32]) -> bytes:
    bits = b""
    for each in signs:
        bits += (
            np.packbits(each > 0, bitorder="little").tobytes().ljust(-(-each.size // 64) * 8, b"\0")
        )
    bits = bits.ljust(-(-len(bits) // 64) * 64, b"\0")
    tail = np.array(scales, dtype="<f4").tobytes()
    return bits + tail.ljust(-(-len(tail) // 64) * 64, b"\0")


def read_payload(payload: bytes, sizes: Sequence[int]) -> tuple[list[I64], F32]:
    n_words = sum(math.ceil(size / 64) for size in sizes)
    bits = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little").astype(np.int64)
    starts = [64 * word for word in first_words(sizes)]
    signs = [2 * bits[a : a + n] - 1 for a, n in zip(starts, sizes, strict=True)]
    tail = 64 * math.ceil(n_words / 8)
    return signs, np.frombuffer(payload, "<f4", count=len(sizes), offset=tail)


def encode(
    rule: str,
    deltas: Sequence[F32],
    residuals: list[F32],
    *,
    spread: float,
    reach: Sequence[float],
    seed: int,
    round_number: int,
    voter: int,
) -> bytes:
    """Return a client's bytes; residuals are replaced."""
    signs, scales = [], []
    words = first_words([delta.size for delta in deltas])
    for index, (delta, word) in enumerate(zip(deltas, words, strict=True)):
        rest = delta + residuals[index] if rule == "residual" else delta
        scale = tree_mean(np.abs(rest), rest.size)
        zeros = signs_by_coin(seed, round_number, FIRST_ZERO_DOMAIN + voter, word, delta.size)
        own = np.where(rest > 0, 1, np.where(rest < 0, -1, zeros))
        if rule == "stochastic":
            b = np.float32(reach[index]) if reach else np.float32(spread) * scale
            ratio = min(np.float32(32768 / float(b)), FLT_MAX) if b else np.float32(0)
            level = np.clip(np.floor(rest * ratio), -32768, 32768).astype(np.int64)
            own = np.where(lots(seed, round_number, voter, word, delta.size) < 32768 + level, 1, -1)
        if rule == "residual":
            # As the rule keeps it: h = -e is what was said too much, e = d - (h + q).
            residuals[index] = delta - (-residuals[index] + own.astype(np.float32) * scale)
        signs.append(own)
        scales.append(scale)
    return write_payload(signs, scales)


@dataclass
class ClientOracle:
    """The server: parameters by name, and what it keeps."""

    params: dict[str, F32]
    rule: str
    lr: float
    momentum: float
    spread: float
    weights: str
    max_weight: float
    min_replies: int
    seed: int = 0
    round_number: int = 0
    reach: list[float] = field(default_factory=list)
    buffers: dict[str, F32] = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = {name: np.zeros_like(x) for name, x in self.params.items()}

    def count(self, sent: Sequence[Sent]) -> bool:
        """Do one round with the ballots that are in order; return whether it counts."""
        number, self.round_number = self.round_number, self.round_number + 1
        if len(sent) < self.min_replies:
            return False
        sent = sorted(sent, key=lambda each: each.node)
        votes = self._weigh([each.n_examples for each in sent])
        sizes = [x.size for x in self.params.values()]
        read = [read_payload(each.payload, sizes) for each in sent]
        medians = np.sort([scales for _, scales in read], axis=0)[(len(sent) - 1) // 2]
        new_reach = [float(np.float32(self.spread) * each) for each in medians]
        words = first_words(sizes)
        for index, name in enumerate(self.params):
            signs = np.stack([each[index] for each, _ in read])
            scales = [each[index] for _, each in read]
            total = np.array(votes) @ signs
            if self.rule == "stochastic":
                b = self.reach[index] if self.reach else new_reach[index]
                u = np.float32(b / sum(votes)) * total.astype(np.float32)
            elif self.rule == "majority":
                ties = signs_by_coin(self.seed, number, TIE_DOMAIN, words[index], sizes[index])
                u = np.where(total == 0, ties, np.sign(total)).astype(np.float32) * medians[index]
            else:
                u = np.zeros(sizes[index], np.float32)
                most = np.float32(self.max_weight) * medians[index]
                for row, scale, n in zip(signs, scales, votes, strict=True):
                    rate = np.float32(float(min(scale, most)) * n / sum(votes))
                    u = u + rate * row.astype(np.float32)
            self._move(name, u)
        self.reach = new_reach if self.rule == "stochastic" else []
        return True

    def _weigh(self, examples: Sequence[int]) -> list[int]:
        if self.weights == "equal":
            return [1] * len(examples)
        median = sorted(examples)[(len(examples) - 1) // 2]
        votes = [min(n, math.floor(self.max_weight * median)) for n in examples]
        if sum(votes) > MOST_VOTES:
            divisor = math.ceil(sum(votes) / (MOST_VOTES - len(votes)))
            votes = [max(1, n // divisor) for n in votes]
        return votes

    def _move(self, name: str, u: F32) -> None:
        self.buffers[name] = np.float32(self.momentum) * self.buffers[name] + u
        self.params[name] = self.params[name] - np.float32(self.lr) * self.buffers[name]


def flat(params: Mapping[str, F32]) -> F32:
    return np.concatenate([np.ravel(x) for x in params.values()])
