import json

import pytest

from comparisons import make_record, make_text_comparison
from distlion.errors import InvalidArgumentError
from distlion_lab.errors import DataError, WorkerFailedError
from distlion_lab.training.compare import INDEX_NAME, RUNS_NAME, choose_lr, compare


def ignore(progress):
    pass


def run(settings, folder, *, jobs=2, observe=ignore):
    return compare(settings, folder=folder, jobs=jobs, command="command", observe=observe)


def list_runs(folder):
    return sorted(path.name for path in (folder / RUNS_NAME).iterdir())


def read_run(folder, name):
    return json.loads((folder / RUNS_NAME / name).read_text())


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    settings = make_text_comparison(folder)
    seen = []
    index = run(settings, folder / "out", observe=seen.append)
    return settings, folder / "out", index, seen


def test_choice_is_the_lowest_validation_loss_and_not_the_lowest_test_loss():
    low, high = make_record(lr=0.1), make_record(lr=0.2)
    low["series"]["validation_loss"][-1], low["series"]["test_loss"][-1] = 1.0, 9.0
    high["series"]["validation_loss"][-1], high["series"]["test_loss"][-1] = 2.0, 0.0
    assert choose_lr([(0.1, low), (0.2, high)]) == 0.1
    assert choose_lr([(0.2, high), (0.1, low)]) == 0.1


def test_of_equal_validation_losses_the_lowest_learning_rate_is_chosen():
    assert choose_lr([(0.2, make_record()), (0.1, make_record())]) == 0.1


def test_learning_rate_that_diverged_is_not_chosen():
    diverged = make_record(diverged=True)
    diverged["series"]["validation_loss"][-1] = 0.0
    assert choose_lr([(0.1, diverged), (0.2, make_record())]) == 0.2


def test_nothing_is_chosen_where_all_diverged():
    assert choose_lr([(0.1, make_record(diverged=True))]) is None


@pytest.mark.distributed
def test_every_run_has_a_record_and_the_index_names_them_all(done):
    _, folder, index, _ = done
    named = [
        name
        for cell in index["cells"]
        for name in [*(each["run"] for each in cell["tuning"]), *cell["runs"]]
    ]
    assert sorted(named) == list_runs(folder)
    # 2 methods, 2 numbers of workers, 2 learning rates and 2 seeds.
    assert len(named) == 2 * 2 * (2 + 2)
    assert json.loads((folder / INDEX_NAME).read_text()) == index


@pytest.mark.distributed
def test_reported_runs_have_the_learning_rate_that_was_best_on_validation(done):
    _, folder, index, _ = done
    for cell in index["cells"]:
        losses = {
            each["lr"]: read_run(folder, each["run"])["series"]["validation_loss"][-1]
            for each in cell["tuning"]
        }
        assert losses[cell["lr"]] == min(losses.values())
        settings = [read_run(folder, name)["settings"] for name in cell["runs"]]
        assert [(s["lr"], s["seed"]) for s in settings] == [(cell["lr"], 1), (cell["lr"], 2)]


@pytest.mark.distributed
def test_progress_ends_with_everything_done(done):
    seen = done[3]
    assert (seen[0].done_runs, seen[0].total_runs, seen[0].done_share) == (0, 16, 0.0)
    assert seen[0].seconds_left is None
    assert (seen[-1].done_runs, seen[-1].total_runs, seen[-1].done_share) == (16, 16, 1.0)
    assert seen[-1].seconds_left == 0.0


@pytest.mark.distributed
def test_finished_runs_are_not_run_again(done):
    settings, folder, index, _ = done
    before = {name: (folder / RUNS_NAME / name).stat().st_mtime_ns for name in list_runs(folder)}
    seen = []
    assert run(settings, folder, observe=seen.append) == index
    assert [progress.total_runs for progress in seen] == [0]
    after = {name: (folder / RUNS_NAME / name).stat().st_mtime_ns for name in list_runs(folder)}
    assert after == before


@pytest.mark.distributed
def test_index_that_cannot_be_written_is_one_line(done):
    settings, folder, _, _ = done
    index = folder / INDEX_NAME
    index.rename(folder / "kept")
    index.mkdir()
    try:
        with pytest.raises(DataError, match=r"cannot be written: Is a directory\. All runs have"):
            run(settings, folder)
    finally:
        index.rmdir()
        (folder / "kept").rename(index)


@pytest.mark.distributed
def test_half_written_record_is_run_again_to_the_same_bits(done):
    settings, folder, index, _ = done
    path = folder / RUNS_NAME / index["cells"][0]["runs"][0]
    whole = json.loads(path.read_text())
    path.write_text(path.read_text()[:100])
    seen = []
    run(settings, folder, observe=seen.append)
    assert seen[-1].total_runs == 1
    again = json.loads(path.read_text())
    assert again | {"timing": None} == whole | {"timing": None}


@pytest.mark.distributed
def test_lost_tuning_run_is_run_again_before_the_choice(done):
    settings, folder, index, _ = done
    (folder / RUNS_NAME / index["cells"][0]["tuning"][1]["run"]).unlink()
    assert run(settings, folder) == index


@pytest.mark.distributed
def test_comparison_can_be_extended(done, tmp_path):
    _, folder, _, _ = done
    seen = []
    longer = make_text_comparison(folder.parent, seeds=3)
    run(longer, folder, observe=seen.append)
    assert seen[-1].total_runs == 4


@pytest.mark.distributed
def test_run_that_diverges_is_recorded_and_not_repeated(tmp_path):
    # AdamW at 1e30: the parameters leave the range of float32 in the second step.
    settings = make_text_comparison(
        tmp_path, methods=("global-adamw",), workers=(1,), lrs=3, lr_factor=1e33, warmup_steps=0
    )
    index = run(settings, tmp_path / "out")
    (cell,) = index["cells"]
    highest = read_run(tmp_path / "out", cell["tuning"][-1]["run"])
    assert highest["diverged"]["step"] >= 1
    assert cell["lr"] != cell["grid"][-1]
    seen = []
    run(settings, tmp_path / "out", observe=seen.append)
    assert seen[-1].total_runs == 0


@pytest.mark.distributed
def test_method_that_always_diverges_has_no_reported_runs(tmp_path):
    settings = make_text_comparison(
        tmp_path, methods=("global-adamw",), workers=(1,), lrs=2, weight_decay=1e38
    )
    index = run(settings, tmp_path / "out")
    (cell,) = index["cells"]
    assert cell["lr"] is None
    assert cell["runs"] == []


@pytest.mark.distributed
def test_run_that_fails_otherwise_names_itself(tmp_path):
    # Nothing can be read from that device.
    settings = make_text_comparison(tmp_path, device="meta", methods=("majority",))
    with pytest.raises(WorkerFailedError, match=r"run of majority, . workers?, lr .*, seed 0"):
        run(settings, tmp_path / "out")
    assert not (tmp_path / "out" / INDEX_NAME).exists()


def test_wrong_data_is_reported_before_anything_runs(tmp_path):
    settings = make_text_comparison(tmp_path, data=str(tmp_path / "gone.txt"))
    with pytest.raises(DataError, match=r"gone\.txt"):
        run(settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_number_of_jobs_is_checked(tmp_path):
    with pytest.raises(InvalidArgumentError, match="jobs is 0"):
        run(make_text_comparison(tmp_path), tmp_path / "out", jobs=0)
