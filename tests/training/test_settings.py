import json
import math

import pytest

from distlion.errors import InvalidArgumentError
from distlion.tasks import Tokenizer
from distlion.training import ExchangeName, Norm, RuleName, TaskName, TrainSettings


@pytest.mark.parametrize("task", list(TaskName))
@pytest.mark.parametrize("rule", list(RuleName))
def test_defaults_are_valid_for_every_task_and_rule(task, rule):
    assert TrainSettings.with_defaults(task, rule).rule is rule


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", 0),
        ("steps", 0),
        ("batch_size", 0),
        ("eval_every", 0),
        ("threads", 0),
        ("warmup_steps", -1),
        ("seed", -1),
        ("weight_decay", -0.1),
        ("weight_decay", math.nan),
        ("lr", 0.0),
        ("lr", math.inf),
        ("lr", math.nan),
    ],
)
def test_number_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidArgumentError, match=name):
        TrainSettings.with_defaults(**{name: value})


@pytest.mark.parametrize("given", [{"bits": 3}, {"norm": Norm.L1}])
def test_settings_of_quantized_votes_are_refused_with_another_rule(given):
    with pytest.raises(InvalidArgumentError, match="quantized"):
        TrainSettings.with_defaults(rule=RuleName.MAJORITY, **given)


@pytest.mark.parametrize("bits", [0, 9])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(InvalidArgumentError, match="1 to 8"):
        TrainSettings.with_defaults(rule=RuleName.QUANTIZED, bits=bits)


def test_exchange_is_refused_where_no_votes_are_exchanged():
    with pytest.raises(InvalidArgumentError, match="leave exchange at auto"):
        TrainSettings.with_defaults(rule=RuleName.GLOBAL_ADAMW, exchange=ExchangeName.DIRECT)


def test_tokenizer_is_refused_for_images():
    with pytest.raises(InvalidArgumentError, match="tokenizer"):
        TrainSettings.with_defaults(task=TaskName.IMAGES, tokenizer=Tokenizer.BYTE)


def test_workers_default_to_the_world_of_torchrun(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert TrainSettings.with_defaults().workers == 6


def test_settings_fit_into_json():
    settings = TrainSettings.with_defaults(rule=RuleName.QUANTIZED)
    assert json.loads(json.dumps(settings.to_json()))["norm"] == "l1"


def test_overlap_is_refused_where_no_votes_are_exchanged():
    with pytest.raises(InvalidArgumentError, match="overlap"):
        TrainSettings.with_defaults(rule=RuleName.GLOBAL_ADAMW, overlap=True)
