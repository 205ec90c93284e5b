import errno
import json

import pytest
from typer.testing import CliRunner

from distlion_lab.cli import app
from distlion_lab.training.record import Record

SHORT = ["train", "--task", "images", "--steps", "2", "--batch-size", "4", "--eval-every", "2"]


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def json_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return invoke(*SHORT, "--rule", "average", "--workers", "3", "--json", "--run-dir", str(folder))


@pytest.mark.smoke
def test_help_shows_an_example():
    result = invoke("train", "--help")
    assert result.exit_code == 0
    assert "Example: distlion train" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [["train", "--steps", "many"], ["train", "--nonsense"], ["x"]],
)
def test_usage_error_exits_with_2(arguments):
    assert invoke(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--lr", "-1"), "lr is -1.0"),
        (("--rule", "majorty"), "did you mean majority"),
        (("--exchange", "no-such"), "all-gather"),
    ],
)
def test_wrong_value_is_one_clear_message_and_exits_with_2(tmp_path, arguments, words):
    result = invoke("train", *arguments, "--run-dir", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_partition_of_another_task_exits_with_2(tmp_path):
    result = invoke("train", "--partition", "by-class", "--run-dir", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert "partition is by-class with the task text" in result.stderr


@pytest.mark.distributed
def test_skewed_images_are_recorded(tmp_path):
    skew = ["--workers", "2", "--partition", "by-class", "--alpha", "0.5"]
    result = invoke(*SHORT, *skew, "--json", "--run-dir", str(tmp_path / "run"))
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["settings"]["alpha"] == 0.5
    assert record["task"]["partition"] == "ByClass(alpha=0.5)"


def test_missing_data_exits_with_1_and_names_the_file(tmp_path):
    result = invoke("train", "--data", str(tmp_path / "absent.txt"), "--run-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "absent.txt" in result.stderr


def test_run_folder_with_a_record_exits_with_2(tmp_path):
    (tmp_path / "record.json").write_text("{}")
    result = invoke(*SHORT, "--run-dir", str(tmp_path))
    assert result.exit_code == 2
    assert "holds a record.json already" in result.stderr


@pytest.mark.distributed
def test_images_train_with_three_workers_that_average(json_run):
    assert json_run.exit_code == 0, json_run.stderr
    record = json.loads(json_run.stdout)
    assert record["world_size"] == 3
    assert record["settings"]["rule"] == "average"
    assert record["replicas_equal"] is True


@pytest.mark.distributed
def test_baseline_trains_with_its_own_optimizer_and_account(tmp_path):
    result = invoke(
        *SHORT, "--rule", "terngrad", "--workers", "2", "--json", "--run-dir", str(tmp_path / "run")
    )
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["settings"]["lr"] == 1e-3
    # Two bits for each level, and a few scales and spare bits.
    assert 2 < record["bits_per_parameter"] < 2.1
    assert record["replicas_equal"] is True


@pytest.mark.distributed
def test_progress_goes_to_standard_error(json_run):
    assert "step 2/2" in json_run.stderr


@pytest.mark.smoke
@pytest.mark.distributed
def test_summary_table_shows_what_the_run_cost(tmp_path):
    result = invoke(*SHORT, "--workers", "2", "--run-dir", str(tmp_path / "run"))
    assert result.exit_code == 0, result.stderr
    for row in (
        "training images",
        "validation images",
        "final validation loss",
        "sent by each worker",
        "reduction",
        "replicas bitwise identical",
    ):
        assert row in result.stdout


def test_worker_of_torchrun_leaves_without_winding_up_the_interpreter(monkeypatch):
    class Left(Exception):
        pass

    def leave(status):
        raise Left(status)

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    # Another rank has the record and shows it.
    monkeypatch.setattr("distlion_lab.cli.training_run.train", lambda *_, **__: None)
    monkeypatch.setattr("distlion_lab.cli.failure.os._exit", leave)
    with pytest.raises(Left, match="0"):
        CliRunner().invoke(app, ["train", "--task", "images"], catch_exceptions=False)


def test_resume_without_a_run_folder_is_refused():
    result = invoke(*SHORT, "--resume")
    assert result.exit_code == 2
    assert "--resume needs the --run-dir" in result.stderr


def test_checkpoints_under_torchrun_need_a_folder_that_all_workers_know(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = invoke(*SHORT, "--checkpoint-every", "1")
    assert result.exit_code == 2
    assert "--checkpoint-every needs a --run-dir" in result.stderr


@pytest.mark.parametrize("refused", [["--workers", "1000"], ["--data", "absent"]])
def test_what_is_refused_has_not_begun(refused, tmp_path):
    result = invoke(*SHORT, *refused, "--run-dir", str(tmp_path / "run"))
    assert result.exit_code in (1, 2)
    assert "starting" not in result.stderr


def test_start_of_the_workers_is_reported(tmp_path, trained):
    result = invoke(*SHORT, "--workers", "1", "--run-dir", str(tmp_path / "run"))
    assert result.stderr.splitlines() == ["starting 1 workers"]


@pytest.mark.distributed
def test_resumed_run_tells_where_it_starts(tmp_path):
    options = ["--workers", "1", "--run-dir", str(tmp_path / "run"), "--resume"]
    results = [invoke(*SHORT, *options, "--checkpoint-every", "1") for _ in range(2)]
    assert [result.exit_code for result in results] == [0, 0]
    assert "starting from the beginning" in results[0].stderr
    assert "step 2 of 2" in results[1].stderr


@pytest.fixture
def short_record(tmp_path):
    """Return what a run has to write, without the run."""
    series = {"step": [1, 2], "seconds": [0.1, 0.2], "loss": [2.0, 1.5]}
    return Record(
        settings={"task": "images", "rule": "majority", "workers": 1, "steps": 2},
        versions={},
        task={},
        trainable_parameters=10,
        world_size=1,
        initial_validation_loss=2.0,
        final_validation_loss=1.5,
        final_validation_accuracy=0.5,
        final_train_loss=1.5,
        wall_s=1.0,
        sent_bytes_per_worker=0,
        full_precision_bytes_per_worker=0,
        bits_per_parameter=0.0,
        replicas_equal=True,
        traffic={},
        losses=series | {"lr": [1.0, 1.0]},
        evaluations=series | {"accuracy": [0.1, 0.5]},
        diagnostics=[],
    )


@pytest.fixture
def trained(monkeypatch, short_record):
    """Let a run end at once."""
    monkeypatch.setattr("distlion_lab.training.run.run_workers", lambda *_, **__: short_record)
    return short_record


def refuse_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_record_without_a_place_on_the_disk_is_printed(tmp_path, trained, monkeypatch):
    monkeypatch.setattr("distlion_lab.training.run.write_record", refuse_disk)
    result = invoke(*SHORT, "--workers", "1", "--run-dir", str(tmp_path / "run"))
    assert result.exit_code == 1
    assert json.loads(result.stdout) == trained.to_json()
    *_, line = result.stderr.splitlines()
    assert "record.json cannot be written: No space left on device" in line
    assert "Traceback" not in result.stderr


def test_record_is_kept_where_the_figure_finds_no_place(tmp_path, trained, monkeypatch):
    monkeypatch.setattr("distlion_lab.training.run.draw_loss_figure", refuse_disk)
    result = invoke(*SHORT, "--workers", "1", "--run-dir", str(tmp_path / "run"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "loss.png cannot be written" in result.stderr
    assert json.loads((tmp_path / "run" / "record.json").read_text()) == trained.to_json()


def test_paths_of_the_summary_are_never_cut(tmp_path, trained):
    folder = tmp_path / ("long-name-" * 20)
    arguments = [*SHORT, "--workers", "1", "--run-dir", str(folder)]
    result = CliRunner(env={"COLUMNS": "40"}).invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert f"record: {folder / 'record.json'}" in lines
    assert f"figure: {folder / 'loss.png'}" in lines


def test_step_timeout_of_a_baseline_exits_with_2(tmp_path):
    result = invoke(
        *SHORT, "--rule", "dgc", "--step-timeout", "5", "--run-dir", str(tmp_path / "r")
    )
    assert result.exit_code == 2
    assert "--step-timeout is 5.0 with the rule dgc" in result.stderr


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_step_timeout_must_be_finite_and_above_0(tmp_path, seconds):
    result = invoke(*SHORT, "--step-timeout", seconds, "--run-dir", str(tmp_path / "r"))
    assert result.exit_code == 2
    assert "--step-timeout" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.distributed
def test_local_steps_train_and_say_how_often_they_voted(tmp_path):
    result = invoke(
        *SHORT, "--steps", "5", "--every", "2", "--workers", "2", "--run-dir", str(tmp_path / "run")
    )
    assert result.exit_code == 0, result.stderr
    assert "scaled every 2 steps" in result.stdout
    assert "votes" in result.stdout
    assert "3 votes" in result.stderr  # after steps 2, 4 and 5
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["traffic"]["steps"] == 3
