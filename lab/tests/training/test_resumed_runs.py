"""A run that is killed and resumed ends with the bits, and the record, of one that was not."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import WorkerDiedError, run_workers
from distlion import faults
from distlion.checkpoint import inspect_checkpoint
from distlion.errors import CheckpointError, InvalidArgumentError
from distlion_lab.errors import WorkerFailedError
from distlion_lab.training.checkpoints import (
    CHECKPOINTS_NAME,
    CheckpointSettings,
    describe_difference,
)
from distlion_lab.training.history import History
from distlion_lab.training.loop import TrainingLoop
from distlion_lab.training.record import RECORD_NAME
from distlion_lab.training.run import load_task, train
from distlion_lab.training.train_settings import OnDisagreement, TrainSettings

pytestmark = pytest.mark.distributed

# With dropout, averaged momenta and votes of several bits: all that a resume could lose.
CONFIG = (
    '{"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": 1, '
    '"n_head": 2, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0}'
)
STEPS, EVERY = 9, 2
SAVING = CheckpointSettings(every=EVERY)
RESUMING = CheckpointSettings(every=EVERY, resume=True)


def ignore(progress):
    pass


def make_settings(folder, **given):
    config = Path(folder) / "config.json"
    if not config.exists():
        config.write_text(CONFIG)
    options = {
        "workers": 2,
        "steps": STEPS,
        "eval_every": 4,
        "batch_size": 2,
        "warmup_steps": 3,
        "exchange": "all-reduce",
        "momentum_sync_every": 3,
        "diagnose_every": 4,
        "model_config": config,
    }
    return TrainSettings.with_defaults(rule="quantized-4", **options | given)


def kill_oneself(subject):
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(rank, world_size, folder, fatal):
    """Train in this process; SIGKILL it at a rank, step and point, and a place of a save."""
    culprit, step, point, place = fatal

    def kill(subject):
        if place is None or subject == place:
            kill_oneself(subject)

    faults.arm(rank=culprit, step=step, point=point, action=kill)
    settings = make_settings(folder)
    loop = TrainingLoop(
        settings, load_task(settings), ignore, checkpoints=RESUMING, run_dir=Path(folder) / "run"
    )
    loop.run()


def read_bits(run_dir):
    """Return the sums of all that training made: parameters, and momenta of each worker."""
    manifest = inspect_checkpoint(run_dir / CHECKPOINTS_NAME)[1]
    assert manifest.step == STEPS
    sums = {name: record.sha256 for name, record in manifest.files.items()}
    return {name: value for name, value in sums.items() if not name.startswith("process-")}


def read_record(run_dir):
    """Return what must not depend on interruptions: all but times."""
    record = json.loads((run_dir / RECORD_NAME).read_text())
    # Loads and saves compare replicas too.
    del record["wall_s"], record["traffic"]["check_sent_bytes"]
    del record["losses"]["seconds"], record["evaluations"]["seconds"]
    # Where the run lies differs, what lies there does not.
    del record["settings"]["model_config"]
    return record


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Train without interruption; return the run's folder."""
    folder = tmp_path_factory.mktemp("whole")
    train(make_settings(folder), run_dir=folder / "run", observe=ignore, checkpoints=SAVING)
    return folder / "run"


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Kill a worker in the middle of a step and resume; return the run's folder and the notes."""
    folder = tmp_path_factory.mktemp("resumed")
    fatal = (1, 5, "before_commit", None)
    make_settings(folder)  # writes the model's file, before ranks read it
    outcomes = run_workers(train_until_killed, 2, str(folder), fatal, may_die=True)
    assert isinstance(outcomes[1], WorkerDiedError)  # the fault fired
    notes = []

    def listen(progress):
        if progress.note:
            notes.append((progress.step, progress.note))

    train(make_settings(folder), run_dir=folder / "run", observe=listen, checkpoints=RESUMING)
    return folder / "run", notes


def train_over(run_dir, settings, checkpoints=RESUMING):
    return train(settings, run_dir=run_dir, observe=ignore, checkpoints=checkpoints)


def test_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(whole, resumed):
    assert read_bits(resumed[0]) == read_bits(whole)


def test_record_of_a_resumed_run_holds_the_whole_run(whole, resumed):
    assert read_record(resumed[0]) == read_record(whole)


def test_clock_of_a_resumed_run_goes_on(resumed):
    seconds = json.loads((resumed[0] / RECORD_NAME).read_text())["losses"]["seconds"]
    assert seconds == sorted(seconds)


def test_resumed_run_says_where_it_goes_on(resumed):
    folder, notes = resumed
    # Steps 0 to 4 were committed, and the last checkpoint was after 4 of them.
    name = folder / CHECKPOINTS_NAME / "step-000000000004"
    assert notes == [(4, f"resumed from {name}: step 4 of {STEPS}")]


def test_run_that_has_ended_is_resumed_at_its_end(whole):
    before = read_record(whole), read_bits(whole)
    train_over(whole, make_settings(whole.parent))
    assert (read_record(whole), read_bits(whole)) == before


