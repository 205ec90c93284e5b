"""Runs on a CUDA device, many at a time: a step is a graph, and each lane repeats its own.

A step of a small network is hundreds of kernels that each fill a little of a device. So a lane
records one step of a method once, and then a run is as many replays, without the host. Lanes have
streams of their own, and the device works on all of them at once.

A run is that of ``runs.Trainer``, in float32: the same examples, weights, schedule and coins.
Rounding differs from a CPU's: kernels are others, sums have another order, and a mean gradient is
that of two half batches. cuDNN chooses its kernels by timing them, so a run has other bits each
time.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import study_path  # noqa: F401
import torch
import torch.nn.functional as F
from archive import Records
from flat_layout import FlatLayout
from flat_methods import Place, arrange, build_flat_method, describe_run, has_flat_form
from images import ImageTask
from runs import RunConfig, condense, describe, digest_parameters
from sources import Data
from text import TextTask
from torch import Tensor
from work import ListOpen

from distlion.errors import InvalidArgumentError

# With 24, nearly all runs ended at once, or not at all before the time was up. Not measured.
MOST_LANES = 12
_CHUNK, _AHEAD = 50, 4
_WARM_UP = 2
_LIST_EVERY_S = 5.0
_PARTS_OF_A_MEAN = 2

Score = tuple[int, Tensor, Tensor]
"""Steps done, and of each prediction its loss and whether it is right."""


class FlatRun:
    """Runs of one network and method, by steps that the device can do alone.

    Args:
        config: One of the runs to be done; only rate and seed may differ between them.
        data: On the device.
        device: CUDA; the CPU does the same, step by step.

    Raises:
        InvalidArgumentError: There is no flat form of such runs.
    """

    def __init__(self, config: RunConfig, data: Data, device: torch.device) -> None:
        if not has_flat_form(config):
            raise InvalidArgumentError(
                f"{config.name} has no form for a device. Run its part without --device"
            )
        self._data, self._device = data, device
        # Methods that use only the mean gradient average two half batches: backward of an
        # embedding of more than 3,072 numbers sorts them, and may wait for the host.
        self._workers = config.workers or _PARTS_OF_A_MEAN
        self._task, _ = self._build_task(config)
        self.model = self._task.build_model().to(device)
        self._params, matrices = arrange(self.model, config.method)
        self._layout = FlatLayout.of(self._params)
        self._row = self._layout.adopt(self._params)
        place = Place(self._layout, self._workers, config.steps, device, matrices)
        self.method = build_flat_method(config.method, place)
        self._grads = torch.zeros(self._workers, self._layout.length, device=device)
        self._views = [self._layout.view(row) for row in self._grads]
        self._table = torch.zeros_like(draw_table(self._task, config), device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        # Of each step: the loss of each worker, and NaN if a gradient is not finite, else 0.
        self._losses = torch.zeros(config.steps, self._workers + 1, device=device)

    def start(self, config: RunConfig) -> str:
        """Begin a run; return the digest of its data."""
        self._task, digest = self._build_task(config)
        fresh, _ = arrange(self._task.build_model(), config.method)
        with torch.no_grad():
            for param, value in zip(self._params, fresh, strict=True):
                param.copy_(value)
        self._table.copy_(draw_table(self._task, config))
        self.method.start(describe_run(config))
        self._losses.zero_()
        self._step.zero_()
        return digest

    def step(self) -> None:
        """Do a step."""
        losses = []
        for worker, (inputs, targets) in enumerate(self._task.take(self._table[self._step][0])):
            logits = self.model(self._arrange(inputs)).flatten(0, -2)
            loss = F.cross_entropy(logits, targets.flatten())
            found = torch.autograd.grad(loss, self._params)
            torch._foreach_copy_(self._views[worker], found)
            losses.append(loss.detach())
        with torch.no_grad():
            flag = torch.where(self._grads.isfinite().all(), 0.0, math.nan)
            row = torch.stack([*losses, flag])
            self._losses.index_copy_(0, self._step, row.unsqueeze(0))
            self.method.move(self._row, self._grads, self._step)
            self._step += 1

    def _arrange(self, inputs: Tensor) -> Tensor:
        # Channels last, as the CPU has images, is slow on a device in float32.
        return inputs.contiguous() if self._device.type == "cuda" else inputs

    def predict_validation(self) -> tuple[Tensor, Tensor]:
        """Return losses and what is right, without waiting for the device."""
        return self._task.predict_validation(self.model)

    def conclude(self, config: RunConfig, scores: list[Score]) -> dict[str, Any]:
        """Return what is to be recorded, of a run whose steps are done.

        Args:
            config: The run.
            scores: Of each validation.
        """
        rows = self._losses.double().cpu()
        losses = [math.fsum(row[:-1]) / self._workers for row in rows.tolist()]
        bad = (~rows.isfinite().all(1)).nonzero().flatten().tolist()
        done = [(step, self._task.conclude(*found)) for step, *found in scores]
        bad += [step for step, result in done if not math.isfinite(result.loss)]
        diverged, test = None, None
        if bad:
            step = min(bad)
            diverged = {"step": step, "message": "a loss or a gradient is not finite"}
            losses = losses[:step]
            done = [each for each in done if each[0] <= step and math.isfinite(each[1].loss)]
        elif not config.is_tuning:
            test = describe(self._task.conclude(*self._task.predict_test(self.model)))
        return {
            "config": asdict(config),
            "diverged": diverged,
            "train_loss": condense(losses),
            "validation": [
                [step, round(result.loss, 6), round(result.accuracy, 6)] for step, result in done
            ],
            "test": test,
            "bits_up": self.method.bits_up,
            "bits_down": self.method.bits_down,
            "parameters": sum(self._layout.sizes),
            "parameters_sha256": digest_parameters(self.model),
        }

    def _build_task(self, config: RunConfig) -> tuple[ImageTask | TextTask, str]:
        task, digest = self._data.build(replace(config, workers=self._workers))
        assert isinstance(task, ImageTask | TextTask)
        return task, digest


_TABLES: dict[str, Tensor] = {}


def draw_table(task: ImageTask | TextTask, config: RunConfig) -> Tensor:
    """Draw what each step of a run takes, (steps, ...) int64; once for all methods."""
    shared = replace(config, method="any", workers=0, lr=0.0, is_tuning=True).name
    if shared not in _TABLES:
        _TABLES[shared] = torch.stack([task.draw(step) for step in range(config.steps)])
    return _TABLES[shared]


def train(config: RunConfig, data: Data, device: torch.device) -> dict[str, Any]:
    """Do one run step by step, and return what is to be recorded."""
    run = FlatRun(config, data, device)
    digest = run.start(config)
    scores = []
    marks = _list_marks(config)
    for step in range(1, config.steps + 1):
        run.step()
        if step in marks:
            scores.append((step, *run.predict_validation()))
    return {"data": digest, **run.conclude(config, scores)}


def _list_marks(config: RunConfig) -> set[int]:
    """Return after how many steps a run is scored."""
    return {
        round(config.steps * (place + 1) / config.evaluations)
        for place in range(config.evaluations)
    }


def name_lane(config: RunConfig) -> str:
    """Return what runs that can share a graph have in common."""
    return replace(config, lr=0.0, seed=0, is_tuning=True).name


@dataclass
class Lane:
    """A stream with the graph of a step, and the run that it is at.

    Attributes:
        run: What is trained.
        stream, graph: Of its steps.
        config: The run it is at; None while it is idle.
    """

    run: FlatRun
    stream: torch.cuda.Stream
    graph: torch.cuda.CUDAGraph
    config: RunConfig | None = None
    _claim: ExitStack = field(default_factory=ExitStack)
    _digest: str = ""
    _done: int = 0
    _started_s: float = 0.0
    _scores: list[Score] = field(default_factory=list)
    _pending: deque[torch.cuda.Event] = field(default_factory=deque)

    @classmethod
    def record(cls, config: RunConfig, data: Data, device: torch.device) -> Lane:
        """Record a step of runs such as this one."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            run = FlatRun(config, data, device)
            run.start(config)
            for _ in range(_WARM_UP):
                run.step()
        stream.synchronize()
        with torch.cuda.stream(stream):
            # ``torch.cuda.graph`` would wait for all other lanes.
            graph.capture_begin(capture_error_mode="thread_local")
            run.step()
            graph.capture_end()
        return cls(run, stream, graph)

    def start(self, config: RunConfig, claim: ExitStack) -> None:
        """Begin a run; the claim on it is held until it ends."""
        self._claim = claim
        with torch.cuda.stream(self.stream):
            self._digest = self.run.start(config)
        self.config, self._done, self._scores = config, 0, []
        self._started_s = time.perf_counter()

    def feed(self) -> bool:
        """Hand the device more steps; return whether all of the run's are done."""
        assert self.config is not None
        while self._pending and self._pending[0].query():
            self._pending.popleft()
        if self._done == self.config.steps:
            return not self._pending
        if len(self._pending) < _AHEAD:
            with torch.cuda.stream(self.stream):
                self._replay(self.config)
                event = torch.cuda.Event()
                event.record()
                self._pending.append(event)
        return False

    def finish(self, records: Records) -> RunConfig:
        """Write the record of the run, and be idle; return which run it was."""
        assert self.config is not None
        config, self.config = self.config, None
        with torch.cuda.stream(self.stream):
            record = self.run.conclude(config, self._scores)
        wall_s = time.perf_counter() - self._started_s
        found = {"device": torch.cuda.get_device_name(), "data": self._digest, **record}
        with self._claim:
            records.write(config, {**found, "wall_s": round(wall_s, 1)})
        return config

    def _replay(self, config: RunConfig) -> None:
        marks = _list_marks(config)
        for _ in range(min(_CHUNK, config.steps - self._done)):
            self.graph.replay()
            self._done += 1
            if self._done in marks:
                self._scores.append((self._done, *self.run.predict_validation()))


