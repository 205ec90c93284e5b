"""The settings of a training run, checked at construction."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from distlion.errors import InvalidArgumentError
from distlion.step import check_count
from distlion.votes import RULES, SCALED_RULES
from distlion.wire import PATTERNS
from distlion_lab.names import suggest
from distlion_lab.tasks.partition import ByClass
from distlion_lab.tasks.text import Tokenizer
from distlion_lab.training.delta_worker import DEFAULT_DELTA_RULE, find_delta_rule
from distlion_lab.training.device import check_device
from distlion_lab.training.method import Method
from distlion_lab.training.methods import RECIPE, find_rule
from distlion_lab.training.name_parts import split_name
from distlion_lab.training.workers import AUTO

DEFAULT_RULE = RECIPE
DEFAULT_WORKERS = 4
DEFAULT_ALPHA = 0.1
DEFAULT_STEP_TIMEOUT_S = 60.0
_ALONE = "For local workers, unset RANK and WORLD_SIZE"


class TaskName(str, Enum):
    """The task to train."""

    TEXT = "text"
    IMAGES = "images"


class PartitionName(str, Enum):
    """The partition of the training data among workers: the same mix for all, or skewed."""

    EVEN = "even"
    CONTIGUOUS = "contiguous"
    BY_BOOK = "by-book"
    BY_CLASS = "by-class"


class Schedule(str, Enum):
    """The course of the learning rate after the warm-up."""

    COSINE = "cosine"
    CONSTANT = "constant"


class OnDisagreement(str, Enum):
    """Treatment of a worker whose votes are far from those of the majority."""

    WARN = "warn"
    EXCLUDE = "exclude"

    @property
    def choice(self) -> Literal["warn", "exclude"]:
        """Return the argument for ``Agreement(on_disagreement=...)``."""
        return "exclude" if self is OnDisagreement.EXCLUDE else "warn"


class Overlap(str, Enum):
    """The overlap of votes with backward."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"

    @property
    def choice(self) -> bool | Literal["auto"]:
        """Return the argument for ``DistributedLion(overlap=...)``."""
        return "auto" if self is Overlap.AUTO else self is Overlap.ON


_DEFAULTS: Mapping[TaskName, Mapping[str, Any]] = {
    TaskName.TEXT: {"steps": 200, "batch_size": 8, "eval_every": 50, "warmup_steps": 20},
    TaskName.IMAGES: {"steps": 200, "batch_size": 32, "eval_every": 50, "warmup_steps": 20},
}
_PARTITIONS: Mapping[TaskName, tuple[PartitionName, ...]] = {
    # The first is the default.
    TaskName.TEXT: (PartitionName.CONTIGUOUS, PartitionName.EVEN, PartitionName.BY_BOOK),
    TaskName.IMAGES: (PartitionName.EVEN, PartitionName.BY_CLASS),
}


def torchrun_world_size() -> int | None:
    """Return the number of workers if torchrun or its like started this process, else None.

    Raises:
        InvalidArgumentError: RANK and WORLD_SIZE are set, but not to a rank and a number of ranks.
    """
    rank, world_size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if not (rank and world_size):
        return None
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise InvalidArgumentError(
            f"RANK is {rank!r} and WORLD_SIZE {world_size!r} in the environment; expected a rank "
            f"and a number of ranks above it, as torchrun sets them. {_ALONE}"
        )
    return int(world_size)


def check_meeting_place() -> None:
    """Check that the environment says where the workers of torchrun meet.

    Raises:
        InvalidArgumentError: It does not; torch would not name what else is set.
    """
    host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not (host and port.isdecimal() and int(port) < 1 << 16):
        raise InvalidArgumentError(
            f"RANK and WORLD_SIZE are in the environment, as torchrun sets them, but MASTER_ADDR "
            f"is {host!r} and MASTER_PORT {port!r}; expected a host and a port. {_ALONE}"
        )


