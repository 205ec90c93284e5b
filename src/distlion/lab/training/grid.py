"""Learning rates to try: as many for every method."""

from __future__ import annotations


def make_grid(base_lr: float, *, points: int, factor: float) -> tuple[float, ...]:
    """Spread learning rates evenly around one.

    Equation:
        lr_k = base_lr * factor^(k - (n - 1) / 2),  k = 0 .. n - 1
        n is ``points``; rounded to three digits. An even n leaves ``base_lr`` itself out.
    """
    middle = (points - 1) / 2
    return tuple(float(f"{base_lr * factor ** (k - middle):.3g}") for k in range(points))
