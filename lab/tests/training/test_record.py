import json

import pytest

from distlion.errors import InvalidArgumentError
from distlion_lab.training.checkpoints import has_checkpoint
from distlion_lab.training.record import claim_run_dir, describe_versions, write_record
from run_records import make_record


def test_record_file_holds_the_record(tmp_path):
    record = make_record()
    path = write_record(record, tmp_path)
    assert json.loads(path.read_text()) == record.to_json()


def test_summary_leaves_out_the_series():
    assert make_record().to_json().keys() - make_record().summary().keys() == {
        "losses",
        "evaluations",
        "diagnostics",
    }


def test_record_that_cannot_be_written_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_record(make_record(final_train_loss=float("nan")), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_writing_that_fails_halfway_keeps_the_old_record(tmp_path, monkeypatch):
    path = write_record(make_record(), tmp_path)
    before = path.read_text()

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr("distlion_lab.training.record.os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_record(make_record(wall_s=2.0), tmp_path)
    assert [item.read_text() for item in tmp_path.iterdir()] == [before]


def test_run_folder_with_a_record_is_refused(tmp_path):
    write_record(make_record(), tmp_path)
    with pytest.raises(InvalidArgumentError, match="holds a record"):
        claim_run_dir(tmp_path)


# A name that the system refuses to look up stands for a folder that may not be entered.
@pytest.mark.parametrize("name", ["file/run", "n" * 300])
def test_run_folder_that_cannot_be_made_is_refused(name, tmp_path):
    (tmp_path / "file").write_text("")
    assert not has_checkpoint(tmp_path / name)
    with pytest.raises(InvalidArgumentError, match="cannot be made"):
        claim_run_dir(tmp_path / name)


def test_versions_name_what_losses_depend_on():
    assert describe_versions().keys() >= {"distlion", "torch", "python", "platform"}
