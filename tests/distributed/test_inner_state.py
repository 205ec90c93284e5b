"""A worker whose inner state is not finite begins anew, and training goes on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import distlion
from cluster import run_workers
from distlion.errors import InnerStateResetWarning, NonFiniteError
from drawn import make_params, set_grads
from local_runs import SHAPES, are_equal, copies, make_adamw, make_lion, make_sgd, train

pytestmark = pytest.mark.distributed

EVERY, N_VOTES, WORKERS = 2, 5, 2
INNERS = {"AdamW": make_adamw, "SGD": make_sgd, "Lion": make_lion}
CASES: dict[str, dict[str, Any]] = {
    "skip": {"nonfinite": "skip"},
    "abstain": {"nonfinite": "abstain"},
}

Ended = tuple[list[Tensor], int, list[str], bool]


def set_grads_once_nan(params: list[Any], worker: int, step: int) -> None:
    """Set gradients, of which worker 1 has a NaN in the first step of the second period."""
    set_grads(params, worker, step)
    if worker == 1 and step == EVERY:
        params[1].grad[2] = torch.nan


def meet_one_nan(rank: int, world_size: int) -> dict[str, Ended]:
    ended: dict[str, Ended] = {}
    for inner, make_inner in INNERS.items():
        for case, options in CASES.items():
            params = list(make_params(SHAPES).values())
            optimizer = distlion.LocalSteps(make_inner(params), every=EVERY, **options)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", InnerStateResetWarning)
                for step in range(EVERY * N_VOTES):
                    set_grads_once_nan(params, rank, step)
                    optimizer.step()
                optimizer.vote()
            said = [str(each.message) for each in caught]
            state = [each for kept in optimizer.state.values() for each in kept.values()]
            is_finite = all(each.isfinite().all() for each in state if isinstance(each, Tensor))
            common = copies(optimizer.common_point)
            ended[f"{inner}, {case}"] = common, optimizer.committed_step, said, is_finite
    params = list(make_params(SHAPES).values())
    optimizer = distlion.LocalSteps(make_lion(params), every=EVERY)
    for step in range(2 * EVERY - 1):
        set_grads_once_nan(params, rank, step)
        optimizer.step()
    with pytest.raises(NonFiniteError, match="parameter 1 of group 0"):
        optimizer.step()
    return ended


def test_one_nan_costs_one_vote_and_all_train_on() -> None:
    ended = run_workers(meet_one_nan, WORKERS)
    for name, (common, votes, said, is_finite) in ended[1].items():
        assert is_finite, name
        assert all(each.isfinite().all() for each in common), name
        assert are_equal(common, ended[0][name][0]), name
        assert votes == N_VOTES - ("skip" in name), name
        assert len(said) == 1, name
        assert "parameter 1 of group 0" in said[0], name
        assert "rank 1" in said[0], name
        assert ended[0][name][2] == [], name
    for inner in INNERS:
        for case in CASES:
            with pytest.warns(InnerStateResetWarning, match="rank 1"):
                found = meet_one_nan_virtually(inner, case)
            assert are_equal(found, ended[0][f"{inner}, {case}"][0]), (inner, case)


def meet_one_nan_virtually(inner: str, case: str) -> list[Tensor]:
    params = list(make_params(SHAPES).values())
    cluster = distlion.VirtualLocalSteps(
        params, INNERS[inner], workers=WORKERS, every=EVERY, **CASES[case]
    )
    for step in range(EVERY * N_VOTES):
        for worker in range(WORKERS):
            set_grads_once_nan(params, worker, step)
            cluster.collect(worker)
        cluster.step()
    cluster.vote()
    return cluster.common_point


@pytest.mark.parametrize("kind", ["Rprop", "NAdam"])
def test_an_inner_state_begins_anew_where_its_optimizer_begins(kind: str) -> None:
    """Rprop's step sizes begin with lr, and NAdam's product of momenta with 1."""
    params = list(make_params(SHAPES).values())
    inner = getattr(torch.optim, kind)(params, lr=1e-2)
    optimizer = distlion.LocalSteps(inner, every=EVERY, nonfinite="abstain")

    def spoil(*_: object) -> None:
        inner.state[params[1]]["prev" if kind == "Rprop" else "exp_avg"][0] = torch.nan

    train(optimizer, params, 0, 0, EVERY - 1)
    with inner.register_step_post_hook(spoil), pytest.warns(InnerStateResetWarning):
        train(optimizer, params, 0, EVERY - 1, EVERY)
    fresh = torch.nn.Parameter(optimizer.common_point[1].clone())
    train(optimizer, params, 0, EVERY, EVERY + 1)
    fresh.grad = params[1].grad
    expected = getattr(torch.optim, kind)([fresh], lr=1e-2)
    expected.step()
    assert torch.equal(params[1], fresh)
    found, wanted = optimizer.state[params[1]], expected.state[fresh]
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_state_that_is_made_with_its_optimizer_is_set_to_zero() -> None:
    params = list(make_params(SHAPES).values())
    optimizer = distlion.LocalSteps(make_lion(params), every=EVERY, nonfinite="abstain")
    for step in range(2 * EVERY - 1):
        set_grads_once_nan(params, 1, step)
        optimizer.step()
    with pytest.warns(InnerStateResetWarning, match="rank 0"):
        optimizer.step()
    assert not optimizer.state[params[1]]["exp_avg"].any()


def test_lion_alone_keeps_a_nan_as_torchs_optimizers_do() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = distlion.Lion([param], lr=0.5)
    for grad in (torch.nan, 1.0):
        param.grad = torch.tensor([grad, 1.0])
        optimizer.step()
    assert param.tolist() == [0.0, -1.0]
