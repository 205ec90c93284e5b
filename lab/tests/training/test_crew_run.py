"""A local crew trains to its end, whichever of its processes is killed."""

import multiprocessing
import os
import re
import signal
import time

import pytest

from distlion.errors import InvalidArgumentError
from distlion_lab.errors import WorkerFailedError
from distlion_lab.training import crew_workers as crew_workers_module
from distlion_lab.training.checkpoints import CheckpointSettings
from distlion_lab.training.crew_loop import Ending
from distlion_lab.training.crew_workers import train_crew
from distlion_lab.training.run import load_task, train
from distlion_lab.training.train_settings import TrainSettings
from run_records import make_record

pytestmark = pytest.mark.distributed

CONFIG = (
    '{"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": 1, '
    '"n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}'
)
STEPS = 1000


def make_settings(folder, **given):
    config = folder / "config.json"
    config.write_text(CONFIG)
    options = {
        "workers": 2,
        "steps": STEPS,
        "eval_every": 250,
        "batch_size": 2,
        "warmup_steps": 3,
        "exchange": "all-reduce",
        "model_config": config,
    }
    return TrainSettings.with_defaults(**{"rule": "majority", **options, **given})


def test_a_killed_worker_is_replaced_and_the_run_goes_on(tmp_path):
    """Of two workers both have to be there: the other one waits for the newcomer."""
    seen, killed = [], []

    def watch(progress):
        seen.append(progress)
        if progress.step == 5 and not killed:
            first = next(each.note for each in seen if each.note)
            killed.append(int(re.findall(r"process (\d+)", first)[1]))
            os.kill(killed[0], signal.SIGKILL)

    record = train(make_settings(tmp_path), run_dir=tmp_path / "run", observe=watch, crew=True)
    notes = [progress.note for progress in seen if progress.note]
    assert f"process {killed[0]} was killed by SIGKILL; a newcomer takes its place" in notes
    # Workers that are slow to begin form anew, before the first step.
    pair = r"workers \d \(process \d+\), \d \(process \d+\)"
    first = re.match(rf"epoch (\d+), step 0: {pair}", notes[0])
    last = re.match(r"epoch (\d+), step \d+: workers", notes[-1])
    assert first is not None
    assert last is not None
    assert int(last[1]) > int(first[1])
    assert str(killed[0]) not in notes[-1]
    assert seen[-1].members.endswith("2 workers")
    assert record.replicas_equal
    assert record.losses["step"] == list(range(STEPS))
    assert record.evaluations["step"] == [0, 250, 500, 750, 1000]
    assert record.final_validation_loss < record.initial_validation_loss


def test_a_mistake_of_a_worker_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(crew_workers_module, "REPLACED_AFTER_S", 0.0)
    settings = make_settings(tmp_path, lr=1e30)
    with pytest.raises(WorkerFailedError, match=r"a worker failed: .*lr"):
        train(settings, run_dir=tmp_path / "run", observe=lambda progress: None, crew=True)


@pytest.mark.parametrize(
    ("given", "checkpoints", "option"),
    [
        ({"rule": "global-adamw", "exchange": "auto"}, {}, "--rule global-adamw"),
        ({"workers": 1}, {}, "--workers 1"),
        ({"momentum_sync_every": 3}, {}, "--momentum-sync-every"),
        ({}, {"every": 5}, "--checkpoint-every"),
    ],
)
def test_what_a_crew_cannot_have_is_refused_by_name(tmp_path, given, checkpoints, option):
    with pytest.raises(InvalidArgumentError, match=option):
        train(
            make_settings(tmp_path, **given),
            run_dir=tmp_path / "run",
            observe=lambda progress: None,
            checkpoints=CheckpointSettings(**checkpoints),
            crew=True,
        )


class EndingWhenAsked:
    """A process that has ended the n-th time that somebody looks at it."""

    pid = 1234

    def __init__(self, looks_left, exitcode):
        self.sentinel, self._looks_left, self._exitcode = 0, looks_left, exitcode

    @property
    def exitcode(self):
        self._looks_left -= 1
        return None if self._looks_left >= 0 else self._exitcode


@pytest.mark.parametrize("looks_left", range(4))
def test_a_worker_that_ends_between_any_two_looks_is_replaced(monkeypatch, tmp_path, looks_left):
    """The first one is killed, and the second one ends in order long after it."""
    monkeypatch.setattr(crew_workers_module, "REPLACED_AFTER_S", 0.0)
    monkeypatch.setattr(crew_workers_module.connection, "wait", lambda *args, **options: [])
    ends = [(looks_left, -signal.SIGKILL), (100, 0), (100, 0)]
    started = []

    def start(company):
        inbox, outbox = multiprocessing.Pipe(duplex=False)
        looks, exitcode = ends[len(started)]
        started.append(EndingWhenAsked(looks, exitcode))
        ending = Ending(make_record(), "digest") if exitcode == 0 else None
        company._members.append(crew_workers_module._Member(started[-1], inbox, ending=ending))
        outbox.close()

    monkeypatch.setattr(crew_workers_module._Company, "_start", start)
    monkeypatch.setattr(crew_workers_module._Company, "_is_over", property(lambda company: False))
    company = crew_workers_module._Company(
        make_settings(tmp_path), None, lambda progress: None, port=1, preload=()
    )
    assert company.run().replicas_equal
    assert len(started) == len(ends)


class SlowText:
    """A text task whose steps take longer, from one step on, until a file is there."""

    def __init__(self, task, held_from, until):
        self._task, self._held_from, self._until = task, held_from, until

    def __getattr__(self, name):
        return getattr(self._task, name)

    def training_batch(self, *, seed, step, rank, world_size):
        if step >= self._held_from and not self._until.exists():
            time.sleep(0.1)
        return self._task.training_batch(seed=seed, step=step, rank=rank, world_size=world_size)


def load_slowly(settings):
    """Load the task of a run whose last steps are for a worker that is to come back."""
    return SlowText(load_task(settings), 50, settings.model_config.with_name("came back"))


@pytest.mark.slow
def test_a_worker_that_was_stopped_comes_back_to_the_run(tmp_path):
    """It is stopped until the others have given it up."""
    steps, came_back = 300, tmp_path / "came back"
    settings = make_settings(tmp_path, workers=3, steps=steps, step_timeout_s=6.0)
    rosters, stopped, were_there = [], [], []

    def watch(progress):
        if progress.note:
            rosters.append(re.findall(r"process (\d+)", progress.note))
            if stopped:
                were_there.append(stopped[0] in rosters[-1])
        if not stopped and progress.step >= 5 and len(rosters[-1]) == 3:
            stopped.append(rosters[-1][-1])
            os.kill(int(stopped[0]), signal.SIGSTOP)
        elif were_there == [False]:
            os.kill(int(stopped[0]), signal.SIGCONT)
        elif were_there and were_there[-1]:
            came_back.touch()

    record = train_crew(settings, load_slowly, watch, preload=())
    assert were_there[0] is False
    assert were_there[-1] is True
    assert len(rosters[-1]) == 3
    assert record.replicas_equal
    assert record.losses["step"] == list(range(steps))
