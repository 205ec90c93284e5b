"""Train with torchrun's workers or with local ones, and write the run folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from distlion.errors import InvalidArgumentError
from distlion.wire import find_start
from distlion_lab.errors import UnwrittenRunError
from distlion_lab.names import name_rule
from distlion_lab.report.diagnosis_figure import draw_diagnosis_figure
from distlion_lab.report.loss_figure import draw_loss_figure
from distlion_lab.tasks.base import Task
from distlion_lab.tasks.images import ImageTask
from distlion_lab.tasks.partition import ByBook, ByClass, Contiguous, Even, TextPartition
from distlion_lab.tasks.text import TextTask, Tokenizer
from distlion_lab.training.capacity import check_capacity, read_machine
from distlion_lab.training.checkpoints import CheckpointSettings, has_checkpoint
from distlion_lab.training.crew_workers import train_crew
from distlion_lab.training.local_workers import Emit, run_workers
from distlion_lab.training.loop import Observer, TrainingLoop
from distlion_lab.training.network import Enter
from distlion_lab.training.record import (
    RECORD_NAME,
    Record,
    claim_run_dir,
    write_record,
)
from distlion_lab.training.train_settings import (
    PartitionName,
    TaskName,
    TrainSettings,
    check_meeting_place,
    torchrun_world_size,
)

FIGURE_NAME = "loss.png"
DIAGNOSIS_NAME = "diagnosis.png"
_TEXT_PARTITIONS: Mapping[PartitionName, TextPartition] = {
    PartitionName.EVEN: Even(),
    PartitionName.CONTIGUOUS: Contiguous(),
    PartitionName.BY_BOOK: ByBook(),
}


def train(
    settings: TrainSettings,
    *,
    run_dir: Path,
    observe: Observer,
    checkpoints: CheckpointSettings | None = None,
    oversubscribe: bool = False,
    crew: bool = False,
    starting: Callable[[], None] | None = None,
    enter: Enter | None = None,
) -> Record | None:
    """Train and write ``record.json`` and ``loss.png`` into the run folder.

    ``diagnose_every`` adds ``diagnosis.png``; checkpoints go to ``checkpoints/``.

    Args:
        settings: The run's settings.
        run_dir: Folder of the run; made if it does not exist.
        observe: Called with rank 0's progress, in the process that calls this function.
        checkpoints: Settings of checkpoints; None for none. A resumed run ends with the bits, and
            the record, of an uninterrupted one.
        oversubscribe: True to allow more local workers than cores and memory hold.
        crew: True if local workers form a crew: if one is killed, a newcomer takes its place. The
            record then has one worker's losses and traffic.
        starting: Called after all checks, before the first local worker starts.
        enter: Puts each local worker on a host of an emulated network; None for none. A crew's
            workers stay on this machine.

    Returns:
        The record; under torchrun only on rank 0, None on the other ranks.

    Raises:
        InvalidArgumentError: The folder holds a record, or checkpoints where this run would save
            its own, and the run is not resumed. Or ``workers`` differs from torchrun's world size
            or is more than the machine holds. Or checkpoints are asked for with a baseline.
        CheckpointError: Under torchrun, the run cannot be resumed.
        DataError: Data or model config cannot be used.
        WorkerFailedError: A local worker died or raised.
        StepError: Under torchrun, a step failed.
        UnwrittenRunError: The run has ended, but its files cannot be written; the error has the
            record.
    """
    joined = torchrun_world_size()
    if joined is not None and joined != settings.workers:
        raise InvalidArgumentError(
            f"workers is {settings.workers}, but torchrun started {joined}; omit --workers"
        )
    if joined is not None:
        check_meeting_place()
    checkpoints = checkpoints or CheckpointSettings()
    if crew:
        _check_crew(settings, checkpoints)
    checkpoints.check(settings)
    checkpoints.check_folder(run_dir)
    # A worker may be lost after the record was written: a resumed run writes it once more.
    is_resumed = checkpoints.resume and has_checkpoint(run_dir)
    work = _Work(settings, checkpoints, run_dir.absolute(), oversubscribe, crew)
    begin = starting or (lambda: None)
    writes = joined is None or int(os.environ["RANK"]) == 0
    with _claimed(run_dir, again=is_resumed) if writes else contextlib.nullcontext():
        if joined is None:
            record = _train_locally(work, observe, begin, enter)
        else:
            begin()
            record = _train_joined(work, observe)
        if writes:
            _write_folder(record, run_dir)
    return record if writes else None


def _write_folder(record: Record, run_dir: Path) -> None:
    """Write record and figures.

    Raises:
        UnwrittenRunError: A file cannot be written; the error has the record.
    """
    path, is_record_written = run_dir / RECORD_NAME, False
    try:
        write_record(record, run_dir)
        is_record_written = True
        path = run_dir / FIGURE_NAME
        draw_loss_figure(record.to_json(), path)
        if record.diagnostics:
            path = run_dir / DIAGNOSIS_NAME
            settings = record.settings
            title = f"{settings['task']}, {name_rule(settings)}, {settings['workers']} workers"
            draw_diagnosis_figure(record.diagnostics, path, title=title)
    except OSError as error:
        raise UnwrittenRunError(
            f"the run has ended, and {path} cannot be written: {error.strerror}",
            record=record,
            is_record_written=is_record_written,
        ) from error


def load_task(settings: TrainSettings) -> Task:
    """Load the data of a run and check that it fits its model and its number of workers.

    Raises:
        DataError: The data do not fit.
    """
    task: Task
    if settings.task is TaskName.TEXT:
        task = TextTask(
            data=settings.data,
            tokenizer=settings.tokenizer or Tokenizer.BYTE,
            model_config=settings.model_config,
            batch_size=settings.batch_size,
            partition=_TEXT_PARTITIONS[settings.partition],
        )
    else:
        task = ImageTask(
            data=settings.data,
            model_config=settings.model_config,
            batch_size=settings.batch_size,
            partition=Even() if settings.alpha is None else ByClass(settings.alpha),
        )
    last = settings.workers - 1
    task.training_batch(seed=settings.seed, step=0, rank=last, world_size=settings.workers)
    return task


@contextlib.contextmanager
def _claimed(run_dir: Path, *, again: bool) -> Iterator[None]:
    """Make the run folder; a failed run leaves no empty one."""
    if not again:
        claim_run_dir(run_dir)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            run_dir.rmdir()
        raise


@dataclass(frozen=True)
class _Work:
    """A worker's task.

    Args:
        settings: The run's settings.
        checkpoints: Settings of checkpoints.
        run_dir: Folder of the run, absolute.
        oversubscribe: True to allow more workers than the machine holds.
        crew: True if killed workers are replaced.
    """

    settings: TrainSettings
    checkpoints: CheckpointSettings
    run_dir: Path
    oversubscribe: bool
    crew: bool


def _check_crew(settings: TrainSettings, checkpoints: CheckpointSettings) -> None:
    """Refuse options that a crew of local workers cannot have.

    Raises:
        InvalidArgumentError: Such an option is given; the message names it.
    """
    refused = {
        "torchrun": torchrun_world_size() is not None,
        f"--rule {settings.rule}": not settings.method.votes,
        "--workers 1": settings.workers == 1,
        "--momentum-sync-every": settings.momentum_sync_every is not None,
        "--every": settings.every is not None,
        "--checkpoint-every and --resume": checkpoints.are_used,
    }
    for name, is_given in refused.items():
        if is_given:
            raise InvalidArgumentError(
                f"{name} cannot be used with --crew, which starts 2 or more local workers that "
                "vote; crews of a script of your own are made by distlion.Crew"
            )


def _train_locally(
    work: _Work, observe: Observer, begin: Callable[[], None], enter: Enter | None
) -> Record:
    task = load_task(work.settings)  # so that a mistake shows before any worker is started
    if not work.oversubscribe:
        check_capacity(work.settings, task, read_machine())
    begin()
    preload = list_slow_imports(work.settings, task)
    if work.crew:
        return train_crew(work.settings, load_task, observe, preload=preload)
    record = run_workers(
        _work,
        work,
        world_size=work.settings.workers,
        observe=observe,
        preload=preload,
        enter=enter,
    )
    assert isinstance(record, Record)
    return record


def list_slow_imports(settings: TrainSettings, task: Task) -> list[str]:
    """List modules that every worker imports; the launcher skips missing ones."""
    model_type = task.describe()["model_type"]
    digits = settings.task is TaskName.IMAGES and settings.data is None
    return [
        __name__,
        "torch._dynamo",  # by the first optimizer
        f"transformers.models.{model_type}.modeling_{model_type}",
        *(["sklearn.datasets"] if digits else []),
    ]


def _train_joined(work: _Work, observe: Observer) -> Record:
    # torchrun's agent keeps one store through all restarts, with the addresses of earlier
    # workers: Gloo would connect to those.
    store, rank, world_size = next(iter(rendezvous("env://")))
    start = find_start()
    dist.init_process_group(
        "gloo",
        store=store if start is None else PrefixStore(f"start {start}", store),
        rank=rank,
        world_size=world_size,
    )
    record = _work(observe, work)
    # Not after an error: this could hang on a collective that a peer left open.
    dist.destroy_process_group()
    return record


def _work(observe: Emit, work: _Work) -> Record:
    settings = work.settings
    torch.set_num_threads(settings.threads)
    loop = TrainingLoop(
        settings,
        load_task(settings),
        observe,
        checkpoints=work.checkpoints,
        run_dir=work.run_dir,
    )
    return loop.run()
