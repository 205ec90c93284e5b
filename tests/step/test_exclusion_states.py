"""Running agreements in saved states, and failures that leave a step whole."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import distlion
from disagreeing import Grads, flip_last, flip_last_of_three, make_cluster, step
from distlion.errors import CheckpointError, InvalidArgumentError
from distlion.step.agreement import Exclusion


def test_a_state_goes_on_with_the_same_workers_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole, param = make_cluster(4)
    grads = Grads(4, flip_last)
    for _ in range(25):
        step(whole, param, grads.draw())
    state, saved = copy.deepcopy(whole.state_dict()), param.detach().clone()
    rest = [grads.draw() for _ in range(5)]
    for drawn in rest:
        step(whole, param, drawn)

    resumed, other = make_cluster(4)
    other.data.copy_(saved)
    resumed.load_state_dict(state)
    caplog.clear()
    assert len(state["param_groups"][0]["agreement"]) == 4
    for drawn in rest:
        step(resumed, other, drawn)

    assert [each.getMessage() for each in caplog.records] == [
        "votes of workers 3 do not count, as when saved"
    ]
    assert torch.equal(other, param)
    assert [each.excluded for each in resumed.diagnostics()] == [(3,)] * 5
    assert resumed.state_dict()["param_groups"] == whole.state_dict()["param_groups"]


def test_a_state_that_was_taken_does_not_change() -> None:
    cluster, param = make_cluster(3)
    grads = Grads(3, flip_last)
    step(cluster, param, grads.draw())
    state = cluster.state_dict()
    before = copy.deepcopy(state["param_groups"])
    step(cluster, param, grads.draw())

    assert state["param_groups"] == before


def test_without_the_option_a_state_forgets_who_agreed() -> None:
    cluster, param = make_cluster(3)
    step(cluster, param, Grads(3).draw())
    plain, _ = make_cluster(3, agreement=distlion.Agreement(every=1))
    plain.load_state_dict(cluster.state_dict())

    assert "agreement" in cluster.param_groups[0]
    assert "agreement" not in plain.param_groups[0]


@pytest.mark.parametrize(
    "kept", [{"0": 0.5}, [2.0, 0.5, 0.5], [float("nan")], [1], ["half"], None, 0.5]
)
def test_a_state_with_other_values_is_refused(kept: object) -> None:
    cluster, _ = make_cluster(3)
    state = cluster.state_dict()
    state["param_groups"][0]["agreement"] = kept
    before = copy.deepcopy(cluster.param_groups)
    with pytest.raises(CheckpointError, match="Remove agreement from the saved groups"):
        cluster.load_state_dict(state)

    assert repr(cluster.param_groups) == repr(before)


def test_who_joins_begins_with_the_median_of_the_others() -> None:
    groups: list[dict[str, Any]] = [{"agreement": {"4": 0.3, "7": 0.4, "8": 0.42, "9": 0.1}}]

    assert Exclusion(groups, (4, 7, 8, 11)).find_excluded() == {0}
    assert list(groups[0]["agreement"].items()) == [
        ("4", 0.3),
        ("7", 0.4),
        ("8", 0.42),
        ("11", 0.4),
    ]


def test_states_name_workers_by_place() -> None:
    cluster, param = make_cluster(4)
    grads = Grads(4, lambda worker, number: worker == 1)
    for _ in range(20):
        step(cluster, param, grads.draw())
    cluster.change_workers([1, 2, 3, 7])
    resumed, _ = make_cluster(4)
    resumed.load_state_dict(cluster.state_dict())

    assert resumed.param_groups[0]["agreement"].keys() == {"0", "1", "2", "3"}
    assert resumed._examiner is not None
    assert resumed._examiner.excluded == {0}


@pytest.mark.parametrize("workers", [3, 5])
def test_a_state_of_other_workers_says_nothing_of_these(workers: int) -> None:
    cluster, param = make_cluster(4)
    grads, others = Grads(4, flip_last), Grads(workers, flip_last)
    for _ in range(20):
        step(cluster, param, grads.draw())
    trained, weight = make_cluster(workers)
    for _ in range(20):
        step(trained, weight, others.draw())
    groups = cluster.state_dict()["param_groups"]
    trained.load_state_dict({**trained.state_dict(), "param_groups": groups})

    assert set(trained.param_groups[0]["agreement"].values()) == {0.5}


def test_an_early_state_takes_back_what_was_counted_later() -> None:
    cluster, param = make_cluster(4)
    first = copy.deepcopy(cluster.state_dict())
    del first["param_groups"][0]["agreement"]
    grads = Grads(4, flip_last)
    for _ in range(20):
        step(cluster, param, grads.draw())
    cluster.load_state_dict(first)

    assert set(cluster.param_groups[0]["agreement"].values()) == {0.5}


def test_who_was_absent_counts_as_soon_as_it_votes_again() -> None:
    cluster, param = make_cluster(4)
    grads = Grads(4)
    for number in range(70):
        for worker, grad in enumerate(grads.draw()):
            if worker != 2 or number >= 60:
                param.grad = grad
                cluster.collect(worker)
        cluster.step()

    assert {each.excluded for each in cluster.diagnostics()} == {()}
    assert min(cluster.param_groups[0]["agreement"].values()) > 0.6


def test_a_logger_that_raises_leaves_the_step_whole() -> None:
    class Strict(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError(record.getMessage())

    cluster, param = make_cluster(3)
    grads, handler, raised = Grads(3, flip_last_of_three), Strict(), 0
    logging.getLogger("distlion").addHandler(handler)
    try:
        for _ in range(20):
            try:
                step(cluster, param, grads.draw())
            except RuntimeError:
                raised += 1
    finally:
        logging.getLogger("distlion").removeHandler(handler)

    assert (raised, cluster.committed_step) == (1, 20)
    assert cluster.diagnostics()[-1].excluded == (2,)
    cluster.state_dict()


def test_a_group_that_is_refused_leaves_no_trace() -> None:
    cluster, param = make_cluster(3)
    step(cluster, param, Grads(3).draw())
    with pytest.raises(InvalidArgumentError, match="Expected a rule without memory"):
        cluster.add_param_group(
            {"params": [nn.Parameter(torch.zeros(3))], "aggregation": distlion.FeedbackVote()}
        )
    state = cluster.state_dict()
    state["param_groups"][0]["aggregation"] = "FeedbackVote(bits=1)"
    with pytest.raises(CheckpointError, match="Expected a rule without memory"):
        cluster.load_state_dict(state)
    step(cluster, param, Grads(3).draw())

    assert (len(cluster.param_groups), cluster.committed_step) == (1, 2)


def test_workers_of_a_cluster_that_change_keep_their_agreement() -> None:
    cluster, param = make_cluster(4)
    grads = Grads(4, flip_last)
    for _ in range(30):
        step(cluster, param, grads.draw())
    cluster.change_workers([3, 0, 1, 7])
    honest = grads.draw()[:1] * 4
    step(cluster, param, honest)

    assert cluster.diagnostics()[-1].excluded == (0,)

    # Of two that are left, nobody knows which one is wrong.
    cluster.change_workers([3, 0])
    step(cluster, param, honest[:2])
    step(cluster, param, honest[:2])
    assert cluster.diagnostics()[-1].excluded == ()
    assert (
        cluster.param_groups[0]["agreement"]["3"] < cluster.param_groups[0]["agreement"]["0"] - 0.1
    )