def test_as_many_checkpoints_as_asked_for_are_kept(whole):
    names = sorted(path.name for path in (whole / CHECKPOINTS_NAME).iterdir())
    assert names == ["latest", *(f"step-{step:012d}" for step in (6, 8, 9))]


def test_settings_of_another_run_are_refused(whole):
    settings = make_settings(whole.parent, lr=1e-3)
    with pytest.raises(WorkerFailedError, match=r"a run with lr 0\.0005, and this one has 0\.001"):
        train_over(whole, settings)


def test_data_of_another_run_are_refused(tmp_path):
    data = tmp_path / "text.txt"
    settings = make_settings(tmp_path, workers=1, steps=1, data=str(data))
    data.write_text("a line of the text\n" * 100)
    train_over(tmp_path / "run", settings, SAVING)
    data.write_text("a line of another text\n" * 100)
    with pytest.raises(WorkerFailedError, match=r"by a run on other data: data_sha256 .* this one"):
        train_over(tmp_path / "run", settings)


def test_interval_of_diagnoses_may_change_unless_it_decides_whose_votes_count(tmp_path):
    def describe(then, now):
        options = {"rule": "majority", "momentum_sync_every": None}
        settings = [
            dataclasses.replace(make_settings(tmp_path), **options, **changes)
            for changes in (then, now)
        ]
        return describe_difference(settings[0].to_json(), settings[1])

    excluding = {"on_disagreement": OnDisagreement.EXCLUDE}
    assert describe({"diagnose_every": 4}, {"diagnose_every": 2}) is None
    assert (
        describe({**excluding, "diagnose_every": 4}, {**excluding, "diagnose_every": 2})
        == "diagnose_every 4, and this one has 2"
    )
    assert describe({}, excluding) == "on_disagreement warn, and this one has exclude"


def test_checkpoint_from_before_a_setting_has_its_default(tmp_path):
    settings = make_settings(tmp_path)
    saved = settings.to_json()
    del saved["on_disagreement"]
    assert describe_difference(saved, settings) is None
    assert describe_difference(saved | {"lr": 0.5}, settings) == "lr 0.5, and this one has 0.0005"


def test_another_number_of_workers_is_refused_without_a_rule(whole):
    settings = make_settings(whole.parent, workers=1)
    with pytest.raises(WorkerFailedError, match=r"momenta of 2 workers.*--on-world-change"):
        train_over(whole, settings)


def resume_alone(rank, world_size, folder):
    settings = make_settings(folder, workers=1)
    checkpoints = CheckpointSettings(resume=True, on_world_change="map")
    loop = TrainingLoop(
        settings, load_task(settings), ignore, checkpoints=checkpoints, run_dir=Path(folder) / "run"
    )
    record = loop.run()
    return record.losses["step"], record.full_precision_bytes_per_worker


def test_another_number_of_workers_goes_on_by_a_rule(tmp_path):
    fatal = (0, 5, "before_step", None)
    make_settings(tmp_path)  # writes the model's file, before ranks read it
    run_workers(train_until_killed, 2, str(tmp_path), fatal, may_die=True)
    steps, full_precision_bytes = run_workers(resume_alone, 1, str(tmp_path))[0]
    assert steps == list(range(STEPS))
    trainable = 256 * 16 + 16 * 16 + (16 * 48 + 48 + 16 * 16 + 16) + 4 * 16
    trainable += 16 * 64 + 64 + 64 * 16 + 16 + 32
    # The steps before the change had a ring of two, those after it no ring.
    assert full_precision_bytes == 4 * 4 * trainable


def train_without_a_folder(rank, world_size, folder):
    notes = []
    (Path(folder) / "run").mkdir()
    (Path(folder) / "run" / CHECKPOINTS_NAME).write_text("in the way")
    settings = make_settings(folder, workers=1, steps=3)
    loop = TrainingLoop(
        settings,
        load_task(settings),
        lambda progress: notes.append(progress.note),
        checkpoints=SAVING,
        run_dir=Path(folder) / "run",
    )
    return loop.run().losses["step"], [note for note in notes if note]


def test_run_goes_on_where_no_checkpoint_can_be_written_and_says_so(tmp_path):
    steps, notes = run_workers(train_without_a_folder, 1, str(tmp_path))[0]
    assert steps == [0, 1, 2]
    assert [note.partition(":")[0] for note in notes] == [
        f"no checkpoint after step {done}, training goes on" for done in (2, 3)
    ]


def start_anew(rank, world_size, folder):
    seen = []
    settings = make_settings(folder, workers=1, steps=1)
    loop = TrainingLoop(
        settings,
        load_task(settings),
        seen.append,
        checkpoints=RESUMING,
        run_dir=Path(folder) / "run",
    )
    loop.run()
    return [(progress.step, progress.note) for progress in seen if progress.note]


