"""Records of arguments: what they refuse, and what a former argument is told."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import distlion
from distlion import (
    Agreement,
    ClipNorm,
    FeedbackVote,
    MomentumSync,
    Nodes,
    Precision,
    QuantizedVote,
    Replicas,
    Timeouts,
)
from distlion.crew import CrewLion
from distlion.crew.lanes import OneLane
from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.local.outer_step import OuterStep
from distlion.step.arguments import CUT, FORMER
from distlion.step.settings import Settings
from distlion.virtual.members import make_roster

RECORDS = (
    Replicas(),
    Replicas(check_every=None, on_mismatch="repair"),
    Agreement(),
    Agreement(every=10, on_disagreement="exclude"),
    Precision(),
    Precision(exp_avg=torch.bfloat16, rounding="stochastic"),
    Timeouts(),
    Timeouts(init_s=30.0, step_s=5, busy_s=90.5),
)

WRONG: tuple[tuple[type, dict[str, Any], type[Exception], str], ...] = (
    (Replicas, {"check_every": 0}, InvalidArgumentError, "check_every=0: expected 1 or more"),
    (Replicas, {"check_every": 2.0}, UnsupportedTypeError, "check_every=2.0: expected an integer"),
    (Replicas, {"check_every": True}, UnsupportedTypeError, "check_every=True: expected an intege"),
    (Replicas, {"on_mismatch": "warn"}, InvalidArgumentError, "on_mismatch='warn': expected one"),
    (Agreement, {"every": 0}, InvalidArgumentError, "every=0: expected 1 or more"),
    (Agreement, {"every": "10"}, UnsupportedTypeError, "every='10': expected an integer"),
    (
        Agreement,
        {"every": 1, "on_disagreement": "ignore"},
        InvalidArgumentError,
        "on_disagreement='ig",
    ),
    (Precision, {"exp_avg": torch.float16}, InvalidArgumentError, "exp_avg=torch.float16: expecte"),
    (Precision, {"exp_avg": "float32"}, InvalidArgumentError, "exp_avg='float32': expected torch."),
    (Precision, {"rounding": "up"}, InvalidArgumentError, "rounding='up': expected one of 'near"),
    (Timeouts, {"init_s": -1}, InvalidArgumentError, "init_s=-1: expected a number above 0"),
    (Timeouts, {"step_s": 0}, InvalidArgumentError, "step_s=0: expected a number above 0"),
    (Timeouts, {"busy_s": 1e12}, InvalidArgumentError, "busy_s=1000000000000.0: expected at most"),
    (Timeouts, {"step_s": None}, UnsupportedTypeError, "step_s=None: expected a number"),
    (Timeouts, {"busy_s": "60"}, UnsupportedTypeError, "busy_s='60': expected a number"),
)


OF_NUMPY: tuple[Callable[[], tuple[object, object]], ...] = (
    lambda: (Replicas(check_every=np.int64(8)), Replicas(check_every=8)),
    lambda: (Agreement(every=np.int32(8)), Agreement(every=8)),
    lambda: (MomentumSync(every=np.int64(8)), MomentumSync(every=8)),
    lambda: (Nodes(ranks_per_node=np.int64(2)), Nodes(ranks_per_node=2)),
    lambda: (ClipNorm(max_norm=np.float32(0.5)), ClipNorm(max_norm=0.5)),
    lambda: (Timeouts(init_s=np.int64(9), step_s=np.float32(8)), Timeouts(init_s=9, step_s=8.0)),
    lambda: (FeedbackVote(bits=np.int64(1)), FeedbackVote(bits=1)),
    lambda: (
        QuantizedVote(bits=np.int64(4), step=np.float32(0.5)),
        QuantizedVote(bits=4, step=0.5),
    ),
    lambda: (
        OuterStep(lr=np.float32(0.5), momentum=np.float64(0.5), nesterov=False),
        OuterStep(lr=0.5, momentum=0.5, nesterov=False),
    ),
    lambda: (
        Settings(bucket_elements=np.int64(9), seed=np.uint64(8), weight=np.int64(7)),
        Settings(bucket_elements=9, seed=8, weight=7),
    ),
    lambda: (
        make_roster(np.int64(2), weights=np.array([1, 2]), settings=Settings()),
        make_roster(2, weights=[1, 2], settings=Settings()),
    ),
)


@pytest.mark.parametrize("number", range(len(OF_NUMPY)))
def test_numbers_of_numpy_are_kept_as_those_of_python(number: int) -> None:
    given, expected = OF_NUMPY[number]()
    assert repr(given) == repr(expected)  # workers compare the text of their settings


def test_numpys_truth_is_no_number() -> None:
    with pytest.raises(UnsupportedTypeError, match="check_every=True: expected an integer"):
        Replicas(check_every=np.True_)


@pytest.mark.parametrize("record", RECORDS, ids=repr)
def test_the_text_of_a_record_rebuilds_it(record: object) -> None:
    assert eval(repr(record), {**vars(distlion), "torch": torch}) == record


@pytest.mark.parametrize(("kind", "fields", "error", "said"), WRONG)
def test_an_error_names_record_field_and_value(
    kind: type, fields: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        kind(**fields)
    assert str(caught.value).startswith(f"{kind.__name__}.{said}")


def test_nobody_is_excluded_without_measurements() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Use Agreement\(every=10, on_disagreement="):
        Agreement(on_disagreement="exclude")


def list_params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


def make_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)


MAKERS: dict[str, Callable[..., Any]] = {
    "real": lambda **options: distlion.DistributedLion(list_params(), **options),
    "cub": lambda **options: distlion.lion_cub(list_params(), **options),
    "virtual": lambda **options: distlion.VirtualCluster(list_params(), workers=2, **options),
    "local": lambda **options: distlion.LocalSteps(make_sgd(list_params()), **options),
    "virtual local": lambda **options: distlion.VirtualLocalSteps(
        list_params(), make_sgd, workers=2, **options
    ),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", FORMER)
def test_a_former_argument_names_its_record(name: str, maker: str) -> None:
    with pytest.raises(UnsupportedTypeError) as caught:
        MAKERS[maker](**{name: 7})
    argument, record, field = FORMER[name].replace("=...", "").replace("(", "=").split("=")[:3]
    assert f"{name}=7" in str(caught.value) and FORMER[name] in str(caught.value)
    # What it names exists.
    assert isinstance(getattr(distlion, record), type)
    assert field.split(",")[0].rstrip(")") in getattr(distlion, record).__dataclass_fields__
    assert argument in Settings.__dataclass_fields__


@pytest.mark.parametrize("maker", ["local", "virtual local"])
@pytest.mark.parametrize("name", CUT)
def test_an_argument_that_is_gone_says_what_to_write(name: str, maker: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=rf"^{name}=7: .* Leave it out") as caught:
        MAKERS[maker](**{name: 7})
    advised = set(re.findall(r"(\w+)=(?!\w)", str(caught.value)))
    assert advised
    assert advised <= inspect.signature(distlion.LocalSteps).parameters.keys()


@pytest.mark.parametrize("maker", ["real", "local"])
@pytest.mark.parametrize("name", ["replicas", "agreement", "timeouts"])
def test_a_record_of_another_kind_is_refused(name: str, maker: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=rf"{name}=ClipNorm.*: expected {name.title()}"):
        MAKERS[maker](**{name: distlion.ClipNorm(1.0)})


@pytest.mark.parametrize("maker", ["local", "virtual local"])
def test_votes_on_deltas_leave_nobody_out(maker: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"leave nobody out.* Use Agreement\(every=3\)"):
        MAKERS[maker](agreement=Agreement(3, "exclude"))


def test_a_crew_waits_less_for_silent_members_unless_told() -> None:
    membership: Any = SimpleNamespace(newcomers="zeros", rendezvous=None, lanes=OneLane())
    for given, start_s in ((Timeouts(), 30), (Timeouts(step_s=5), 30), (Timeouts(init_s=300), 300)):
        optimizer = CrewLion(membership, list_params(), timeouts=given)
        assert optimizer.settings.timeouts == Timeouts(start_s, given.step_s)
    assert distlion.DistributedLion(list_params()).settings.timeouts.start_s == 300


def test_groups_are_kept_for_the_longest_wait() -> None:
    assert (Timeouts(3, 5, 4).connect_s, Timeouts(3, 5, 4).group_s) == (5, 5)
    assert (Timeouts(9, 5, 40).connect_s, Timeouts(9, 5, 40).group_s) == (9, 40)


def test_settings_default_to_what_the_optimizer_does() -> None:
    parameters = inspect.signature(distlion.DistributedLion).parameters
    for field in fields(Settings):
        assert parameters[field.name].default == field.default, field.name