@dataclass(frozen=True, kw_only=True)
class WorkSettings:
    """Settings of data, model and steps, which single runs and comparisons share.

    Args:
        task: The task to train.
        steps: Optimizer steps, at least 1.
        schedule: Course of the learning rate: cosine falls to a tenth of ``lr`` at the last step.
        warmup_steps: Steps of linear rise to ``lr``, at least 0.
        batch_size: Examples of one worker in a step, at least 1.
        eval_every: Steps between validations, at least 1; the first one comes before the first
            step, and the last one after the last step.
        device: Device of the workers, such as ``cpu`` or ``cuda``; real workers of a machine are
            dealt its GPUs in turn.
        data: Training data; None for the task's embedded data.
        partition: Partition of the training data among workers.
        alpha: Concentration of the partition ``by-class``, above 0; None for other partitions.
        tokenizer: Level of text; None for other tasks.
        model_config: A transformers config; None for the task's preset.
    """

    task: TaskName
    steps: int
    schedule: Schedule
    warmup_steps: int
    batch_size: int
    eval_every: int
    device: str
    data: str | None
    partition: PartitionName
    alpha: float | None
    tokenizer: Tokenizer | None
    model_config: Path | None

    def shared(self) -> dict[str, Any]:
        """Return these settings by name, for other settings of the same work."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(WorkSettings)}

    def to_json(self) -> dict[str, Any]:
        """Return all settings as JSON types."""
        return {
            field.name: _to_json(getattr(self, field.name)) for field in dataclasses.fields(self)
        }


@dataclass(frozen=True, kw_only=True)
class TrainSettings(WorkSettings):
    """All settings on which the losses of a run depend; ``device`` is ``cpu`` for a baseline.

    Args:
        workers: Processes that train together, at least 1.
        rule: Rule of the votes, or a baseline; with ``every``, a rule for votes on deltas.
        exchange: Name of the exchange pattern, or ``auto``; only ``auto`` for a baseline.
        overlap: Overlap of votes with backward: on, off, or the faster one; off for a
            baseline.
        momentum_sync_every: Steps in which every momentum is averaged over workers once. None for
            never; always None for a baseline.
        every: Local steps of AdamW from vote to vote, at least 1; None votes in each step.
        diagnose_every: Steps, or votes with ``every``, between two diagnoses of the votes. None for
            never; always None for a baseline.
        on_disagreement: Whether to warn of workers far from the majority, or to leave out their
            votes too, which needs ``diagnose_every`` and votes in each step.
        lr: Highest learning rate.
        weight_decay: Decoupled weight decay, at least 0.
        seed: Seed of weights, data order, dropout and random tie-breaking; 0 or above.
        threads: Threads of a worker, at least 1. Losses are bitwise identical for equal numbers.
        step_timeout_s: Seconds that a step waits for a silent peer, above 0; None for 60. Always
            None for a baseline.

    Raises:
        InvalidArgumentError: A name is unknown, a number is out of its range, or two settings are
            incompatible.
    """

    workers: int
    rule: str
    exchange: str
    overlap: Overlap
    momentum_sync_every: int | None
    every: int | None
    diagnose_every: int | None
    on_disagreement: OnDisagreement
    lr: float
    weight_decay: float
    seed: int
    threads: int
    step_timeout_s: float | None

    @classmethod
    def with_defaults(
        cls, task: TaskName = TaskName.TEXT, rule: str | None = None, **given: Any
    ) -> TrainSettings:
        """Fill absent settings, and None, with the defaults of the task and the rule.

        Raises:
            InvalidArgumentError: As in the class.
            TypeError: A name is not a setting.
        """
        every = given.get("every")
        if rule is None:
            rule = DEFAULT_RULE if every is None else DEFAULT_DELTA_RULE
        method = _find_method(rule, every)
        settings: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(cls))
        settings |= {
            "task": task,
            "workers": torchrun_world_size() or DEFAULT_WORKERS,
            "rule": rule,
            "exchange": AUTO,
            "overlap": Overlap.OFF,
            "on_disagreement": OnDisagreement.WARN,
            "lr": method.train_lr,
            "weight_decay": method.train_weight_decay,
            "schedule": Schedule.COSINE,
            "seed": 0,
            "threads": 1,
            "device": "cpu",
            "partition": _PARTITIONS[task][0],
            **_DEFAULTS[task],
        }
        if task is TaskName.TEXT:
            settings["tokenizer"] = Tokenizer.BYTE
        if given.get("partition") is PartitionName.BY_CLASS:
            settings["alpha"] = DEFAULT_ALPHA
        return cls(**settings | {name: value for name, value in given.items() if value is not None})

    def __post_init__(self) -> None:
        _find_method(self.rule, self.every)
        self._check_exchange()
        check_device(self.device)
        for name in ("workers", "steps", "batch_size", "eval_every", "threads"):
            self._check_least(name, 1)
        for name in ("momentum_sync_every", "diagnose_every"):
            if getattr(self, name) is not None:
                self._check_least(name, 1)
        for name in ("warmup_steps", "seed", "weight_decay"):
            self._check_least(name, 0)
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InvalidArgumentError(f"lr is {self.lr}; expected a finite number above 0")
        timeout_s = self.step_timeout_s
        if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
            raise InvalidArgumentError(
                f"step_timeout_s is {timeout_s}; expected a finite number above 0"
            )
        self._check_pairs()
        self._check_partition()

    def _check_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not (math.isfinite(value) and value >= least):
            raise InvalidArgumentError(f"{name} is {value}; expected a number of at least {least}")

    @property
    def method(self) -> Method:
        """Return the method of the rule."""
        return _find_method(self.rule, self.every)

    def _check_exchange(self) -> None:
        if self.exchange != AUTO and self.exchange not in PATTERNS:
            raise InvalidArgumentError(
                f"exchange {self.exchange!r} is unknown; "
                f"{suggest(self.exchange, (AUTO, *PATTERNS), all_in='distlion train --help')}"
            )

    def _check_pairs(self) -> None:
        if not self.method.votes:
            self._check_baseline()
        if self.every is not None:
            self._check_local()
        if self.on_disagreement is OnDisagreement.EXCLUDE:
            self._check_exclusion()
        if (self.tokenizer is not None) != (self.task is TaskName.TEXT):
            raise InvalidArgumentError(
                f"tokenizer is {_show(self.tokenizer)} with the task {self.task.value}; it belongs "
                f"to the task {TaskName.TEXT.value} and to no other"
            )

    def _check_baseline(self) -> None:
        if self.exchange != AUTO:
            raise InvalidArgumentError(
                f"exchange is {self.exchange} with the rule {self.rule}, which averages gradients "
                f"and exchanges no votes; leave exchange at {AUTO}"
            )
        if self.overlap is not Overlap.OFF:
            raise InvalidArgumentError(
                f"overlap is {self.overlap.value} with the rule {self.rule}, which averages during "
                "backward anyway; it belongs to rules that vote"
            )
        if self.device != "cpu":
            raise InvalidArgumentError(
                f"device is {self.device} with the rule {self.rule}, whose gradients Gloo "
                "averages on the CPU; 'distlion compare --device' has baselines on a GPU"
            )
        for name in ("momentum_sync_every", "diagnose_every", "step_timeout_s"):
            if getattr(self, name) is not None:
                raise InvalidArgumentError(
                    f"{name} is {getattr(self, name)} with the rule {self.rule}, whose workers "
                    "have neither votes nor momenta; it belongs to rules that vote"
                )

    def _check_local(self) -> None:
        if self.overlap is not Overlap.OFF:
            raise InvalidArgumentError(
                f"overlap is {self.overlap.value} with every {self.every}: a step without a vote "
                "has nothing to overlap. Expected off. Omit overlap"
            )
        if self.momentum_sync_every is not None:
            raise InvalidArgumentError(
                f"momentum_sync_every is {self.momentum_sync_every} with every {self.every}: these "
                "votes have no momenta to average. Omit momentum_sync_every"
            )

    def _check_exclusion(self) -> None:
        if not self.method.votes:
            problem = f"the rule {self.rule}, whose workers do not vote. Choose a rule that votes"
        elif self.every is not None:
            problem = f"every {self.every}: all votes on deltas are counted. Omit every"
        elif self._remembers_votes:
            problem = (
                f"the rule {self.rule}, which counts what a worker sent in earlier steps too. "
                "Choose a rule without memory, such as majority"
            )
        elif self.momentum_sync_every is not None:
            problem = (
                f"momentum_sync_every {self.momentum_sync_every}: a mean over all workers. Omit it"
            )
        elif self.diagnose_every is None:
            problem = "no diagnose_every, which compares workers. Set it, such as to 10"
        else:
            return
        raise InvalidArgumentError(
            f"on_disagreement is exclude with {problem}, or set on_disagreement to warn"
        )

    @property
    def _remembers_votes(self) -> bool:
        named = RULES.get(split_name(self.rule)[0])
        return named is not None and bool(named.rule.worker_state)

    def _check_partition(self) -> None:
        known = _PARTITIONS[self.task]
        if self.partition not in known:
            raise InvalidArgumentError(
                f"partition is {self.partition.value} with the task {self.task.value}; expected "
                f"{' or '.join(name.value for name in known)}"
            )
        if (self.alpha is not None) != (self.partition is PartitionName.BY_CLASS):
            raise InvalidArgumentError(
                f"alpha is {self.alpha} with the partition {self.partition.value}; it belongs to "
                f"the partition {PartitionName.BY_CLASS.value} and to no other"
            )
        if self.alpha is not None:
            ByClass(self.alpha)  # checks its range


def _find_method(rule: str, every: int | None) -> Method:
    """Return the method of a rule with votes in each step, or every few steps.

    Raises:
        InvalidArgumentError: There is none, or a number is out of its range.
    """
    if every is None:
        if rule in SCALED_RULES:
            raise InvalidArgumentError(
                f"rule {rule} votes on deltas of local steps. Set every, such as 8, or choose a "
                "rule that votes in each step"
            )
        return find_rule(rule)
    check_count("every", every)
    return find_delta_rule(rule, every=every)


def _to_json(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _show(value: Any) -> str:
    return str(_to_json(value))