def run_on_device(
    list_open: ListOpen, records: Records, data: Data, until_s: float, most: int = MOST_LANES
) -> None:
    """Do runs until none is left, or for so many seconds; report on stderr.

    Args:
        list_open: What can be run now.
        records: What runs leave.
        data: On the device.
        until_s: After so long no run is begun, and what is not done is left.
        most: Largest number of runs at a time.
    """
    device = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    lanes: dict[str, list[Lane]] = {}
    agenda, started_s = _Agenda(list_open), time.monotonic()
    while time.monotonic() - started_s < until_s:
        busy = [lane for each in lanes.values() for lane in each if lane.config is not None]
        if len(busy) < most and (config := agenda.take()) is not None:
            with ExitStack() as claim:
                is_ours = claim.enter_context(records.claim(config.name))
                if is_ours and records.read(config.name) is None:
                    _find_lane(config, lanes, data, device).start(config, claim.pop_all())
            continue
        if not busy:
            return
        for lane in busy:
            if lane.feed():
                ended = lane.finish(records)
                agenda.note_end()
                elapsed_s = time.monotonic() - started_s
                print(f"{elapsed_s:6.1f} s  {ended.name}", file=sys.stderr, flush=True)


class _Agenda:
    """Which run is begun next. To list all that can be takes a while."""

    def __init__(self, list_open: ListOpen) -> None:
        self._list_open = list_open
        self._taken: set[str] = set()
        self._waiting = deque(list_open())
        self._listed_s, self._is_stale = time.monotonic(), False

    def note_end(self) -> None:
        """Note that a run has ended, so that others may be open."""
        self._is_stale = True

    def take(self) -> RunConfig | None:
        """Return the most urgent run that has not been taken; None where there is none now."""
        is_due = not self._waiting or time.monotonic() - self._listed_s > _LIST_EVERY_S
        if self._is_stale and is_due:
            self._waiting = deque(
                each for each in self._list_open() if each.name not in self._taken
            )
            self._listed_s, self._is_stale = time.monotonic(), False
        if not self._waiting:
            return None
        config = self._waiting.popleft()
        self._taken.add(config.name)
        return config


def _find_lane(
    config: RunConfig, lanes: dict[str, list[Lane]], data: Data, device: torch.device
) -> Lane:
    """Return an idle lane of a run's kind, or a new one."""
    kind = lanes.setdefault(name_lane(config), [])
    lane = next((each for each in kind if each.config is None), None)
    if lane is None:
        lane = Lane.record(config, data, device)
        kind.append(lane)
    return lane
