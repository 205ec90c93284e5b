"""An independent oracle of votes on deltas: numpy, the equations, nothing of distlion or torch.

It holds all workers in one place. Of the layout on the wire it knows what decides scales: words of
64 elements, parameters one after the other, shards of whole blocks of 8 words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from oracle import (
    F32,
    FIRST_ZERO_DOMAIN,
    FLT_MAX,
    I64,
    TIE_DOMAIN,
    coin_key,
    coin_words,
    feedback_step,
    sign_of_estimates,
    signs_by_coin,
    tree_mean,
    updated,
)

LOT_DOMAIN = 1 << 63


@dataclass(frozen=True)
class DeltaRule:
    """A rule for deltas, as data."""

    kind: str  # scaled | stochastic | residual | estimate
    bits: int = 1


def cut_shards(sizes: Sequence[int], n_shards: int) -> list[list[slice]]:
    """Return the elements of each parameter that lie in the same shard, shard by shard."""
    n_words = [math.ceil(size / 64) for size in sizes]
    shard_words = 8 * math.ceil(sum(n_words) / (8 * n_shards))
    pieces = []
    for index, size in enumerate(sizes):
        begin = sum(n_words[:index])
        shards = [(begin + j // 64) // shard_words for j in range(size)]
        edges = [j for j in range(size) if j == 0 or shards[j] != shards[j - 1]]
        pieces.append([slice(a, b) for a, b in zip(edges, [*edges[1:], size], strict=True)])
    return pieces


def lots(seed: int, step: int, rank: int, first_word: int, n: int) -> I64:
    """Return 16 random bits of each element, of one worker at one step."""
    element = np.arange(n, dtype=np.uint64)
    key = coin_key(seed, step, LOT_DOMAIN + rank)
    words = coin_words(key, np.uint64(16 * first_word) + element // np.uint64(4))
    lanes = (words >> (np.uint64(16) * (element % np.uint64(4)))) & np.uint64(0xFFFF)
    return lanes.astype(np.int64)


def stochastic_signs(delta: F32, drawn: I64) -> I64:
    most = float(np.abs(delta).max())
    ratio = min(np.float32(32768 / most), FLT_MAX) if most else np.float32(0)
    level = np.clip(np.floor(delta * ratio), -32768, 32768).astype(np.int64)
    return np.where(drawn < 32768 + level, 1, -1)


@dataclass
class DeltaOracle:
    """The common point of all workers, and what their rule keeps."""

    params: list[F32]
    rule: DeltaRule
    world_size: int
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    seed: int = 0
    n_votes: int = 0
    kept: list[list[F32]] = field(init=False)
    buffers: list[F32] = field(init=False)

    def __post_init__(self) -> None:
        self.kept = [[np.zeros_like(p) for p in self.params] for _ in range(self.world_size)]
        self.buffers = [np.zeros_like(p) for p in self.params]
        self.pieces = cut_shards([p.size for p in self.params], self.world_size)

    def vote(self, deltas: Sequence[Sequence[F32 | None]]) -> None:
        """Do one vote; ``deltas[worker][param]`` is None where that worker abstains."""
        for index in range(len(self.params)):
            mine = {rank: row[index] for rank, row in enumerate(deltas)}
            here = {rank: delta for rank, delta in mine.items() if delta is not None}
            if here:
                self._move(index, *self._decide(index, here))
        self.n_votes += 1

    def _decide(self, index: int, deltas: dict[int, F32]) -> tuple[I64, list[np.float32]]:
        """Return S, and how far it reaches in each shard."""
        word = sum(math.ceil(p.size / 64) for p in self.params[:index])
        n = self.params[index].size
        ties = signs_by_coin(self.seed, self.n_votes, TIE_DOMAIN, word, n)
        pieces = self.pieces[index]
        if self.rule.kind in ("scaled", "stochastic"):
            votes = [self._sign(rank, delta, word) for rank, delta in deltas.items()]
            total = np.sum(votes, axis=0)
            sizes = [float(tree_mean(np.abs(delta), n)) for delta in deltas.values()]
            mean = 0.0
            for size in sizes:
                mean += size
            scale = np.float32(mean / len(sizes))
            return np.where(total == 0, ties, np.sign(total)), [scale] * len(pieces)
        said = []
        for rank, delta in deltas.items():
            kept = self.kept[rank][index]
            zeros = self._zeros(rank, word, n)
            if self.rule.kind == "residual":
                excess = -kept
                after = excess + feedback_step(delta - excess, self.rule.bits, zeros)
                said.append(feedback_step(delta - excess, self.rule.bits, zeros))
                self.kept[rank][index] = delta - after
            else:
                self.kept[rank][index] = kept + feedback_step(delta - kept, self.rule.bits, zeros)
        count = len(said)
        if self.rule.kind == "estimate":
            said, count = [mine[index] for mine in self.kept], self.world_size
        total = np.zeros(n, np.float32)
        for each in said:
            total = total + each
        scales = [
            tree_mean(np.abs(total[here]), (here.stop - here.start) * count) for here in pieces
        ]
        return sign_of_estimates(said, ties), scales

    def _sign(self, rank: int, delta: F32, word: int) -> I64:
        if self.rule.kind == "stochastic":
            drawn = lots(self.seed, self.n_votes, rank, word, delta.size)
            return stochastic_signs(delta, drawn)
        zeros = self._zeros(rank, word, delta.size)
        return np.where(delta > 0, 1, np.where(delta < 0, -1, zeros))

    def _zeros(self, rank: int, word: int, n: int) -> I64:
        return signs_by_coin(self.seed, self.n_votes, FIRST_ZERO_DOMAIN + rank, word, n)

    def _move(self, index: int, signs: I64, scales: list[np.float32]) -> None:
        before = self.params[index]
        rate = 1.0 if self.momentum else self.lr
        after = before.copy()
        for here, scale in zip(self.pieces[index], scales, strict=True):
            after[here] = updated(before[here], signs[here], rate * float(scale), 0.0, 1)
        if self.momentum:
            outcome = before - after
            mu = np.float32(self.momentum)
            buffer = self.buffers[index] = mu * self.buffers[index] + outcome
            move = buffer * mu + outcome if self.nesterov else buffer
            after = before - move * np.float32(self.lr)
        self.params[index] = after
