"""A quadratic in a box whose solution is known, and who sees what of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scenario:
    """Who sees what.

    Attributes:
        name: As in the tables.
        workers: N.
        spread: How far the workers' gradients lie apart for good; they add up to the exact one.
    """

    name: str
    workers: int
    spread: float = 0.0


SCENARIOS = (
    Scenario("1 worker", 1),
    Scenario("4 workers", 4),
    Scenario("16 workers", 16),
    Scenario("16 workers, different data", 16, spread=1.0),
)


@dataclass(frozen=True)
class Problem:
    """A convex quadratic and its minimizer in the box |x| <= bound, float64.

    Equation:
        f(x) = (x - s)' H (x - s) / 2 + p' (x - s)
        s solution; p_k is 0 where |s_k| < bound, and against the sign of s_k on the edge: these are
        the conditions of Karush, Kuhn and Tucker, and H is positive definite.
    """

    hessian: Tensor
    solution: Tensor
    pull: Tensor
    bound: float

    def gradient(self, x: Tensor) -> Tensor:
        return self.hessian @ (x - self.solution) + self.pull

    def surrogate(self, x: Tensor) -> float:
        """Compute S(x)."""
        g = self.gradient(x)
        return float((g.abs() + x * g / self.bound).sum())

    def error(self, x: Tensor) -> float:
        return float((x - self.solution).square().mean().sqrt())

    def outside(self, x: Tensor) -> float:
        """Return the largest distance of an element to the box."""
        return float((x.abs() - self.bound).clamp(min=0).max())


def make_problem(n: int, bound: float, *, seed: int) -> Problem:
    """Draw a quadratic with eigenvalues 0.05 ... 1; every second element ends on the edge."""
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    eigenvalues = torch.logspace(math.log10(0.05), 0.0, n, dtype=torch.float64)
    signs = torch.randint(0, 2, (n,), generator=generator).double() * 2 - 1
    at_edge = torch.arange(n) % 2 == 0
    within = 0.8 * torch.rand(n, generator=generator, dtype=torch.float64)
    size = torch.rand(n, generator=generator, dtype=torch.float64)
    solution = bound * signs * torch.where(at_edge, torch.ones_like(within), within)
    pull = torch.where(at_edge, -signs * (0.1 + 0.4 * size), torch.zeros_like(size))
    return Problem((q * eigenvalues) @ q.T, solution, pull, bound)


def draw_shifts(scenario: Scenario, n: int, *, seed: int) -> Tensor:
    """Draw what each worker's gradient is off by for good: (workers, n), skewed, adding up to 0."""
    generator = torch.Generator().manual_seed(seed)
    shifts = torch.empty(scenario.workers, n, dtype=torch.float64).exponential_(generator=generator)
    return scenario.spread * (shifts - shifts.mean(dim=0))
