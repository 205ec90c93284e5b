import json
import math

import pytest

import matrix
from distlion.errors import InvalidArgumentError
from distlion_lab.cli.failure import is_first_rank
from distlion_lab.tasks.text import Tokenizer
from distlion_lab.training.methods import BASELINE_NAMES
from distlion_lab.training.train_settings import (
    OnDisagreement,
    Overlap,
    PartitionName,
    TaskName,
    TrainSettings,
    check_meeting_place,
    torchrun_world_size,
)


@pytest.mark.parametrize("task", list(TaskName))
@pytest.mark.parametrize("rule", [*matrix.NAMES, "signum", *BASELINE_NAMES])
def test_defaults_are_valid_for_every_task_and_rule(task, rule):
    assert TrainSettings.with_defaults(task, rule).rule == rule


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


@pytest.mark.parametrize("rule", ["", "majorty", "quantized", "quantized-9", "majority-sync-10"])
def test_unknown_rule_is_refused_with_the_place_where_all_are_listed(rule):
    with pytest.raises(InvalidArgumentError, match="'distlion train --help' lists all"):
        TrainSettings.with_defaults(rule=rule)


@pytest.mark.parametrize(
    "rule", ["global-sgd-betas-90-95", "dgc-betas-90-95", "majority-betas-100-95"]
)
def test_rule_without_such_betas_is_refused_with_what_they_look_like(rule):
    with pytest.raises(InvalidArgumentError, match=r"90-95 for \(0\.9, 0\.95\)"):
        TrainSettings.with_defaults(rule=rule)


def test_unknown_exchange_is_refused_with_the_known_ones():
    with pytest.raises(InvalidArgumentError, match=r"auto.*all-reduce.*parameter-server"):
        TrainSettings.with_defaults(exchange="direct")


@pytest.mark.parametrize("exchange", ["auto", *matrix.PATTERNS])
def test_every_pattern_may_be_named(exchange):
    assert TrainSettings.with_defaults(exchange=exchange).exchange == exchange


def test_exchange_is_refused_where_no_votes_are_exchanged():
    with pytest.raises(InvalidArgumentError, match="leave exchange at auto"):
        TrainSettings.with_defaults(rule="global-adamw", exchange="all-reduce")


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


def set_world(monkeypatch, **variables):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "variables",
    [{}, {"RANK": "1"}, {"WORLD_SIZE": "6"}, {"RANK": "", "WORLD_SIZE": ""}],
)
def test_half_of_a_world_is_none(variables, monkeypatch):
    set_world(monkeypatch, **variables)
    assert torchrun_world_size() is None
    assert is_first_rank()


@pytest.mark.parametrize(("rank", "size"), [("x", "2"), ("0", "two"), ("2", "2"), ("0", "0")])
def test_a_world_that_cannot_be_is_refused_by_the_names_of_its_variables(rank, size, monkeypatch):
    set_world(monkeypatch, RANK=rank, WORLD_SIZE=size)
    with pytest.raises(InvalidArgumentError, match=f"RANK is '{rank}' and WORLD_SIZE '{size}'"):
        torchrun_world_size()


@pytest.mark.parametrize(("host", "port"), [("", "29500"), ("a", ""), ("a", "x"), ("a", "65536")])
def test_a_world_without_a_meeting_place_is_refused(host, port, monkeypatch):
    set_world(monkeypatch, MASTER_ADDR=host, MASTER_PORT=port)
    with pytest.raises(InvalidArgumentError, match=f"MASTER_ADDR is '{host}' and MASTER_PORT"):
        check_meeting_place()
    set_world(monkeypatch, MASTER_ADDR="::1", MASTER_PORT="29500")
    check_meeting_place()


def test_settings_fit_into_json():
    settings = TrainSettings.with_defaults(partition=PartitionName.EVEN)
    assert json.loads(json.dumps(settings.to_json()))["partition"] == "even"


def test_overlap_is_refused_where_no_votes_are_exchanged():
    with pytest.raises(InvalidArgumentError, match="overlap"):
        TrainSettings.with_defaults(rule="global-adamw", overlap=Overlap.AUTO)


def test_overlap_by_name_is_what_the_optimizer_takes():
    assert [each.choice for each in map(Overlap, ("off", "on", "auto"))] == [False, True, "auto"]


@pytest.mark.parametrize(
    ("rule", "lr", "weight_decay"),
    [
        ("majority", 5e-4, 0.1),
        ("signum", 5e-4, 0.1),
        ("global-lion", 5e-4, 0.1),
        ("global-adamw", 1e-3, 0.1),
        ("global-adamw-betas-90-95", 1e-3, 0.1),
        ("ddp-powersgd", 5e-4, 0.1),
        ("terngrad", 1e-3, 0.1),
        ("graddrop", 1e-3, 0.1),
        ("dgc", 0.1, 5e-4),
    ],
)
def test_learning_rate_and_weight_decay_default_to_those_of_the_rules_optimizer(
    rule, lr, weight_decay
):
    settings = TrainSettings.with_defaults(rule=rule)
    assert (settings.lr, settings.weight_decay) == (lr, weight_decay)


def test_given_weight_decay_stands_for_every_rule():
    assert TrainSettings.with_defaults(rule="dgc", weight_decay=0.0).weight_decay == 0


@pytest.mark.parametrize(
    ("rule", "votes"),
    [
        ("signum", True),
        ("signsgd", True),
        ("terngrad", False),
        ("graddrop", False),
        ("dgc", False),
        ("ddp-fp16", False),
        ("ddp-powersgd", False),
        ("majority-betas-90-95", True),
        ("global-lion-betas-90-95", False),
        ("global-adamw-betas-90-95", False),
    ],
)
def test_baselines_average_gradients_and_sign_methods_vote(rule, votes):
    assert TrainSettings.with_defaults(rule=rule).method.votes is votes


@pytest.mark.parametrize("name", ["momentum_sync_every", "diagnose_every"])
def test_what_concerns_votes_is_refused_where_there_are_none(name):
    assert getattr(TrainSettings.with_defaults(**{name: 3}), name) == 3
    with pytest.raises(InvalidArgumentError, match=f"{name} is 3 with the rule global-lion"):
        TrainSettings.with_defaults(rule="global-lion", **{name: 3})
    with pytest.raises(InvalidArgumentError, match=f"{name} is 0"):
        TrainSettings.with_defaults(**{name: 0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "global-lion"}, "the rule global-lion, whose workers do not vote"),
        ({"every": 8}, "every 8: all votes on deltas are counted. Omit every"),
        ({"diagnose_every": None}, "no diagnose_every, which compares workers"),
        ({"rule": "feedback-2"}, "the rule feedback-2, which counts what a worker sent in earlier"),
        ({"rule": "feedback-1-cautious-betas-90-95"}, "which counts what a worker sent in earlier"),
        ({"momentum_sync_every": 4}, "momentum_sync_every 4: a mean over all workers. Omit it"),
    ],
)
def test_workers_are_excluded_only_where_votes_are_compared(changes, message):
    given = {"diagnose_every": None if changes.get("rule") == "global-lion" else 10, **changes}
    with pytest.raises(InvalidArgumentError, match=message):
        TrainSettings.with_defaults(on_disagreement=OnDisagreement.EXCLUDE, **given)
    assert TrainSettings.with_defaults(**given).on_disagreement is OnDisagreement.WARN
