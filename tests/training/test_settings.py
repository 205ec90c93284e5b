import json
import math

import pytest

from distlion.errors import InvalidArgumentError
from distlion.tasks import Tokenizer
from distlion.training import (
    ExchangeName,
    Norm,
    PartitionName,
    RuleName,
    TaskName,
    TrainSettings,
)


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


@pytest.mark.parametrize(
    ("task", "partition"),
    [
        (TaskName.TEXT, PartitionName.BY_CLASS),
        (TaskName.IMAGES, PartitionName.BY_BOOK),
        (TaskName.IMAGES, PartitionName.CONTIGUOUS),
    ],
)
def test_partition_of_another_task_is_refused(task, partition):
    with pytest.raises(InvalidArgumentError, match=f"partition is {partition.value} with the task"):
        TrainSettings.with_defaults(task, partition=partition)


@pytest.mark.parametrize(
    ("task", "partition"),
    [(TaskName.TEXT, PartitionName.CONTIGUOUS), (TaskName.IMAGES, PartitionName.EVEN)],
)
def test_partition_defaults_by_the_task(task, partition):
    assert TrainSettings.with_defaults(task).partition is partition


def test_partition_by_class_has_a_default_alpha():
    settings = TrainSettings.with_defaults(TaskName.IMAGES, partition=PartitionName.BY_CLASS)
    assert settings.alpha == 0.1


@pytest.mark.parametrize("partition", [None, PartitionName.EVEN])
def test_alpha_without_the_partition_by_class_is_refused(partition):
    with pytest.raises(InvalidArgumentError, match="by-class"):
        TrainSettings.with_defaults(TaskName.IMAGES, partition=partition, alpha=0.5)


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.inf, math.nan])
def test_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(InvalidArgumentError, match="alpha is"):
        TrainSettings.with_defaults(TaskName.IMAGES, partition=PartitionName.BY_CLASS, alpha=alpha)


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


@pytest.mark.parametrize(
    ("rule", "lr", "weight_decay"),
    [
        (RuleName.MAJORITY, 5e-4, 0.1),
        (RuleName.SIGNUM, 5e-4, 0.1),
        (RuleName.DDP_POWERSGD, 5e-4, 0.1),
        (RuleName.TERNGRAD, 1e-3, 0.1),
        (RuleName.GRADDROP, 1e-3, 0.1),
        (RuleName.DGC, 0.1, 5e-4),
    ],
)
def test_learning_rate_and_weight_decay_default_to_those_of_the_rules_optimizer(
    rule, lr, weight_decay
):
    settings = TrainSettings.with_defaults(rule=rule)
    assert (settings.lr, settings.weight_decay) == (lr, weight_decay)


def test_given_weight_decay_stands_for_every_rule():
    assert TrainSettings.with_defaults(rule=RuleName.DGC, weight_decay=0.0).weight_decay == 0


@pytest.mark.parametrize(
    ("rule", "votes"),
    [
        (RuleName.SIGNUM, True),
        (RuleName.SIGNSGD, True),
        (RuleName.TERNGRAD, False),
        (RuleName.GRADDROP, False),
        (RuleName.DGC, False),
        (RuleName.DDP_FP16, False),
        (RuleName.DDP_POWERSGD, False),
    ],
)
def test_rivals_average_gradients_and_sign_methods_vote(rule, votes):
    assert rule.votes is votes


@pytest.mark.parametrize("name", ["sync_every", "diagnose_every"])
def test_what_concerns_votes_is_refused_where_there_are_none(name):
    assert getattr(TrainSettings.with_defaults(**{name: 3}), name) == 3
    with pytest.raises(InvalidArgumentError, match=f"{name} is 3 with the rule global-lion"):
        TrainSettings.with_defaults(rule=RuleName.GLOBAL_LION, **{name: 3})
    with pytest.raises(InvalidArgumentError, match=f"{name} is 0"):
        TrainSettings.with_defaults(**{name: 0})
