import json
from dataclasses import replace

import pytest

from comparisons import TINY_GPT, make_run
from distlion.errors import InvalidArgumentError
from distlion_lab.errors import DataError
from distlion_lab.tasks.text import Tokenizer
from distlion_lab.training.methods import find_method
from distlion_lab.training.train_settings import PartitionName, Schedule, TaskName


@pytest.mark.parametrize(
    "change",
    [
        {"method": "average"},
        {"workers": 4},
        {"seed": 2},
        {"lr": 0.02},
        {"weight_decay": 0.1},
        {"steps": 7},
        {"schedule": Schedule.COSINE},
        {"warmup_steps": 1},
        {"batch_size": 3},
        {"eval_every": 5},
        {"device": "meta"},
        {"data": "elsewhere"},
        {"partition": PartitionName.BY_CLASS, "alpha": 0.5},
    ],
)
def test_every_setting_changes_the_name_of_the_record(change):
    assert make_run(**change).name_record() != make_run().name_record()


def test_equal_settings_have_equal_names_that_people_can_read():
    name = make_run().name_record()
    assert name == make_run().name_record()
    assert name.startswith("majority-3-1-")


def test_name_follows_the_content_of_the_model_config_and_not_its_place(tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    text = {"task": TaskName.TEXT, "tokenizer": Tokenizer.BYTE}
    text["partition"] = PartitionName.CONTIGUOUS
    first.write_text(json.dumps(TINY_GPT))
    second.write_text(json.dumps(TINY_GPT, indent=1))
    name = make_run(**text, model_config=first).name_record()
    assert make_run(**text, model_config=second).name_record() == name
    second.write_text(json.dumps(TINY_GPT | {"n_layer": 2}))
    assert make_run(**text, model_config=second).name_record() != name


def test_name_follows_what_the_method_means(monkeypatch):
    before = make_run().name_record()
    method = replace(find_method("majority"), definition="another rule")
    monkeypatch.setattr("distlion_lab.training.run_settings.find_method", lambda _: method)
    assert make_run().name_record() != before


def test_model_config_that_is_missing_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match=r"gone\.json"):
        make_run(model_config=tmp_path / "gone.json").to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"workers": 0}, "workers"), ({"lr": 0.0}, "lr"), ({"tokenizer": Tokenizer.BYTE}, "token")],
)
def test_settings_that_make_no_run_are_refused(change, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make_run(**change)


def test_settings_survive_json():
    settings = make_run().to_json()
    assert json.loads(json.dumps(settings)) == settings


def test_runs_that_differ_in_method_seed_and_workers_share_their_data():
    other = make_run(method="average", seed=5, workers=7, lr=1.0, steps=9)
    assert other.to_data() == make_run().to_data()
    assert make_run(batch_size=3).to_data() != make_run().to_data()
