"""Votes of workers that disagree with the others do not count, for as long as they disagree."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
from distlion.errors import CheckpointError, DisagreeingWorkersWarning, InvalidArgumentError
from distlion.kernels import Coins
from distlion.options.exclusion import Exclusion
from distlion.options.reliability import LARGEST_GAP
from distlion.virtual.route import VirtualRoute

SIZE, LR, BETA1, BETA2 = 200, 0.01, 0.9, 0.99
"""Below 256 elements, a parameter is its own sample."""

Flips = Callable[[int, int], bool]


def make_cluster(workers: int, **options: Any) -> tuple[distlion.VirtualCluster, Tensor]:
    param = nn.Parameter(torch.zeros(SIZE))
    arguments: dict[str, Any] = {
        "lr": LR,
        "betas": (BETA1, BETA2),
        "aggregation": distlion.TernaryVote(),
        "diagnose_every": 1,
        "on_disagreement": "exclude",
        **options,
    }
    return distlion.VirtualCluster([("w", param)], workers=workers, **arguments), param


class Grads:
    """Gradients of workers around a common one; some workers hand in the negative."""

    def __init__(self, workers: int, flips: Flips = lambda worker, step: False) -> None:
        self._workers, self._flips = workers, flips
        self._generator = torch.Generator().manual_seed(workers)
        self._step = 0

    def draw(self) -> list[Tensor]:
        common = 2 * torch.randn(SIZE, generator=self._generator)
        grads = [
            (common + torch.randn(SIZE, generator=self._generator))
            * (-1 if self._flips(worker, self._step) else 1)
            for worker in range(self._workers)
        ]
        self._step += 1
        return grads


def step(cluster: distlion.VirtualCluster, param: Tensor, grads: list[Tensor]) -> None:
    for worker, grad in enumerate(grads):
        param.grad = grad.clone()
        cluster.collect(worker)
    cluster.step()


class Oracle:
    """The option in plain float arithmetic on whole votes, by its definition."""

    def __init__(self, workers: int, every: int) -> None:
        self.x = torch.zeros(SIZE)
        self.m = torch.zeros(workers, SIZE)
        self.a = [0.5] * workers
        self.out: set[int] = set()
        self._every, self._step = every, 0

    def step(self, grads: list[Tensor]) -> None:
        g = torch.stack(grads)
        signs = (self.m * BETA1 + g * (1 - BETA1)).sign()
        counted = [worker for worker in range(len(g)) if worker not in self.out]
        self.x = self.x - LR * signs[counted].sum(0).sign()
        self.m = self.m * BETA2 + g * (1 - BETA2)
        if self._step % self._every == 0:
            for worker in range(len(g)):
                others = (signs.sum(0) - signs[worker]).sign()
                is_compared = (others != 0) & (signs[worker] != 0)
                share = (others == signs[worker])[is_compared].double().mean().item()
                self.a[worker] = 0.95 * self.a[worker] + 0.05 * share
            usual = median(self.a)
            self.out = {worker for worker, a in enumerate(self.a) if a < usual - LARGEST_GAP}
        self._step += 1


@pytest.mark.filterwarnings("ignore::distlion.errors.DisagreeingWorkersWarning")
@pytest.mark.parametrize(("workers", "every"), [(3, 1), (8, 1), (8, 3)])
def test_votes_count_as_the_definition_says(workers: int, every: int) -> None:
    def flips(worker: int, step: int) -> bool:
        return (worker == 1 and step < 40) or worker == 6

    cluster, param = make_cluster(workers, diagnose_every=every)
    oracle, grads = Oracle(workers, every), Grads(workers, flips)
    ever = set()
    for number in range(200):
        drawn, before = grads.draw(), frozenset(oracle.out)
        step(cluster, param, drawn)
        oracle.step(drawn)
        assert torch.allclose(param, oracle.x, rtol=0, atol=1e-5), number
        assert all(map(torch.allclose, cluster.exp_avg(1), [oracle.m[1]]))
        if number % every == 0:
            assert set(cluster.diagnostics()[-1].excluded) == before
        ever |= oracle.out

    # Who flips is left out, and returns after it has stopped.
    assert ever == {1, 6} & set(range(workers))
    assert oracle.out == {6} & set(range(workers))


def test_honest_workers_all_count_and_no_bit_changes() -> None:
    params = []
    for choice in ("exclude", "warn"):
        cluster, param = make_cluster(8, on_disagreement=choice)
        grads = Grads(8)
        for _ in range(40):
            step(cluster, param, grads.draw())
        params.append(param.detach())
        assert {each.excluded for each in cluster.diagnostics()} == {()}
    assert torch.equal(*params)


def test_of_two_workers_both_count() -> None:
    cluster, param = make_cluster(2)
    grads = Grads(2, lambda worker, step: worker == 1)
    for _ in range(40):
        step(cluster, param, grads.draw())

    assert {each.excluded for each in cluster.diagnostics()} == {()}


def test_a_vote_that_does_not_count_has_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, count = [], VirtualRoute.count

    def note(route: VirtualRoute, coins: Coins) -> Tensor:
        sent.append([bool(votes.any()) for votes in route._votes])
        return count(route, coins)

    monkeypatch.setattr(VirtualRoute, "count", note)
    cluster, param = make_cluster(3)
    for _ in range(20):
        step(cluster, param, [torch.ones(SIZE), torch.ones(SIZE), -torch.ones(SIZE)])

    assert sent[0] == [True] * 3
    assert sent[-1] == [True, True, False]


def test_margins_are_those_of_the_votes_that_count() -> None:
    cluster, param = make_cluster(3)
    for _ in range(40):
        step(cluster, param, [torch.ones(SIZE), torch.ones(SIZE), -torch.ones(SIZE)])

    found = cluster.diagnostics()
    assert (found[0].margin, found[0].excluded) == (pytest.approx(1 / 3), ())
    assert (found[-1].margin, found[-1].excluded) == (1.0, (2,))
    # The others of a worker that agrees are one for it and one against it: a tie.
    assert found[-1].agreement_of == (None, None, 0.0)


def test_weights_count_for_those_that_are_not_left_out() -> None:
    cluster, param = make_cluster(3, weights=[1, 1, 5])
    for _ in range(40):
        step(cluster, param, [torch.ones(SIZE), torch.ones(SIZE), -torch.ones(SIZE)])

    # The heavy worker leads until it is left out.
    excluded = [each.excluded for each in cluster.diagnostics()]
    led = excluded.count(())
    assert 0 < led < 20
    assert excluded == [()] * led + [(2,)] * (40 - led)
    assert torch.allclose(param, torch.full((SIZE,), LR * (led - (40 - led))), atol=1e-5)


def test_changes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    cluster, param = make_cluster(3)
    grads = Grads(3, lambda worker, step: worker == 2 and step < 20)
    with caplog.at_level(logging.WARNING, logger="distlion"):
        for _ in range(200):
            step(cluster, param, grads.draw())

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "votes of worker 2 do not count from the next step on: running agreement" in said[0]
    assert "votes of worker 2 count again" in said[1]


def test_the_warning_says_that_votes_do_not_count() -> None:
    cluster, param = make_cluster(5)
    grads = Grads(5, lambda worker, step: worker == 4)
    for _ in range(99):
        step(cluster, param, grads.draw())
    with pytest.warns(
        DisagreeingWorkersWarning, match="Votes are left out while a running agreement is so low"
    ):
        step(cluster, param, grads.draw())


def flip_last_of_three(worker: int, step: int) -> bool:
    return worker == 2


def flip_last(worker: int, step: int) -> bool:
    return worker == 3


def test_a_state_goes_on_with_the_same_workers_left_out() -> None:
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
    assert len(state["param_groups"][0]["agreement"]) == 4
    for drawn in rest:
        step(resumed, other, drawn)

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
    plain, _ = make_cluster(3, on_disagreement="warn")
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
    assert resumed._laid_out.examiner is not None
    assert resumed._laid_out.examiner.excluded == {0}


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"diagnose_every": None}, "Add diagnose_every=10"),
        ({"momentum_sync": distlion.MomentumSync(every=3)}, "Leave momentum_sync out"),
        ({"clip_norm": distlion.ClipNorm(1.0, scope="global")}, "Leave clip_norm out"),
        ({"on_disagreement": "ignore"}, "expected one of 'warn', 'exclude'"),
        ({"aggregation": distlion.FeedbackVote()}, "Expected a rule without memory"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        make_cluster(3, **options)
