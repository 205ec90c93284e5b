"""An independent oracle of distributed Lion: numpy, the equations, nothing of distlion.

Matrix products alone are torch's, as every library rounds them in its own way.

It holds all workers in one place and works parameter by parameter, worker by worker. There are no
buckets, shards or packed words here: what it shares with the library is the specification
(arithmetic, coin, rules), not a line of code.

Values are float32 arrays; those of bfloat16 parameters are float32 values that bfloat16 can hold.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Vote = tuple[F32, F32, I64, I64]  # c, g, and what they vote where they are 0

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
TIE_DOMAIN, ROUNDING_DOMAIN, FIRST_ZERO_DOMAIN = 0, 1, 2
SCALE_BLOCK = 4096
FLT_MAX = np.finfo(np.float32).max


def mix(z: int) -> int:
    """Return the splitmix64 finalizer of a 64-bit number, in Python integers."""
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def mix_array(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the splitmix64 finalizer of every element."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def coin_key(seed: int, t: int, domain: int) -> int:
    return mix((mix((mix(seed) + t) & MASK) + domain) & MASK)


def coin_words(key: int, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the 64 random bits of each global word."""
    with np.errstate(over="ignore"):
        return mix_array(np.uint64(key) + (words + np.uint64(1)) * np.uint64(GOLDEN))


def signs_by_coin(
    seed: int, step: int, domain: int, first_word: int, n: int, *, second: bool = False
) -> I64:
    """Return +1 or -1 for each coordinate: the coin of step // 2, inverted at odd steps."""
    key = coin_key(seed, step // 2, domain)
    coordinate = np.arange(n, dtype=np.uint64)
    places = np.uint64(first_word) + coordinate // np.uint64(64)
    words = coin_words(mix(key) if second else key, places)
    bits = (words >> (coordinate % np.uint64(64))) & np.uint64(1)
    signs = 2 * bits.astype(np.int64) - 1
    return -signs if step % 2 else signs


def rounding_bits(seed: int, step: int, first_word: int, n: int) -> NDArray[np.uint32]:
    """Return the 16 random bits of each coordinate of a parameter at a step."""
    coordinate = np.arange(n, dtype=np.uint64)
    words = coin_words(
        coin_key(seed, step, ROUNDING_DOMAIN),
        np.uint64(16 * first_word) + coordinate // np.uint64(4),
    )
    lanes = (words >> (np.uint64(16) * (coordinate % np.uint64(4)))) & np.uint64(0xFFFF)
    return lanes.astype(np.uint32)


def round_to_bfloat16(x: F32) -> F32:
    """Round to the nearest bfloat16, ties to even, in integer arithmetic on the bits of float32."""
    bits = x.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), rounded, bits & np.uint32(0xFFFF0000)).view(np.float32)


def round_to_bfloat16_by_coin(x: F32, random_bits: NDArray[np.uint32]) -> F32:
    """Add 16 random bits below the kept mantissa, then truncate."""
    return ((x.view(np.uint32) + random_bits) & np.uint32(0xFFFF0000)).view(np.float32)


def store(x: F32, dtype: str) -> F32:
    return round_to_bfloat16(x) if dtype == "bfloat16" else x


def weighted_sum(beta: float, old: F32, new: F32) -> F32:
    """fl(fl(beta * old) + fl((1 - beta) * new)), constants computed in double, rounded once."""
    return np.float32(beta) * old + np.float32(1.0 - beta) * new


def updated(x: F32, total: I64, lr: float, weight_decay: float, divisor: int) -> F32:
    """x' = fl(fl(d * x) - fl(a * S)), before it is rounded to storage."""
    decay = np.float32(1.0 - lr * weight_decay)
    alpha = np.float32(lr / divisor)
    return decay * x - alpha * total.astype(np.float32)


def orthogonalized(c: F32) -> F32:
    """Muon's five Newton-Schulz iterations: towards the nearest matrix with orthogonal rows."""
    x = torch.from_numpy(c if c.shape[0] <= c.shape[1] else c.T)
    if x.any():
        x = x / x.abs().max()
        x = x / torch.linalg.matrix_norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return (x if c.shape[0] <= c.shape[1] else x.T).numpy()


