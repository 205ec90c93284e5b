import json
import os
import signal
import subprocess
import sys

import pytest

from distlion.errors import InvalidArgumentError
from distlion_lab.errors import DataError
from distlion_lab.training.record import RECORD_NAME
from distlion_lab.training.run import FIGURE_NAME, train
from distlion_lab.training.train_settings import Overlap, TaskName, TrainSettings
from signals import hear_ctrl_c

PROMISED = {
    "initial_validation_loss",
    "final_validation_loss",
    "final_train_loss",
    "sent_bytes_per_worker",
    "full_precision_bytes_per_worker",
    "replicas_equal",
    "settings",
    "versions",
    "losses",
    "evaluations",
    "wall_s",
    "world_size",
    "bits_per_parameter",
}


def ignore(progress):
    pass


def make_settings(**given):
    return TrainSettings.with_defaults(
        TaskName.IMAGES, **{"workers": 2, "steps": 4, "batch_size": 8, "eval_every": 4} | given
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    train(make_settings(), run_dir=folder, observe=ignore)
    return folder


@pytest.mark.distributed
def test_record_has_every_promised_key_at_its_top_level(run_dir):
    assert json.loads((run_dir / RECORD_NAME).read_text()).keys() >= PROMISED


@pytest.mark.distributed
def test_run_folder_holds_record_and_figure_alone(run_dir):
    assert sorted(path.name for path in run_dir.iterdir()) == sorted([FIGURE_NAME, RECORD_NAME])


@pytest.mark.distributed
def test_second_run_into_the_same_folder_is_refused(run_dir):
    before = (run_dir / RECORD_NAME).read_bytes()
    with pytest.raises(InvalidArgumentError, match="holds a record"):
        train(make_settings(), run_dir=run_dir, observe=ignore)
    assert (run_dir / RECORD_NAME).read_bytes() == before


def test_bad_data_is_reported_before_a_worker_starts_and_leaves_no_folder(tmp_path):
    settings = make_settings(data=str(tmp_path / "nothing"))
    with pytest.raises(DataError, match="nothing"):
        train(settings, run_dir=tmp_path / "run", observe=ignore)
    assert not (tmp_path / "run").exists()


def test_other_number_of_workers_than_torchrun_started_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InvalidArgumentError, match="torchrun started 3"):
        train(make_settings(workers=2), run_dir=tmp_path / "run", observe=ignore)


def start_endless_run(tmp_path, **environment):
    """Start a run in a session of its own and wait for its first evaluation."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "distlion", "train", "--task", "images", "--workers", "2"),
            *("--steps", "1000000", "--batch-size", "1", "--run-dir", str(tmp_path / "run")),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,  # noqa: PLW1509
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "validation" in line:
            break
    return process


@pytest.mark.distributed
@pytest.mark.slow
def test_ctrl_c_ends_every_process_with_status_130(tmp_path):
    process = start_endless_run(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    # Every process holds the other end of this pipe: it ends when the last of them has.
    errors = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors


@pytest.mark.distributed
@pytest.mark.slow
def test_sigterm_ends_every_process_and_leaves_no_temporary_folder(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = start_endless_run(tmp_path, TMPDIR=str(temporary))
    assert list(temporary.glob("distlion-*"))
    process.terminate()
    errors = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors
    # Beside the caches of torch, which are for later processes.
    assert list(temporary.glob("distlion-*")) == list(temporary.glob("pymp-*")) == []


@pytest.mark.distributed
@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path):
    process = start_endless_run(tmp_path)
    process.kill()
    # As above: the pipe's end shows that no worker is left.
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL


def run_torchrun(folder, *arguments):
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "distlion", "train"),
            *("--run-dir", str(folder), *arguments),
        ],
        env=environment,
        check=True,
        timeout=120,
    )
    return json.loads((folder / RECORD_NAME).read_text())


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["majority", "global-adamw"])
def test_torchrun_gives_bitwise_the_losses_of_local_workers(tmp_path, rule):
    local = train(make_settings(rule=rule), run_dir=tmp_path / "local", observe=ignore)
    joined = run_torchrun(
        tmp_path / "joined",
        *("--task", "images", "--rule", rule, "--steps", "4"),
        *("--batch-size", "8", "--eval-every", "4"),
    )
    assert local is not None
    assert joined["losses"]["loss"] == local.losses["loss"]
    assert joined["evaluations"]["loss"] == local.evaluations["loss"]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["majority", "quantized-4"])
def test_plain_torch_kernels_give_bitwise_the_losses_of_the_core(tmp_path, rule):
    records = []
    for kernels in ("cpu", "reference"):
        folder = tmp_path / kernels
        # In processes of their own: the server that forks workers keeps its environment.
        subprocess.run(
            [
                *(sys.executable, "-m", "distlion", "train", "--task", "images", "--rule", rule),
                *("--workers", "3", "--steps", "6", "--batch-size", "8", "--eval-every", "3"),
                *("--run-dir", str(folder)),
            ],
            env=os.environ | {"DISTLION_KERNELS": kernels},
            check=True,
            timeout=120,
        )
        records.append(json.loads((folder / RECORD_NAME).read_text()))
    assert records[0]["losses"]["loss"] == records[1]["losses"]["loss"]
    assert records[0]["evaluations"]["loss"] == records[1]["evaluations"]["loss"]


@pytest.mark.distributed
def test_overlap_and_server_change_no_loss(run_dir, tmp_path):
    other = tmp_path / "overlapped"
    settings = make_settings(overlap=Overlap.ON, exchange="parameter-server")
    train(settings, run_dir=other, observe=ignore)
    records = [json.loads((folder / RECORD_NAME).read_text()) for folder in (run_dir, other)]
    for series in ("losses", "evaluations"):
        ours, expected = (without_seconds(record[series]) for record in records)
        assert ours == expected


def without_seconds(series):
    return {name: values for name, values in series.items() if name != "seconds"}


@pytest.mark.distributed
def test_momenta_are_averaged_and_votes_diagnosed_where_asked_for(run_dir, tmp_path):
    plain = json.loads((run_dir / RECORD_NAME).read_text())
    assert plain["diagnostics"] == []
    folder = tmp_path / "diagnosed"

    train(make_settings(momentum_sync_every=2, diagnose_every=3), run_dir=folder, observe=ignore)

    record = json.loads((folder / RECORD_NAME).read_text())
    assert {entry["step"] for entry in record["diagnostics"]} == {0, 3}
    assert all(0 < entry["margin"] <= 1 for entry in record["diagnostics"])
    assert (folder / "diagnosis.png").read_bytes().startswith(b"\x89PNG")
    # A majority of two sends (1 + 1) / 2 bits, half the momenta in each step (32 + 32) / 2 / 2.
    assert record["bits_per_parameter"] > plain["bits_per_parameter"] + 15
    assert record["losses"]["loss"][0] == plain["losses"]["loss"][0]
    assert record["replicas_equal"]
