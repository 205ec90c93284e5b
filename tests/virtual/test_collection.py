"""What becomes of the gradients that are collected: clipped, held, written back, diagnosed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import distlion
from distlion import ClipNorm, VirtualCluster
from distlion.errors import NonFiniteError
from drawn import make_params, set_grads
from virtual_steps import SIZES, do_step, make_cluster

GLOBAL = ClipNorm(0.5, scope="global")


@pytest.mark.parametrize("workers", [1, 3])
def test_parameter_that_is_not_contiguous_moves_as_its_copy_would(workers: int) -> None:
    values = torch.randn(9, 70, generator=torch.Generator().manual_seed(0))
    strided, dense = nn.Parameter(values.clone().t()), nn.Parameter(values.t().contiguous())
    assert not strided.is_contiguous()
    for param in (strided, dense):
        cluster = VirtualCluster([param], workers=workers, lr=1e-2, weight_decay=0.1)
        for step in range(3):
            do_step(cluster, {"a": param}, step)

    assert not torch.equal(dense, values.t())
    assert torch.equal(strided, dense)


def test_a_worker_that_is_not_collected_counts_in_the_norm_as_one_without_a_gradient() -> None:
    left_out, params = make_cluster(3, clip_norm=GLOBAL)
    without, others = make_cluster(3, clip_norm=GLOBAL)
    for worker in (0, 2):
        for cluster, its_params in ((left_out, params), (without, others)):
            set_grads(its_params.values(), worker, 0)
            cluster.collect(worker)
    without.collect(1)  # has no gradient
    left_out.step()
    without.step()

    for worker in range(3):
        assert all(map(torch.equal, left_out.exp_avg(worker), without.exp_avg(worker)))


@pytest.mark.parametrize("scope", ["worker", "global"])
def test_a_lone_worker_is_clipped_as_a_process_that_is_alone(scope: Any) -> None:
    clip = ClipNorm(0.5, scope=scope)
    cluster, params = make_cluster(1, clip_norm=clip)
    unclipped, loose = make_cluster(1)
    others = make_params(SIZES)
    optimizer = distlion.DistributedLion(others.items(), lr=1e-2, clip_norm=clip)
    for step in range(2):
        do_step(cluster, params, step)
        do_step(unclipped, loose, step)
        set_grads(others.values(), 0, step)
        optimizer.step()

    momenta = [optimizer.state[param]["exp_avg"] for param in others.values()]
    assert all(map(torch.equal, cluster.exp_avg(0), momenta))
    assert not any(map(torch.equal, unclipped.exp_avg(0), momenta))


@pytest.mark.parametrize("scope", ["worker", "global"])
def test_the_norm_of_each_worker_is_what_clipping_measured(scope: Any) -> None:
    cluster, params = make_cluster(3, clip_norm=ClipNorm(0.5, scope=scope))
    assert cluster.grad_norm(0) is None
    squares = []
    for worker in (0, 2):
        set_grads(params.values(), worker, 0)
        grads = [param.grad for param in params.values() if param.grad is not None]
        squares.append(sum(float(grad.double().square().sum()) for grad in grads))
        cluster.collect(worker)
    cluster.step()

    first, third = squares
    mean = (first + third) / 3  # the second has no gradient
    expected = [mean] * 3 if scope == "global" else [first, 0.0, third]
    found = [cluster.grad_norm(worker) for worker in range(3)]
    assert found == pytest.approx([square**0.5 for square in expected], rel=1e-12)
    assert make_cluster(3)[0].grad_norm(0) is None


@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_skipped_step_leaves_the_norm_of_the_last_commit(n_workers: int) -> None:
    cluster, params = make_cluster(n_workers, clip_norm=GLOBAL, nonfinite="skip")
    norms = []
    for step in range(2):
        for worker in range(n_workers):
            set_grads(params.values(), worker, step)
            if step == 1 and worker == 0:
                params["b"].grad[0] = float("inf")
            cluster.collect(worker)
        cluster.step()
        norms.append(cluster.grad_norm(0))
    assert norms[0] == norms[1] != 0.0


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_of_several_bad_workers_the_first_is_named_in_whatever_order_they_come(
    nonfinite: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, params = make_cluster(3, clip_norm=GLOBAL, nonfinite=nonfinite)
    for worker in (2, 0, 1):
        set_grads(params.values(), worker, 0)
        if worker > 0:
            params["b"].grad[worker] = float("inf")
        cluster.collect(worker)

    if nonfinite == "skip":
        cluster.step()
        assert "b is not finite on rank 1" in caplog.text
    else:
        with pytest.raises(NonFiniteError, match="of b is not finite on worker 1") as caught:
            cluster.step()
        assert caught.value.culprits == (1,)
    assert cluster.committed_step == 0
    assert all(not momentum.any() for worker in range(3) for momentum in cluster.exp_avg(worker))


@pytest.mark.parametrize("clip_norm", [None, GLOBAL])
def test_the_order_in_which_workers_are_collected_changes_no_bit(clip_norm: Any) -> None:
    in_order, params = make_cluster(3, clip_norm=clip_norm, agreement=distlion.Agreement(every=1))
    shuffled, others = make_cluster(3, clip_norm=clip_norm, agreement=distlion.Agreement(every=1))
    for step in range(3):
        do_step(in_order, params, step)
        for worker in (2, 0, 1):
            set_grads(others.values(), worker, step)
            shuffled.collect(worker)
        shuffled.step()

    assert all(torch.equal(params[name], others[name]) for name in SIZES)
    for worker in range(3):
        assert all(map(torch.equal, in_order.exp_avg(worker), shuffled.exp_avg(worker)))
    assert in_order.diagnostics() == shuffled.diagnostics()


def test_what_was_diagnosed_stays_when_groups_are_added_and_states_loaded() -> None:
    cluster, params = make_cluster(3, agreement=distlion.Agreement(every=1))
    do_step(cluster, params, 0)
    found = cluster.diagnostics()
    assert [each.parameter for each in found] == ["a", "b"]
    params["c"] = nn.Parameter(torch.zeros(3))
    cluster.add_param_group({"params": [("c", params["c"])]})
    assert cluster.diagnostics() == found
    do_step(cluster, params, 1)
    found = cluster.diagnostics()
    assert [(each.step, each.parameter) for each in found[2:]] == [(1, name) for name in "abc"]

    cluster.load_state_dict(cluster.state_dict())

    assert cluster.diagnostics() == found


def test_a_parameter_without_elements_is_no_diagnosis_and_no_obstacle() -> None:
    params = {name: nn.Parameter(torch.zeros(size)) for name, size in (("no", 0), ("a", 70))}
    cluster = VirtualCluster(params.items(), workers=3, agreement=distlion.Agreement(every=1))
    do_step(cluster, params, 0)

    assert [each.parameter for each in cluster.diagnostics()] == ["a"]


def test_a_refused_first_worker_does_not_fix_the_hyperparameters_of_the_step() -> None:
    cluster, params = make_cluster(2, nonfinite="raise")
    set_grads(params.values(), 0, 0)
    next(iter(params.values())).grad.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(NonFiniteError):
        cluster.collect(0)
    cluster.param_groups[0]["lr"] /= 2
    do_step(cluster, params, 0)
    assert cluster.committed_step == 1
