import json

import pytest

from comparisons import make_run
from distlion_lab.errors import DataError
from distlion_lab.tasks.text import Tokenizer
from distlion_lab.training.record import describe_versions
from distlion_lab.training.run_record import RecordFolder, RunRecord
from distlion_lab.training.train_settings import PartitionName, TaskName

FACTS = {"name": "images", "data": "digits", "model_type": "vit", "data_sha256": "a"}
COLUMNS = ("step", "validation_loss", "test_loss", "test_accuracy", "sent_bytes")


def make_record(settings, **changes):
    fields = {
        "settings": settings.to_json(),
        "versions": describe_versions(),
        "task": FACTS,
        "trainable_parameters": 1,
        "diverged": None,
        "up_bits_per_parameter": 1.0,
        "down_bits_per_parameter": 1.0,
        "sent_bytes_per_step": 1.0,
        "rounds": 2,
        "parameters_sha256": "",
        "series": {name: [0] for name in COLUMNS},
        "timing": {"wall_s": 1.0, "compute_s": None},
    }
    return RunRecord(**fields | changes)


@pytest.fixture
def folder(tmp_path):
    return RecordFolder(tmp_path / "runs", FACTS)


def test_record_is_read_back_as_it_was_written(folder):
    settings = make_run()
    record = make_record(settings)
    folder.write(settings, record)
    assert folder.read(settings) == record.to_json()


def test_record_that_cannot_be_written_is_one_line(folder):
    settings = make_run()
    folder.path(settings).mkdir()
    with pytest.raises(DataError, match=r"cannot be written: Is a directory\. Finished runs have"):
        folder.write(settings, make_record(settings))


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN"])
def test_record_of_a_config_without_a_finite_number_is_read_back(folder, tmp_path, number):
    config = tmp_path / "config.json"
    config.write_text(f'{{"model_type": "mamba2", "time_step_limit": [0.0, {number}]}}')
    text = {"task": TaskName.TEXT, "tokenizer": Tokenizer.BYTE}
    settings = make_run(**text, partition=PartitionName.CONTIGUOUS, model_config=config)
    record = make_record(settings)
    folder.write(settings, record)
    assert folder.read(settings) == record.to_json()


def test_record_that_is_missing_is_none(folder):
    assert folder.read(make_run()) is None


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_record_that_was_half_written_does_not_count(folder, share):
    settings = make_run()
    folder.write(settings, make_record(settings))
    text = folder.path(settings).read_text()
    folder.path(settings).write_text(text[: int(share * len(text))])
    assert folder.read(settings) is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": 0},
        {"settings": {}},
        {"task": FACTS | {"data_sha256": "b"}},
        {"versions": describe_versions() | {"torch": "2.0"}},
        {"versions": None},
    ],
)
def test_record_of_another_format_run_data_or_version_does_not_count(folder, change):
    settings = make_run()
    folder.write(settings, make_record(settings))
    path = folder.path(settings)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert folder.read(settings) is None


def test_record_counts_on_another_platform(folder):
    settings = make_run()
    elsewhere = describe_versions() | {"platform": "elsewhere"}
    folder.write(settings, make_record(settings, versions=elsewhere))
    assert folder.read(settings) is not None


def test_record_that_cannot_be_written_leaves_nothing(folder, tmp_path):
    settings = make_run()
    with pytest.raises(ValueError, match="JSON compliant"):
        folder.write(settings, make_record(settings, sent_bytes_per_step=float("nan")))
    assert list((tmp_path / "runs").iterdir()) == []


def test_folder_that_cannot_be_made_is_a_data_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--out"):
        RecordFolder(tmp_path / "file" / "runs", FACTS)
