"""A program as data, and how one is drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import matrix

MOST_OPERATIONS = 8
MOST_WORKERS = 3
SIZES = (1, 2, 3, 63, 64, 65, 130, 517)
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "bucket_elements": 64}
DTYPES = ("float32", "bfloat16", "float16")
ORACLE_DTYPES = ("float32", "bfloat16")
DEFAULT_DTYPES = ("float32", "float64", "bfloat16")
DEFAULT_DEVICES = ("cpu", "cpu", "meta")
ODD_DEFAULTS = 0.3
"""Share of the programs that set torch's default dtype and device to these."""


@dataclass(frozen=True)
class Setup:
    """How model and optimizer are made; every value is its own ``repr``.

    Attributes:
        is_real: Whether ranks play, and virtual workers are their model; or virtual workers, whose
            model is the oracle.
        workers: Their number.
        sizes: Elements of the parameters, group by group.
        rules: Names of rules, one for each group.
        dtype: Of the parameters, and of those that are added later.
        dtypes: Of each parameter, where they differ; else empty.
        defaults: Torch's default dtype and default device while the workers do anything.
        frozen: Numbers of the parameters that are frozen from the start.
        scheduler: "lambda", "sequential", "cosine" or None.
        options: Of both kinds of workers. ``clip_norm`` is the scope.
        network: Of ranks alone. ``exchange`` is the name of a pattern.
    """

    is_real: bool = True
    workers: int = 2
    sizes: tuple[tuple[int, ...], ...] = ((65, 3), (130,))
    rules: tuple[str, ...] = ("majority", "majority")
    dtype: str = "float32"
    dtypes: tuple[str, ...] = ()
    defaults: tuple[str, str] = ("float32", "cpu")
    frozen: tuple[int, ...] = ()
    scheduler: str | None = None
    options: dict[str, Any] = field(default_factory=lambda: dict(OPTIONS))
    network: dict[str, Any] = field(default_factory=dict)

    @property
    def overlap(self) -> Any:
        """Whether votes leave during backward."""
        return self.network.get("overlap", False)

    @property
    def nonfinite(self) -> str:
        """What follows a gradient that is not finite."""
        found: str = self.options.get("nonfinite", "raise")
        return found

    def find_dtype(self, number: int) -> str:
        """Return the dtype of a parameter."""
        return self.dtypes[number] if number < len(self.dtypes) else self.dtype

    @property
    def trained(self) -> list[int]:
        """Numbers of the parameters that are trained from the start."""
        n_params = sum(map(len, self.sizes))
        return [index for index in range(n_params) if index not in self.frozen]


@dataclass(frozen=True)
class Op:
    """One operation: its name in the table of operations, and its arguments."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """What a seed stands for."""

    seed: int
    setup: Setup
    ops: tuple[Op, ...]


def draw_setup(random: Random, *, is_real: bool) -> Setup:
    """Draw a model and an optimizer."""
    n_groups = random.choice((1, 1, 2, 3))
    sizes = tuple(tuple(random.choices(SIZES, k=random.randint(1, 3))) for _ in range(n_groups))
    dtype = random.choice(("float32", *DTYPES) if is_real else ORACLE_DTYPES)
    dtypes = _draw_dtypes(random, sizes, is_real=is_real) if random.random() < 0.3 else ()
    n_params = sum(map(len, sizes))
    frozen = (random.randrange(n_params),) if n_params > 1 and random.random() < 0.2 else ()
    overlap = is_real and random.random() < 0.4
    return Setup(
        is_real=is_real,
        workers=random.randint(2, MOST_WORKERS),
        sizes=sizes,
        rules=tuple(random.choice(list(matrix.LISTED)) for _ in sizes),
        dtype=dtype,
        dtypes=dtypes,
        defaults=_draw_defaults(random),
        frozen=frozen,
        scheduler=random.choice((None, "lambda", "sequential", "cosine")),
        options=_draw_options(random, dtype=dtype, dtypes=dtypes, overlap=overlap, is_real=is_real),
        network={
            "overlap": random.choice((True, "auto")) if overlap else False,
            "exchange": random.choice(("auto", *matrix.PATTERNS_OF_ALL_RULES)),
            "check_every": random.choice((None, 1, 3, 1000)),
        }
        if is_real
        else {},
    )


def _draw_dtypes(
    random: Random, sizes: tuple[tuple[int, ...], ...], *, is_real: bool
) -> tuple[str, ...]:
    """Draw a dtype for each parameter; the oracle has one for each group."""
    found: list[str] = []
    for group in sizes:
        n = len(group)
        found += random.choices(DTYPES, k=n) if is_real else [random.choice(ORACLE_DTYPES)] * n
    return tuple(found)


def _draw_defaults(random: Random) -> tuple[str, str]:
    if random.random() >= ODD_DEFAULTS:
        return Setup.defaults
    return random.choice(DEFAULT_DTYPES), random.choice(DEFAULT_DEVICES)


def _draw_options(
    random: Random, *, dtype: str, dtypes: tuple[str, ...], overlap: bool, is_real: bool
) -> dict[str, Any]:
    options = {
        "lr": random.choice((1e-2, 3e-3, 0.0)),
        "betas": random.choice(((0.9, 0.99), (0.95, 0.98), (0.0, 0.9))),
        "weight_decay": random.choice((0.0, 0.1)),
        "nonfinite": random.choice(("raise", "skip", "abstain")),
        "bucket_elements": random.choice((None, 64, 200)),
        "seed": random.choice((0, 7, 2**64 - 1)),
        "exp_avg_dtype": random.choice((None, None, "float32", "bfloat16")),
    }
    can_round = "bfloat16" in (dtypes or (dtype,)) and "float16" not in (dtype, *dtypes)
    if can_round and random.random() < 0.5:
        options["rounding"] = "stochastic"
    if is_real and not overlap and random.random() < 0.2:
        options["clip_norm"] = random.choice(("worker", "global"))
    if is_real and random.random() < 0.15:
        options["momentum_sync"] = random.choice((1, 2, 3))
    if random.random() < 0.2:
        options["diagnose_every"] = random.choice((1, 2))
    return options
