"""What a virtual cluster promises beyond the bits of real workers."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import distlion
from distlion import ClipNorm, MomentumSync, VirtualCluster
from distlion.errors import (
    CheckpointError,
    InvalidArgumentError,
    NonFiniteError,
    SparseGradientError,
    UnsupportedTypeError,
)
from drawn import make_params, set_grads
from virtual_steps import SIZES, do_step, make_cluster


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"workers": 0}, InvalidArgumentError, "workers=0: expected 1 to"),
        ({"workers": 2.0}, UnsupportedTypeError, "expected an integer"),
        ({"workers": True}, UnsupportedTypeError, "expected an integer"),
        ({"exchange": "auto"}, UnsupportedTypeError, "nothing to measure"),
        ({"aggregation": "majority"}, UnsupportedTypeError, "expected a rule"),
        ({"momentum_sync": 100}, UnsupportedTypeError, "MomentumSync"),
        ({"agreement": 10}, UnsupportedTypeError, r"agreement=10: expected Agreement\(\.\.\.\)"),
        ({"seed": -1}, InvalidArgumentError, "seed"),
        (
            {"precision": distlion.Precision(rounding="stochastic")},
            InvalidArgumentError,
            "bfloat16",
        ),
        ({"nonfinite": "ignore"}, InvalidArgumentError, "nonfinite"),
    ],
)
def test_wrong_arguments_are_refused(
    wrong: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        make_cluster(**{"workers": 3, **wrong})


def test_worker_is_collected_once_in_a_step_and_must_exist() -> None:
    cluster, params = make_cluster()
    set_grads(params.values(), 0, 0)
    cluster.collect(0)

    with pytest.raises(InvalidArgumentError, match="worker 0 was collected already in step 0"):
        cluster.collect(0)
    for stranger in (-1, 3):
        with pytest.raises(InvalidArgumentError, match=f"no worker {stranger} among 3"):
            cluster.collect(stranger)
        with pytest.raises(InvalidArgumentError, match=f"no worker {stranger} among 3"):
            cluster.exp_avg(stranger)

    cluster.step()
    set_grads(params.values(), 0, 1)
    cluster.collect(0)


def test_worker_that_is_not_collected_abstains() -> None:
    left_out, params = make_cluster(3)
    without, others = make_cluster(3)
    for worker in (0, 2):
        for cluster, its_params in ((left_out, params), (without, others)):
            set_grads(its_params.values(), worker, 0)
            cluster.collect(worker)
    without.collect(1)  # has no gradient
    left_out.step()
    without.step()

    assert all(torch.equal(params[name], others[name]) for name in SIZES)
    assert all(not momentum.any() for momentum in left_out.exp_avg(1))


def test_state_is_one_momentum_for_each_worker_and_no_more() -> None:
    cluster, params = make_cluster(5)
    do_step(cluster, params, 0)

    for param in params.values():
        assert set(cluster.state[param]) == {"exp_avg"}
        assert cluster.state[param]["exp_avg"].shape == (5, *param.shape)
        assert param.grad is None
    assert cluster.exp_avg(3)[0].data_ptr() == cluster.state[params["a"]]["exp_avg"][3].data_ptr()


def test_gradients_are_let_go_when_they_are_collected() -> None:
    """Their memory belongs to the next worker, whose gradient may overwrite it."""
    cluster, params = make_cluster(3)
    reference, others = make_cluster(3)
    buffers = {name: torch.empty(size) for name, size in SIZES.items()}
    for step in range(3):
        do_step(reference, others, step)
        for worker in range(3):
            set_grads(others.values(), worker, step)
            for name, buffer in buffers.items():
                params[name].grad = buffer.copy_(others[name].grad)
                others[name].grad = None
            cluster.collect(worker)
        cluster.step()

    assert all(torch.equal(params[name], others[name]) for name in SIZES)


@pytest.mark.parametrize("workers", [1, 3])
def test_gradient_that_is_not_finite_raises_and_names_worker_and_parameter(workers: int) -> None:
    cluster, params = make_cluster(workers)
    before = {name: param.detach().clone() for name, param in params.items()}
    set_grads(params.values(), 0, 0)
    params["b"].grad[3] = float("nan")

    def collect_and_step() -> None:  # a single worker is heard in step()
        cluster.collect(0)
        cluster.step()

    with pytest.raises(NonFiniteError, match="of b is not finite on worker 0") as caught:
        collect_and_step()

    assert (caught.value.rank, caught.value.step, caught.value.culprits) == (0, 0, (0,))
    assert all(torch.equal(params[name], before[name]) for name in SIZES)
    assert all(not momentum.any() for momentum in cluster.exp_avg(0))


def test_cluster_goes_on_after_the_first_worker_raised_and_not_after_a_later_one() -> None:
    cluster, params = make_cluster(2)
    saved = cluster.state_dict()
    for bad in (0, 1):
        for worker in range(bad):
            set_grads(params.values(), worker, 0)
            cluster.collect(worker)
        set_grads(params.values(), bad, 0)
        params["a"].grad[0] = float("inf")
        with pytest.raises(NonFiniteError):
            cluster.collect(bad)

    for call in (cluster.step, cluster.state_dict, lambda: cluster.collect(0)):
        with pytest.raises(CheckpointError, match="momenta are past step 0"):
            call()
    cluster.load_state_dict(saved)  # what is torn is replaced
    reference, others = make_cluster(2)
    do_step(cluster, params, 0)
    do_step(reference, others, 0)
    assert all(torch.equal(params[name], others[name]) for name in SIZES)


@pytest.mark.parametrize(
    "arguments", [{"nonfinite": "skip"}, {"clip_norm": ClipNorm(1.0, scope="global")}]
)
def test_gradients_that_wait_for_each_other_leave_the_momenta_alone(
    arguments: dict[str, Any],
) -> None:
    cluster, params = make_cluster(2, **arguments)
    set_grads(params.values(), 0, 0)
    cluster.collect(0)

    assert all(not momentum.any() for momentum in cluster.exp_avg(0))


@pytest.mark.parametrize(
    "arguments", [{"workers": 1}, {"workers": 3, "clip_norm": ClipNorm(1.0, scope="global")}]
)
def test_cluster_that_holds_gradients_goes_on_after_one_that_is_not_finite(
    arguments: dict[str, Any],
) -> None:
    cluster, params = make_cluster(**arguments)
    reference, others = make_cluster(**arguments)
    for worker in range(cluster.workers):
        set_grads(params.values(), worker, 0)
        if worker == cluster.workers - 1:
            params["b"].grad[3] = float("nan")
        cluster.collect(worker)

    culprit = cluster.workers - 1
    with pytest.raises(NonFiniteError, match=f"of b is not finite on worker {culprit}") as caught:
        cluster.step()

    assert caught.value.culprits == (culprit,)
    for step in range(2):
        do_step(cluster, params, step)
        do_step(reference, others, step)
    assert all(torch.equal(params[name], others[name]) for name in SIZES)


def test_votes_of_a_worker_that_was_refused_do_not_count() -> None:
    """Its votes on an earlier bucket were encoded before the later one turned out bad."""
    cluster, params = make_cluster(3, bucket_elements=64)
    reference, others = make_cluster(3, bucket_elements=64)
    set_grads(params.values(), 0, 0)
    params["b"].grad[3] = float("inf")
    with pytest.raises(NonFiniteError):
        cluster.collect(0)
    for worker in (1, 2):
        for each, its_params in ((cluster, params), (reference, others)):
            set_grads(its_params.values(), worker, 0)
            each.collect(worker)

    cluster.step()
    reference.step()

    assert all(torch.equal(params[name], others[name]) for name in SIZES)


def test_sparse_gradient_is_refused_before_anything_moves() -> None:
    cluster, params = make_cluster(2)
    params["a"].grad = torch.zeros(70).to_sparse()

    with pytest.raises(SparseGradientError, match="a has a sparse gradient"):
        cluster.collect(1)


def test_parameter_that_is_unfrozen_later_is_refused() -> None:
    params = make_params(SIZES)
    params["a"].requires_grad_(False)
    cluster = VirtualCluster(params.items(), workers=2)
    params["a"].requires_grad_(True)

    with pytest.raises(InvalidArgumentError, match="a was frozen when this optimizer was made, or"):
        cluster.collect(0)


@pytest.mark.parametrize("sync", [None, MomentumSync(every=3, select="b")])
def test_resumed_cluster_goes_on_with_the_same_bits(sync: MomentumSync | None) -> None:
    whole, params = make_cluster(3, momentum_sync=sync, aggregation=distlion.Average())
    for step in range(18):
        do_step(whole, params, step)
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    resumed, others = make_cluster(3, momentum_sync=sync, aggregation=distlion.TernaryVote())
    for name in SIZES:
        others[name].data.copy_(params[name])
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for step in range(18, 25):
        do_step(whole, params, step)
        do_step(resumed, others, step)

    assert resumed.committed_step == 25
    assert all(torch.equal(params[name], others[name]) for name in SIZES)
    for worker in range(3):
        assert all(map(torch.equal, whole.exp_avg(worker), resumed.exp_avg(worker)))


def test_state_of_one_lion_becomes_everybodys_and_that_of_other_clusters_is_refused() -> None:
    params = make_params(SIZES)
    lion = distlion.Lion(params.values(), lr=1e-2)
    set_grads(params.values(), 0, 0)
    lion.step()
    cluster = VirtualCluster(make_params(SIZES).values(), workers=3)

    cluster.load_state_dict(lion.state_dict())

    for worker in range(3):
        momenta = [lion.state[param]["exp_avg"] for param in params.values()]
        assert all(map(torch.equal, cluster.exp_avg(worker), momenta))
    with pytest.raises(CheckpointError, match="shape"):
        cluster.load_state_dict(make_cluster(4)[0].state_dict())


def test_calls_between_collect_and_step_that_would_lose_votes_are_refused() -> None:
    cluster, params = make_cluster(2)
    set_grads(params.values(), 0, 0)
    cluster.collect(0)

    with pytest.raises(InvalidArgumentError, match=r"workers \[0\] were collected"):
        cluster.load_state_dict(cluster.state_dict())
    with pytest.raises(InvalidArgumentError, match=r"workers \[0\] were collected"):
        cluster.add_param_group({"params": [("c", nn.Parameter(torch.zeros(3)))]})


def test_groups_schedules_and_added_groups_work_as_in_every_optimizer() -> None:
    cluster, params = make_cluster(2, weight_decay=0.0)
    late = nn.Parameter(torch.zeros(5))
    cluster.add_param_group({"params": [("late", late)], "lr": 0.25})
    schedule = LambdaLR(cluster, lambda step: 0.5**step)
    before = params["a"].detach().clone()

    late.grad = torch.ones(5)
    set_grads(params.values(), 0, 0)
    cluster.collect(0)
    cluster.step()
    schedule.step()

    assert torch.equal(late, torch.full((5,), -0.25))
    assert torch.allclose((params["a"] - before).abs(), torch.tensor(1e-2))
    assert [group["lr"] for group in cluster.param_groups] == [5e-3, 0.125]


def test_hundreds_of_workers_fit() -> None:
    cluster, params = make_cluster(256)
    do_step(cluster, params, 0)

    assert cluster.committed_step == 1
    assert len({momentum.sum().item() for momentum in cluster.state[params["b"]]["exp_avg"]}) > 250


@pytest.mark.parametrize(
    ("ids", "newcomers", "words"),
    [
        ((0, 0), "zeros", "all different"),
        ((-1,), "zeros", "-1"),
        ((), "zeros", "workers=0"),
        ((0, 1), "ones", "newcomers='ones'"),
    ],
)
def test_members_that_cannot_be_are_refused_and_the_others_stay(
    ids: tuple[int, ...], newcomers: Any, words: str
) -> None:
    cluster = distlion.VirtualCluster([torch.nn.Parameter(torch.zeros(3))], workers=2)
    with pytest.raises(InvalidArgumentError, match=words):
        cluster.change_workers(ids, newcomers=newcomers)
    assert cluster.workers == 2


def test_members_do_not_change_while_a_step_is_collected() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    cluster = distlion.VirtualCluster([param], workers=2)
    param.grad = torch.ones(3)
    cluster.collect(0)
    with pytest.raises(InvalidArgumentError, match="change_workers"):
        cluster.change_workers((0, 1, 2))


def test_who_stays_keeps_its_momentum_and_newcomers_get_what_was_chosen() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    cluster = distlion.VirtualCluster([param], workers=3)
    for worker in range(3):
        param.grad = torch.full((3,), float(worker + 1))
        cluster.collect(worker)
    cluster.step()
    first, _, third = (cluster.exp_avg(worker)[0].clone() for worker in range(3))
    cluster.change_workers((7, 2, 0), newcomers="mean")
    assert torch.equal(cluster.exp_avg(0)[0], (third + first) / 2)
    assert torch.equal(cluster.exp_avg(1)[0], third)
    assert torch.equal(cluster.exp_avg(2)[0], first)
