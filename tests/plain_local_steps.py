"""Local steps between exchanges, in numpy by the equations of the papers, and their gradients."""

from __future__ import annotations

import numpy as np
import torch

import drawn
from distlion_lab.training.workers import MethodRun

WORKERS, EVERY, STEPS, LR, DECAY = 3, 2, 6, 0.01, 0.1
SHAPES = {"a": (4, 5), "b": (7,)}
N_ELEMENTS = 27
# A few dozen float32 operations on values of about 1.
TOLERANCE = 1e-6


def make_params():
    return list(drawn.make_params(SHAPES).items())


def make_run(params, *, workers=WORKERS, steps=STEPS):
    return MethodRun(params, lr=LR, weight_decay=DECAY, workers=workers, steps=steps, seed=0)


def draw_target(step, worker, name):
    """Draw what a worker's loss, half the squared distance to it, pulls towards."""
    seed = 1000 * step + 10 * worker + (name == "b")
    return np.random.default_rng(seed).normal(size=SHAPES[name])


def take_steps(method, params, steps, *, workers=WORKERS, begin=0):
    """Step on gradients that depend on the parameters that the method puts into the model."""
    for step in range(begin, begin + steps):
        for worker in range(workers):
            for name, param in params:
                target = torch.tensor(draw_target(step, worker, name), dtype=torch.float32)
                param.grad = param.detach() - target
            method.collect(worker)
        method.step()


def average_in_numpy(deltas):
    return sum(deltas) / len(deltas)


def vote_in_numpy(deltas):
    scale = np.mean([np.abs(delta).mean() for delta in deltas])
    return scale * np.sign(sum(np.sign(delta) for delta in deltas))


def simulate(agree, steps, *, outer_lr=0.7, outer_momentum=0.9):
    """Return the parameters after each step on worker 0, by the equations of the papers."""
    anchor = {name: p.detach().double().numpy().copy() for name, p in make_params()}
    local = [{n: x.copy() for n, x in anchor.items()} for _ in range(WORKERS)]
    first, second = (
        [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(WORKERS)] for _ in range(2)
    )
    momentum = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    seen = []
    for step in range(steps):
        for worker in range(WORKERS):
            for name, x in local[worker].items():
                grad = x - draw_target(step, worker, name)
                m, v = first[worker][name], second[worker][name]
                m[:] = 0.9 * m + 0.1 * grad
                v[:] = 0.999 * v + 0.001 * grad**2
                m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
                x[:] = (1 - LR * DECAY) * x - LR * m_hat / (np.sqrt(v_hat) + 1e-8)
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            for name in SHAPES:
                delta = agree([anchor[name] - mine[name] for mine in local])
                momentum[name] = outer_momentum * momentum[name] + delta
                moved = outer_lr * (delta + outer_momentum * momentum[name])
                anchor[name] = anchor[name] - moved
                for mine in local:
                    mine[name] = anchor[name].copy()
        seen.append({name: x.copy() for name, x in local[0].items()})
    return seen
