"""One run: from the first step to the last, its curve, and the test data once, at its end."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch.nn.functional as F
from methods import Method, build_method
from schedule import DECAY_PER_STEP, WARM_UP_SHARE, Run, rate_factor
from scoring import Result, pack_units
from torch import Tensor, nn

from distlion.errors import NonFiniteError

TRAIN_POINTS = 40


class Task(Protocol):
    """What a run trains on."""

    def build_model(self) -> nn.Module:
        """Build the network."""

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return inputs and targets of each worker."""

    def validate(self, model: nn.Module) -> Result:
        """Score on what rates are chosen by."""

    def test(self, model: nn.Module) -> Result:
        """Score on what is reported."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that fixes a run on given data.

    Attributes:
        task: ``images`` or ``text``, or one of fine-tuning.
        method: Name.
        workers: N; 0 stands for any N, where it changes nothing.
        lr: Highest learning rate.
        seed: 0 for tuning; others are reported.
        steps, batch: Their number; examples of all workers together in a step.
        evaluations: How many times validation data is scored, the last time at the end.
        alpha: Concentration of classes on workers; None: even.
        attackers, factor: The first so many workers multiply their gradient by this.
        network: Sizes of the network.
        is_tuning: Whether test data stays untouched.
    """

    task: str
    method: str
    workers: int
    lr: float
    seed: int
    steps: int
    batch: int
    evaluations: int
    alpha: float | None
    attackers: int
    factor: float
    network: dict[str, int]
    is_tuning: bool

    @property
    def name(self) -> str:
        """Return an identifier that says what the run is, and ends in a digest of all of it."""
        digest = hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:6]
        parts = [self.task, self.method, f"n{self.workers}" if self.workers else "any"]
        parts += [] if self.alpha is None else [f"alpha{self.alpha:g}"]
        parts += [f"{self.attackers}x{self.factor:g}"] if self.attackers else []
        parts += [f"lr{self.lr:g}", f"s{self.seed}"]
        return "_".join([*parts, digest])


class Trainer:
    """Train one configuration.

    Args:
        config: What to run.
        task: The data and network.
        observe: Called with the number of steps done, after each.
        warm_up_share: Share of the steps in which the rate rises.
        decay: What weights lose in a step at the highest rate.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        observe: Callable[[int], None],
        *,
        warm_up_share: float = WARM_UP_SHARE,
        decay: float = DECAY_PER_STEP,
    ) -> None:
        self._config = config
        self._warm_up_share = warm_up_share
        self._task = task
        self._observe = observe
        self._model = task.build_model()
        self._method: Method = build_method(
            config.method,
            self._model,
            Run(
                lr=config.lr,
                workers=max(1, config.workers),
                steps=config.steps,
                seed=config.seed,
                decay=decay,
            ),
        )
        self._done = 0
        self._losses: list[float] = []
        self._validation: list[list[float]] = []

    def run(self) -> dict[str, Any]:
        """Train to the end, or until a loss is not finite; return what is to be recorded."""
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        diverged, test = None, None
        try:
            self._train()
            test = None if self._config.is_tuning else self._task.test(self._model)
        except NonFiniteError as error:
            diverged = {"step": self._done, "message": str(error)}
        return {
            "config": asdict(self._config),
            "diverged": diverged,
            "train_loss": condense(self._losses),
            "validation": self._validation,
            "test": None if test is None else describe(test),
            "bits_up": self._method.up_bits_per_parameter,
            "bits_down": self._method.down_bits_per_parameter,
            "parameters": sum(param.numel() for param in self._model.parameters()),
            "parameters_sha256": digest_parameters(self._model),
            "cpu_s": round(time.process_time() - cpu_s, 1),
            "wall_s": round(time.perf_counter() - wall_s, 1),
        }

    def _train(self) -> None:
        steps = self._config.steps
        marks = {
            round(steps * (place + 1) / self._config.evaluations)
            for place in range(self._config.evaluations)
        }
        while self._done < steps:
            self._step()
            self._done += 1
            if self._done in marks:
                result = self._task.validate(self._model)
                self._check(result.loss)
                row = [self._done, round(result.loss, 6), round(result.accuracy, 6)]
                self._validation.append(row)
            self._observe(self._done)

    def _step(self) -> None:
        optimizer = self._method.optimizer
        share = rate_factor(self._done, self._config.steps, self._warm_up_share)
        for group in optimizer.param_groups:
            factor = group.get("rate_factor", 1.0)
            group["lr"] = factor * self._config.lr * share
        batches = self._task.batches(self._done)
        losses = []
        for worker, (inputs, targets) in enumerate(batches):
            logits = self._model(inputs).flatten(0, -2)
            loss = F.cross_entropy(logits, targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            if worker < self._config.attackers:
                self._falsify()
            self._method.collect(worker)
            losses.append(float(loss.detach()))
        mean = math.fsum(losses) / len(losses)
        self._check(mean)
        self._losses.append(mean)
        self._method.step()

    def _falsify(self) -> None:
        for param in self._model.parameters():
            if param.grad is not None:
                param.grad.mul_(self._config.factor)

    def _check(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss is {loss}", step=self._done)


def condense(losses: Sequence[float]) -> list[float]:
    """Return the means of up to 40 equal stretches."""
    count = min(TRAIN_POINTS, len(losses))
    cuts = [round(place * len(losses) / count) for place in range(count + 1)] if count else [0]
    spans = pairwise(cuts)
    return [round(math.fsum(losses[begin:end]) / (end - begin), 5) for begin, end in spans]


def describe(result: Result) -> dict[str, Any]:
    """Return a result as a record has it."""
    found = {"loss": round(result.loss, 6), "accuracy": round(result.accuracy, 6)}
    return {**found, "units": pack_units(result.units)}


def digest_parameters(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters, to compare runs bitwise."""
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


REPORT_EVERY_S = 30.0


class Reporter:
    """Report on stderr, now and then, where a run is.

    Args:
        config: The run.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._due_s = time.monotonic() + REPORT_EVERY_S
        print(config.name, file=sys.stderr, flush=True)

    def __call__(self, done: int) -> None:
        """Report how far it is."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + REPORT_EVERY_S
            print(f"  {done}/{self._config.steps}", file=sys.stderr, flush=True)