def test_resume_without_a_checkpoint_starts_from_the_beginning_and_says_so(tmp_path):
    (note,) = run_workers(start_anew, 1, str(tmp_path))[0]
    folder = tmp_path / "run" / CHECKPOINTS_NAME
    assert note == (0, f"no checkpoint in {folder}: starting from the beginning")


def test_a_run_that_begins_anew_beside_the_checkpoints_of_another_is_refused(tmp_path):
    latest = tmp_path / "run" / CHECKPOINTS_NAME / "latest"
    latest.parent.mkdir(parents=True)
    latest.touch()
    with pytest.raises(InvalidArgumentError, match=r"checkpoints of an earlier run.*--resume"):
        train_over(tmp_path / "run", make_settings(tmp_path), SAVING)


@pytest.mark.parametrize("extra", [{}, {"losses": {}}, {"losses": None}])
def test_history_of_another_program_is_refused(extra):
    with pytest.raises(CheckpointError, match="not saved by distlion train"):
        History(None, 1).restore(extra)


def test_baseline_refuses_checkpoints(tmp_path):
    settings = TrainSettings.with_defaults(rule="dgc")
    with pytest.raises(InvalidArgumentError, match="rule dgc, a baseline"):
        train_over(tmp_path / "run", settings, SAVING)


@pytest.mark.parametrize(("given", "name"), [("every", "checkpoint_every"), ("keep", "keep")])
def test_numbers_below_one_are_refused(given, name):
    with pytest.raises(InvalidArgumentError, match=f"^{name} is 0"):
        CheckpointSettings(**{given: 0})


# Run by torchrun: SIGKILLs a worker in each of the first starts, at a moment that is drawn.
FATAL_PROGRAM = """
import os, pathlib, random, signal, sys
from distlion import faults
from distlion_lab.cli import app

marker, seed, steps = pathlib.Path(sys.argv.pop(1)), sys.argv.pop(1), int(sys.argv.pop(1))
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
chance = random.Random(f"{seed} {start}")
victim, moments = chance.randrange(2), chance.randrange(1, 71)

def kill(subject):
    global moments
    moments -= 1
    if moments == 0:
        with marker.open("a") as file:
            file.write(f"{start}\\n")
        os.kill(os.getpid(), signal.SIGKILL)

if start < 4:
    # At most 70 moments: two steps and a save have about 40, so that no start comes to the end.
    for step in range(steps + 1):
        for point in ("before_step", "after_encode", "before_commit", "after_commit", "checkpoint"):
            faults.arm(rank=victim, step=step, point=point, action=kill)
app()
"""
KILLS = 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_torchrun_restarts_killed_workers_and_ends_with_the_same_bits(seed, tmp_path, whole):
    program, marker = tmp_path / "program.py", tmp_path / "marker"
    program.write_text(FATAL_PROGRAM)
    settings = make_settings(tmp_path)
    options = {
        "--rule": settings.rule,
        "--steps": STEPS,
        "--eval-every": 4,
        "--batch-size": 2,
        "--warmup-steps": 3,
        "--exchange": "all-reduce",
        "--momentum-sync-every": 3,
        "--diagnose-every": 4,
        "--model-config": settings.model_config,
        "--checkpoint-every": EVERY,
        "--run-dir": tmp_path / "run",
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--max-restarts={KILLS}", "--nproc-per-node=2", str(program)),
            *(str(marker), str(seed), str(STEPS), "train", "--resume"),
            *(str(part) for pair in options.items() for part in pair),
        ],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert marker.read_text().split() == ["0", "1", "2", "3"]
    assert "starting from the beginning" in done.stderr
    assert read_bits(tmp_path / "run") == read_bits(whole)
    assert read_record(tmp_path / "run") == read_record(whole)


PLACES = (
    "made the folder",
    "wrote the manifest",
    "renamed the folder",
    "replaced latest",
    "pruned",
)


def draw_fatal(chance):
    """Draw where a run is killed: rank, step, point, and the place of a save."""
    rank, step = chance.randrange(2), chance.randrange(STEPS)
    points = ("before_step", "after_encode", "before_commit", "after_commit", "checkpoint")
    point = chance.choice(points)
    if point != "checkpoint":
        return rank, step, point, None
    # What rank 0 does alone, and steps after which there is a save.
    return 0, chance.choice([2, 4, 6, 8, STEPS]), point, chance.choice(PLACES)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_runs_that_are_killed_anywhere_end_with_the_same_bits(number, tmp_path, whole):
    chance = random.Random(number)
    kills = 0
    make_settings(tmp_path)  # writes the model's file, before ranks read it
    for _ in range(2):
        fatal = draw_fatal(chance)
        outcomes = run_workers(train_until_killed, 2, str(tmp_path), fatal, may_die=True)
        kills += any(isinstance(outcome, WorkerDiedError) for outcome in outcomes)
    # The first start began at step 0; the place of a later fault may lie before its checkpoint.
    assert kills >= 1
    train_over(tmp_path / "run", make_settings(tmp_path))
    assert read_bits(tmp_path / "run") == read_bits(whole)
    assert read_record(tmp_path / "run") == read_record(whole)