@dataclass
class Lion64:
    """Lion in float64, for one flat parameter; what every approximation is measured against."""

    beta1: float
    beta2: float
    exp_avg: F64

    def direction(self, grad: F64) -> F64:
        return self.beta1 * self.exp_avg + (1.0 - self.beta1) * grad

    def move_momentum(self, grad: F64) -> None:
        self.exp_avg = self.beta2 * self.exp_avg + (1.0 - self.beta2) * grad


@dataclass(frozen=True)
class Rule:
    """An aggregation rule, as data."""

    kind: str  # majority | ternary | masked | average | quantized | feedback | full
    tie: str = "random"
    bits: int = 1
    norm: str = "l1"
    step: float = 1.0
    dtype: str = "float32"


def block_scale(block: F32, norm: str) -> np.float32:
    """Return the norm of at most 4,096 directions: the mean magnitude or the largest one."""
    if norm == "linf":
        return np.float32(np.abs(block).max())
    tree = np.zeros(SCALE_BLOCK, dtype=np.float64)
    tree[: block.size] = np.abs(block).astype(np.float64)
    while tree.size > 1:
        tree = tree[: tree.size // 2] + tree[tree.size // 2 :]
    return np.float32(tree[0] / block.size)


def reciprocal(scale: np.float32, step: float) -> np.float32:
    """r = min(fp32(1 / (s * step)), FLT_MAX), in double until the one rounding."""
    product = float(scale) * step
    if product == 0.0:
        return FLT_MAX
    with np.errstate(over="ignore"):
        return min(np.float32(1.0 / product), FLT_MAX)


def quantized_votes(direction: F32, rule: Rule, zero_signs: I64) -> I64:
    largest = np.float32(2 ** (rule.bits - 1) - 1)
    votes = np.empty(direction.size, dtype=np.int64)
    for start in range(0, direction.size, SCALE_BLOCK):
        here = slice(start, start + SCALE_BLOCK)
        block = direction[here]
        r = reciprocal(block_scale(block, rule.norm), rule.step)
        with np.errstate(over="ignore"):
            level = np.minimum(np.floor(np.abs(block) * r), largest).astype(np.int64)
        sign = np.where(block > 0, 1, np.where(block < 0, -1, zero_signs[here]))
        votes[here] = sign * (2 * level + 1)
    return votes


def tree_mean(sizes: F32, count: int) -> np.float32:
    """Sum in double, halving 4,096 numbers at a time and their sums again; divide; round once."""
    sums = sizes.astype(np.float64)
    while sums.size > 1:
        rows = np.zeros((math.ceil(sums.size / SCALE_BLOCK), SCALE_BLOCK))
        rows.reshape(-1)[: sums.size] = sums
        while rows.shape[1] > 1:
            half = rows.shape[1] // 2
            rows = rows[:, :half] + rows[:, half:]
        sums = rows[:, 0]
    return np.float32(sums[0] / count)


def feedback_step(rest: F32, bits: int, zero_signs: I64) -> F32:
    """Return what one or two bits, and a scale for each of them, say of a parameter's rest."""
    sizes = np.abs(rest)
    said = np.full(rest.size, tree_mean(sizes, rest.size))
    if bits == 2:
        is_large = sizes >= said
        for chosen in (is_large, ~is_large):
            among = np.where(chosen, sizes, np.float32(0))
            said[chosen] = tree_mean(among, max(1, int(chosen.sum())))
    sign = np.where(rest > 0, 1, np.where(rest < 0, -1, zero_signs)).astype(np.float32)
    return sign * said


def worker_votes(direction: F32, rule: Rule, zero_signs: I64) -> I64:
    """Return the integers that a worker votes."""
    if rule.kind == "ternary":
        return np.sign(direction).astype(np.int64)
    if rule.kind == "quantized":
        return quantized_votes(direction, rule, zero_signs)
    return np.where(direction > 0, 1, np.where(direction < 0, -1, zero_signs))


def combine(votes: Sequence[Vote], rule: Rule, tie_signs: I64) -> I64:
    """Return S, the integers of the reply to the votes of those present, in rank order."""
    directions, _, zero_signs, _ = zip(*votes, strict=True)
    if rule.kind == "feedback":  # of workers that have not said anything before
        after = [
            feedback_step(direction, rule.bits, zeros)
            for direction, zeros in zip(directions, zero_signs, strict=True)
        ]
        return sign_of_estimates(after, tie_signs)
    if rule.kind == "full":
        mean_like = np.zeros_like(directions[0])
        for direction in directions:
            sent = round_to_bfloat16(direction) if rule.dtype == "bfloat16" else direction
            mean_like = mean_like + sent
        return np.sign(mean_like).astype(np.int64)
    total = np.sum([worker_votes(c, rule, zeros) for c, _, zeros, _ in votes], axis=0)
    if rule.kind == "masked":
        of_grads = np.sum([worker_votes(g, rule, zeros) for _, g, _, zeros in votes], axis=0)
        total = np.where(np.sign(total) == np.sign(of_grads), total, 0)
    if rule.kind == "average":
        return total
    majority = np.sign(total)
    if rule.kind == "ternary" or rule.tie == "zero":
        return majority
    return np.where(majority == 0, tie_signs, majority)


def sign_of_estimates(estimates: Sequence[F32], tie_signs: I64) -> I64:
    """Return the sign of the sum in float32, in rank order; the coin's where it is 0."""
    total = np.zeros_like(estimates[0])
    for estimate in estimates:
        total = total + estimate
    return np.where(total == 0, tie_signs, np.sign(total).astype(np.int64))


@dataclass
class Group:
    """A parameter group: flat parameters, which every worker holds equally, and its settings."""

    params: list[F32]
    rule: Rule
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    dtype: str = "float32"
    cautious: bool = False
    rows: int = 0
    """Rows of the matrices that its parameters are, whose directions are orthogonalized."""


@dataclass
class OracleCluster:
    """All workers of a run. Parameters are counted through the groups, in order."""

    groups: list[Group]
    world_size: int
    seed: int = 0
    stochastic: bool = False
    exp_avg_dtype: str | None = None
    nonfinite: str = "raise"
    step_number: int = 0
    weights: Sequence[int] | None = None
    exp_avgs: list[list[F32]] = field(init=False)
    estimates: list[list[F32]] = field(init=False)
    first_words: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.exp_avgs = [[] for _ in range(self.world_size)]
        self.estimates = [[] for _ in range(self.world_size)]
        self.first_words = []
        groups, self.groups = self.groups, []
        for group in groups:
            self.add_group(group)

    def add_group(self, group: Group) -> None:
        """Append a group; its parameters take the global words after those of the earlier ones."""
        self.groups.append(group)
        for p in group.params:
            self.first_words.append(
                sum(math.ceil(q.size / 64) for q in self.params[: len(self.first_words)])
            )
            for kept in (*self.exp_avgs, *self.estimates):
                kept.append(np.zeros_like(p))

    @property
    def params(self) -> list[F32]:
        return [p for group in self.groups for p in group.params]

    def step(self, grads: Sequence[Sequence[F32 | None]]) -> None:
        """Do one step; ``grads[worker][param]`` is None where that worker has no gradient."""
        index = 0
        for group in self.groups:
            for position in range(len(group.params)):
                self._step_param(group, position, index, [worker[index] for worker in grads])
                index += 1
        self.step_number += 1

    def _step_param(
        self, group: Group, position: int, index: int, grads: Sequence[F32 | None]
    ) -> None:
        beta1, beta2 = group.betas
        exp_avg_dtype = self.exp_avg_dtype or group.dtype
        x, word, n = group.params[position], self.first_words[index], group.params[position].size
        votes: list[Vote] = []
        momenta, voters = {}, []
        for rank, grad in enumerate(grads):
            if grad is None:
                continue
            m = self.exp_avgs[rank][index]
            with np.errstate(over="ignore", invalid="ignore"):
                c = weighted_sum(beta1, m, grad)
                new_m = store(weighted_sum(beta2, m, grad), exp_avg_dtype)
            finite = [np.isfinite(v).all() for v in (grad, c, new_m)]
            if not all(finite):
                assert self.nonfinite == "abstain", "the oracle knows no other policy"
                continue
            if group.cautious:
                c = np.where(np.sign(c) == np.sign(grad), c, np.float32(0))
            if group.rows:
                c = orthogonalized(c.reshape(group.rows, -1)).reshape(-1)
            zeros = [self._coin(FIRST_ZERO_DOMAIN + rank, word, n, second=s) for s in (False, True)]
            votes.append((c, grad, *zeros))
            momenta[rank] = new_m
            voters.append(rank)
        if not votes:
            return
        if self.world_size == 1:
            total, divisor = np.sign(votes[0][0]).astype(np.int64), 1
        elif group.rule.kind == "feedback":
            for rank, (c, _, zeros, _) in zip(voters, votes, strict=True):
                said = self.estimates[rank][index]
                said = said + feedback_step(c - said, group.rule.bits, zeros)
                self.estimates[rank][index] = said
            weights = map(np.float32, self.weights or [1] * self.world_size)
            everybody = [w * mine[index] for w, mine in zip(weights, self.estimates, strict=True)]
            total, divisor = sign_of_estimates(everybody, self._coin(TIE_DOMAIN, word, n)), 1
        else:
            times = self.weights or [1] * self.world_size
            pairs = zip(votes, voters, strict=True)
            cast = [vote for vote, rank in pairs for _ in range(times[rank])]
            total = combine(cast, group.rule, self._coin(TIE_DOMAIN, word, n))
            divisor = len(cast) if group.rule.kind == "average" else 1
        x = updated(x, total, group.lr, group.weight_decay, divisor)
        if self.stochastic and group.dtype == "bfloat16":
            x = round_to_bfloat16_by_coin(x, rounding_bits(self.seed, self.step_number, word, n))
        group.params[position] = store(x, group.dtype)
        for rank, m in momenta.items():
            self.exp_avgs[rank][index] = m

    def _coin(self, domain: int, first_word: int, n: int, *, second: bool = False) -> I64:
        return signs_by_coin(self.seed, self.step_number, domain, first_word, n, second=second)


POOL_ELEMENTS = 1 << 16
LARGEST_SLICE = 1 << 14


@functools.cache
def _pool(dtype: str) -> F32:
    """Long-tailed numbers around 0, some exactly 0; the start is repeated at the end."""
    bits = coin_words(mix(0x5EED), np.arange(POOL_ELEMENTS, dtype=np.uint64))
    magnitude = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    sign = np.where(bits & np.uint64(1), np.float32(1), np.float32(-1))
    numbers = sign * (magnitude * magnitude * magnitude)
    numbers[(bits >> np.uint64(1)) % np.uint64(17) == 0] = 0
    return store(np.concatenate([numbers, numbers[:LARGEST_SLICE]]), dtype)


def values(seed: int, *key: int, n: int, dtype: str = "float32") -> F32:
    """Return n numbers that depend on the arguments only, and cost little more than a copy."""
    state = mix(seed)
    for part in key:
        state = mix(state ^ mix(part + 1))
    pool, start = _pool(dtype), state % POOL_ELEMENTS
    if n > LARGEST_SLICE:
        pool = np.tile(pool[:POOL_ELEMENTS], math.ceil((start + n) / POOL_ELEMENTS))
    # A power of two: exact, and workers and steps differ in scale.
    return pool[start : start + n] * np.float32(2.0 ** (state // POOL_ELEMENTS % 5 - 2))


def gradient(seed: int, step: int, rank: int, index: int, n: int, dtype: str = "float32") -> F32:
    """Return one worker's gradient.

    The first quarter of a parameter's coordinates never has one: exactly 0.
    """
    grad = values(seed, step, rank, index, n=n, dtype=dtype)
    grad[: n // 4] = 0.0
    return grad


def is_absent(seed: int, step: int, rank: int, index: int) -> bool:
    """Whether a worker has no gradient there: now and then one of them, sometimes nobody."""
    nobody = mix(seed ^ mix(step * 1009 + index)) % 13 == 0
    alone = mix(mix(seed + 7) ^ mix((step * 1009 + index) * 31 + rank)) % 7 == 0
    return nobody or alone


def bits_of(x: F32) -> NDArray[np.uint32]:
    return np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
